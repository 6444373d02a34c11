"""Hugging Face directories: transformers loads our exports, and the error for a damaged file names it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import QWEN3, one_device_mesh, random_params, tiny_config
from programs import ROOT
from safetensors.numpy import load_file, save_file

from psearch_jax.models import decoder
from psearch_jax.models.hf import load_hf, read_config, resolve, save_hf
from psearch_jax.sharding import STORAGE, param_shardings
from psearch_jax.types import UserError

EXPORTS = ["one-file", "sharded", "sharded-qwen3"]


def assert_equal_params(a, b) -> None:
    flat_a, flat_b = dict(nnx.to_flat_state(a)), dict(nnx.to_flat_state(b))
    assert flat_a.keys() == flat_b.keys()
    for path in flat_a:
        np.testing.assert_array_equal(flat_a[path].get_value(), flat_b[path].get_value(), err_msg=str(path))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_tokenizer):
    """A complete exported directory; a test that damages it works on a copy."""
    config = tiny_config(tied=False, eos_ids=tuple(sorted(tiny_tokenizer.stop_ids)))
    out = tmp_path_factory.mktemp("export") / "policy"
    save_hf(random_params(config), config, tiny_tokenizer.name, out)
    return out


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("shard_bytes", "family"), [(10**9, {}), (20_000, {}), (20_000, QWEN3)], ids=EXPORTS)
def test_transformers_loads_what_we_write(tmp_path, tiny_tokenizer, tied, shard_bytes, family):
    """An export with a transposed, renamed or missing tensor is another model in every other library."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stops = tuple(sorted(tiny_tokenizer.stop_ids))
    config = tiny_config(**{"tied": tied, "rope_theta": 1e6, "eos_ids": stops, **family})
    params = random_params(config)
    out = tmp_path / "out"
    save_hf(params, config, tiny_tokenizer.name, out, shard_bytes=shard_bytes)
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) == 1 if shard_bytes == 10**9 else len(files) > 3
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

    theirs, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if family else "Qwen2ForCausalLM")
    written = {k: v for f in files for k, v in load_file(out / f).items()}
    state = {k: v.numpy() for k, v in theirs.state_dict().items()}
    assert set(state) - set(written) == ({"lm_head.weight"} if tied else set())
    for name, array in written.items():
        np.testing.assert_array_equal(state[name], array)

    ids = np.random.default_rng(0).integers(0, 400, (2, 33)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    model = nnx.merge(decoder.graphdef(config, jnp.float32), params)
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(model.logits(model.hidden(ids)[0], 1.0, config.vocab_rows))
    assert np.max(np.abs(ours - expected)) / np.max(np.abs(expected)) <= 1e-5
    assert AutoTokenizer.from_pretrained(out).encode("older") == tiny_tokenizer.hf.encode("older")
    again, loaded = load_hf(out)
    assert again == config
    assert_equal_params(loaded, params)
    eos = theirs.generation_config.eos_token_id
    assert sorted([eos] if isinstance(eos, int) else eos) == sorted(tiny_tokenizer.stop_ids)

    again, loaded = load_hf(out, lambda abstract: param_shardings(abstract, STORAGE, one_device_mesh()))
    assert again == config
    assert_equal_params(loaded, params)


def test_bfloat16_export_keeps_every_value_rounded(tmp_path, tiny_tokenizer):
    """The bf16 export is not the float32 weights rounded once, or does not load again."""
    config = tiny_config()
    params = random_params(config)
    save_hf(params, config, tiny_tokenizer.name, tmp_path / "out", dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again, loaded = load_hf(tmp_path / "out")
    assert again.eos_ids == ()
    assert_equal_params(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params))


def test_a_refused_or_failed_export_changes_nothing(exported, tmp_path):
    """An existing directory is not written to, and a failed export leaves no directory that looks like a model."""
    config, out = tiny_config(), tmp_path / "out"
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken: exists already"):
        save_hf(random_params(config), config, exported, tmp_path / "taken")
    with pytest.raises(UserError, match="down_kernel: found shape"):
        save_hf(random_params(tiny_config(mlp=32)), config, exported, out)
    with pytest.raises(UserError, match="k_norm: found shape None, the config asks for"):
        save_hf(random_params(config), replace(config, qk_norm=True), exported, out)
    gone = random_params(config)
    dict(nnx.to_flat_state(gone))["layers", "up_kernel"].get_value().delete()  # reached in the middle of the file
    with pytest.raises(RuntimeError):
        save_hf(gone, config, exported, out)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def edited(exported, tmp_path, change):
    """A copy of the exported directory whose weights `change` has edited."""
    out = tmp_path / "damaged"
    shutil.copytree(exported, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def refused(directory, *words) -> None:
    with pytest.raises(UserError) as caught:
        load_hf(directory)
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


NAME = "model.layers.1.mlp.up_proj.weight"


def add_layer(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = weights[NAME]


def transpose(weights):
    weights[NAME] = np.ascontiguousarray(weights[NAME].T)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop(NAME), [NAME, "weights are missing", "damaged: "]),
        (add_layer, ["model.layers.2.mlp.up_proj.weight", "unknown", "model.safetensors"]),
        (transpose, [NAME, "(32, 64)", "(64, 32)", "model.safetensors"]),
    ],
    ids=["missing", "unknown", "transposed"],
)
def test_other_tensors_are_refused(exported, tmp_path, change, words):
    """Weights that do not match config.json are named with their file, and never loaded or left random."""
    refused(edited(exported, tmp_path, change), *words)


@pytest.mark.parametrize("size", [0, 5, 300, -100], ids=["empty", "stub", "header-cut", "tail-cut"])
def test_a_truncated_file_is_refused(exported, tmp_path, size):
    """An incomplete download ends in a traceback or in zeros, not in an error that names the file."""
    out = tmp_path / "damaged"
    shutil.copytree(exported, out)
    content = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(content[:size])
    refused(out, "model.safetensors")


def test_files_that_hold_no_tensor_or_no_map_are_refused(exported, tmp_path):
    """An empty weight file, or an index without its map, ends in an IndexError instead of one line."""
    out = tmp_path / "damaged"
    shutil.copytree(exported, out)
    save_file({}, out / "model.safetensors")
    refused(out, "none of its 1 safetensors files", "missing")
    (out / "model.safetensors.index.json").write_text("{}")
    refused(out, "model.safetensors.index.json", "weight_map")
    (out / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    refused(out, "absent.safetensors", "not found")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "no_family"}, ["model_type", "no_family", "qwen2", "qwen3"]),
        ({"model_type": "qwen3_moe"}, ["model_type", "qwen3_moe", "qwen2", "qwen3"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias", "true", "false"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "true", "false"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, ["rope_parameters", "yarn"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "an object"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_attention_heads": "many"}, ["num_attention_heads", "many"]),
        ({"num_key_value_heads": 3}, ["heads=4", "kv_heads=3"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_another_architecture_is_refused(exported, tmp_path, change, words):
    """A Llama, a mixture-of-experts or a YaRN-scaled checkpoint loads and computes nonsense."""
    out = tmp_path / "other"
    shutil.copytree(exported, out)
    raw = json.loads((out / "config.json").read_text()) | change
    raw = {k: v for k, v in raw.items() if v is not None}
    (out / "config.json").write_text(json.dumps(raw))
    refused(out, "config.json", *words)


def test_a_config_without_kv_heads_has_as_many_as_heads(exported, tmp_path):
    """A config.json that transformers accepts is refused, with a message about another field."""
    out = tmp_path / "other"
    shutil.copytree(exported, out)
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"num_key_value_heads": None}))
    assert read_config(out).kv_heads == read_config(out).heads == raw["num_attention_heads"]
    (out / "generation_config.json").write_text('{"eos_token_id": {}}')
    refused(out, "generation_config.json", "eos_token_id")


def test_damaged_or_absent_json_is_refused(exported, tmp_path):
    """The error for a config.json that is truncated, a list, or absent does not name the file."""
    out = tmp_path / "other"
    shutil.copytree(exported, out)
    for text in ('{"model_type": "qwen2"', "[1]"):
        (out / "config.json").write_text(text)
        refused(out, "config.json")
    (out / "config.json").unlink()
    refused(out, "config.json", "not found")
    with pytest.raises(UserError, match="is not a directory"):
        resolve("./nowhere")


def test_both_spellings_of_the_rotary_base_are_read(exported, tmp_path):
    """transformers 4 writes rope_theta, version 5 rope_parameters; if one is ignored, the base becomes 10,000."""
    out = tmp_path / "other"
    shutil.copytree(exported, out)
    raw = json.loads((out / "config.json").read_text())
    for drop in ("rope_theta", "rope_parameters"):
        kept = {k: v for k, v in raw.items() if k != drop}
        kept |= {"rope_theta": 5e5} if drop == "rope_parameters" else {"rope_parameters": {"rope_theta": 5e5}}
        (out / "config.json").write_text(json.dumps(kept))
        assert read_config(out).rope_theta == 5e5


@pytest.mark.slow
def test_the_host_holds_one_tensor_at_a_time(tmp_path):
    """A 16 GB host that assembles all layers of a 7B model before it passes one on runs out of memory."""
    command = [sys.executable, "tests/support/host_memory.py", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]  # it also compares the loaded and the written weights
    figures = json.loads(done.stdout)
    assert figures["arrays"] == pytest.approx(1.05, abs=0.01)
    assert figures["load_over_arrays"] < 0.7 and figures["export_over_arrays"] < 0.3

"""Hugging Face directories: transformers loads our exports, and the error for a damaged file names it."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import TINY, by_name, one_device_mesh, random_params, same_bits, tiny_config
from safetensors.numpy import load_file, save_file

from psearch_jax.config import FAMILIES, Family, find_family
from psearch_jax.models import decoder
from psearch_jax.models.hf import load_hf, read_config, resolve, save_hf
from psearch_jax.sharding import STORAGE, param_shardings
from psearch_jax.types import UserError

# A family with the options of another, added by one entry.
SLIDING = {"sliding_window": 4096}
MISTRAL = Family(
    "mistral", "MistralForCausalLM", FAMILIES["llama"].options, only={"sliding_window": None}, defaults=SLIDING
)
EXPORTS = {"one-file": {}, **TINY, "mistral": {**TINY["llama"], "family": "mistral"}}


def assert_equal_params(a, b) -> None:
    ours, theirs = by_name(a), by_name(b)
    assert ours.keys() == theirs.keys() and same_bits(ours, theirs)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_tokenizer):
    """A complete exported directory; a test that damages it works on a copy."""
    config = tiny_config(tied=False, eos_ids=tuple(sorted(tiny_tokenizer.stop_ids)))
    out = tmp_path_factory.mktemp("export") / "policy"
    save_hf(random_params(config), config, tiny_tokenizer.name, out)
    return out


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("export", EXPORTS)
def test_transformers_loads_what_we_write(tmp_path, tiny_tokenizer, tied, export, monkeypatch):
    """transformers loads an export as the same model, in one file or several, and so do we."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setitem(FAMILIES, "mistral", MISTRAL)
    shard_bytes, stops = 10**9 if export == "one-file" else 20_000, tuple(sorted(tiny_tokenizer.stop_ids))
    config = tiny_config(**{"tied": tied, "rope_theta": 1e6, "eos_ids": stops, **EXPORTS[export]})
    params = random_params(config)
    out = tmp_path / "out"
    save_hf(params, config, tiny_tokenizer.name, out, shard_bytes=shard_bytes)
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) == 1 if shard_bytes == 10**9 else len(files) > 3
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

    theirs, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == find_family(config).hf_class
    assert theirs.config.bos_token_id == config.bos_id
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
    for shardings in (None, lambda abstract: param_shardings(abstract, STORAGE, one_device_mesh())):
        again, loaded = load_hf(out, shardings)
        assert again == config and again.family == theirs.config.model_type == (config.family or "qwen2")
        assert_equal_params(loaded, params)
    eos = theirs.generation_config.eos_token_id
    assert sorted([eos] if isinstance(eos, int) else eos) == sorted(tiny_tokenizer.stop_ids)


def test_bfloat16_export_keeps_every_value_rounded(tmp_path, tiny_tokenizer):
    """A bfloat16 export holds the float32 weights rounded once."""
    config = tiny_config()
    params = random_params(config)
    save_hf(params, config, tiny_tokenizer.name, tmp_path / "out", dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again, loaded = load_hf(tmp_path / "out")
    assert again.eos_ids == ()
    assert_equal_params(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params))


def test_a_refused_or_failed_export_changes_nothing(exported, tmp_path):
    """An existing directory is not written to, and a failed export leaves no directory."""
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


def refused(directory, *words) -> None:
    with pytest.raises(UserError) as caught:
        load_hf(directory)
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of the exported directory, to be damaged."""
    return shutil.copytree(exported, tmp_path / "copy")


NAME = "model.layers.1.mlp.up_proj.weight"


def add_layer(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = weights[NAME]


def transpose(weights):
    weights[NAME] = np.ascontiguousarray(weights[NAME].T)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop(NAME), [NAME, "weights are missing"]),
        (add_layer, ["model.layers.2.mlp.up_proj.weight", "unknown", "model.safetensors"]),
        (transpose, [NAME, "(32, 64)", "(64, 32)", "model.safetensors"]),
    ],
    ids=["missing", "unknown", "transposed"],
)
def test_other_tensors_are_refused(copy, change, words):
    """Weights that do not match config.json are named with their file, and never loaded or left random."""
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused(copy, *words)


def test_incomplete_weights_are_refused(copy):
    """A truncated or empty file, and an index without its map or its files, are one line that names the file."""
    file, index = copy / "model.safetensors", copy / "model.safetensors.index.json"
    content = file.read_bytes()
    for size in (0, 5, 300, -100):
        file.write_bytes(content[:size])
        refused(copy, "model.safetensors")
    save_file({}, file)
    refused(copy, "none of its 1 safetensors files", "missing")
    index.write_text("{}")
    refused(copy, "weight_map")
    index.write_text('{"weight_map": {"a": "absent.safetensors"}}')
    refused(copy, "absent.safetensors", "not found")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3_moe"}, ["model_type", "qwen3_moe", *FAMILIES]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias", "true", "false"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "true", "false"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, ["rope_parameters", "yarn"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, ["rope_scaling", "low_freq_factor"]),
        ({"model_type": "llama", "mlp_bias": True}, ["mlp_bias", "true", "false"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_attention_heads": "many"}, ["num_attention_heads", "many"]),
        ({"num_key_value_heads": 3}, ["heads=4", "kv_heads=3"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_another_architecture_is_refused(copy, change, words):
    """Other families, mixtures of experts and scaled positions are refused."""
    edit_config(copy, **change)
    refused(copy, "config.json", *words)


def test_one_entry_adds_a_family(tmp_path, tiny_tokenizer, monkeypatch):
    """Its own names are read and written; a record without a family belongs to the first with its options."""
    names = {"num_hidden_layers": "num_layers", "model.norm.weight": "ln_f.weight"}
    monkeypatch.setitem(FAMILIES, "other", replace(MISTRAL, model_type="other", names=names))
    config = tiny_config(**{**TINY["llama"], "family": "other"})
    params, out = random_params(config), tmp_path / "out"
    save_hf(params, config, tiny_tokenizer.name, out)
    fields, (again, loaded) = json.loads((out / "config.json").read_text()), load_hf(out)
    assert fields["num_layers"] == 2 and "num_hidden_layers" not in fields and fields["model_type"] == "other"
    assert "ln_f.weight" in load_file(out / "model.safetensors") and again.family == "other"
    assert_equal_params(loaded, params)
    assert find_family(replace(config, family="")) == FAMILIES["llama"]
    edit_config(out)  # deletes the null of sliding_window
    refused(out, "sliding_window is 4096, accepted: null")


def edit_config(directory, **changes) -> None:
    """Changes fields of config.json; None deletes one."""
    fields = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def test_configs_that_transformers_accepts(copy):
    """Without num_key_value_heads there are as many as heads; both spellings of the rotary base are read."""
    heads = read_config(copy).heads
    edit_config(copy, num_key_value_heads=None, rope_theta=None, rope_parameters={"rope_theta": 5e5})
    assert read_config(copy).kv_heads == heads and read_config(copy).rope_theta == 5e5
    edit_config(copy, rope_theta=4e5, rope_parameters=None)  # as transformers 4 writes it
    assert read_config(copy).rope_theta == 4e5
    (copy / "generation_config.json").write_text('{"eos_token_id": {}}')
    refused(copy, "generation_config.json", "eos_token_id")


def test_damaged_or_absent_json_is_refused(copy):
    """The error for a config.json that is truncated, a list, or absent names the file."""
    for text in ('{"model_type": "qwen2"', "[1]"):
        (copy / "config.json").write_text(text)
        refused(copy, "config.json")
    (copy / "config.json").unlink()
    refused(copy, "config.json", "not found")
    with pytest.raises(UserError, match="is not a directory"):
        resolve("./nowhere")

"""LoRA adapters in PEFT's format: written for PEFT, loaded from it, and trained further."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import random_params, tiny_config
from programs import completed
from runs import command, run, small_config

from psearch_jax.assembly import build
from psearch_jax.config import Lora
from psearch_jax.models import decoder, hf, lora, peft
from psearch_jax.sft.learner import row_batch
from psearch_jax.types import UserError

CONFIG = tiny_config(tied=False)
ADAPTER = Lora(3, 6.0)
IDS = np.arange(5, 29, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def adapters():
    rng = np.random.default_rng(3)
    fresh = lora.init_adapters(CONFIG, ADAPTER, 0)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), fresh)


def logits(params, adapter=ADAPTER):
    model = nnx.merge(decoder.graphdef(CONFIG, jnp.float32, lora=adapter), params)
    return np.asarray(model.logits(model.hidden(IDS)[0], 1.0, CONFIG.vocab_rows))


def test_peft_computes_the_same_with_them(adapters, tiny_tokenizer, tmp_path):
    """PEFT computes the same with our adapters, and we load what PEFT saves."""
    pytest.importorskip("torch", reason="torch is not installed")
    library = pytest.importorskip("peft", reason="peft is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    base = random_params(CONFIG, scale=0.3)
    hf.save_hf(base, CONFIG, tiny_tokenizer.name, tmp_path / "hf")
    peft.save_adapters(adapters, CONFIG, ADAPTER, str(tmp_path / "hf"), tmp_path / "adapters")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    model = library.PeftModel.from_pretrained(model, tmp_path / "adapters")
    with torch.no_grad():
        theirs = model(torch.as_tensor(IDS, dtype=torch.int64)).logits.numpy()
    ours = logits(lora.join_adapters(base, adapters))
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=1e-4)
    assert np.abs(ours - logits(base, None)).max() > 0.1  # the adapters do something

    model.save_pretrained(tmp_path / "again")
    again = peft.load_adapters(tmp_path / "again", CONFIG)
    for mine, read in zip(jax.tree.leaves(adapters), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(mine, read, atol=1e-6)


def test_other_adapters_are_refused(adapters, tmp_path):
    """Adapters of another model or kind are refused in one line."""
    good = tmp_path / "good"
    peft.save_adapters(adapters, CONFIG, ADAPTER, "base", good)

    def changed(**fields):
        place = tmp_path / next(iter(fields))
        shutil.copytree(good, place)
        record = json.loads((place / peft.CONFIG).read_text())
        (place / peft.CONFIG).write_text(json.dumps(record | fields))
        return place

    for place, words in (
        (changed(use_dora=True), "use_dora=True found, accepted: plain LoRA"),
        (changed(peft_type="IA3"), "peft_type='IA3'"),
        (changed(lora_alpha=None), "lora_alpha=None found"),
        (changed(r=5), "has shape"),
        (tmp_path / "absent", "not found"),
    ):
        with pytest.raises(UserError, match=words):
            peft.load_adapters(place, CONFIG)
    with pytest.raises(UserError, match="has shape|no base_model"):
        peft.load_adapters(good, replace(CONFIG, layers=CONFIG.layers + 1))
    (good / peft.WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read"):
        peft.load_adapters(good, CONFIG)


def weights(parts):
    return jax.tree.leaves(lora.split_adapters(parts.params)[1])


@pytest.mark.slow
def test_training_continues_adapters_and_evaluation_takes_them(tiny_policy, tmp_path):
    """A run starts from the given adapters, which are also its reference; a moved base is located again."""
    fields = {"model.lora_rank": 3, "model.lora_alpha": 6.0, "learning.learning_rate": 1e-2}
    base, exported = tmp_path / "base", tmp_path / "adapters"
    shutil.copytree(tiny_policy, base)
    run(command(tmp_path / "first", base, 2, **fields))
    base.rename(tmp_path / "moved")
    export = [sys.executable, "launch/export_hf.py", f"--checkpoint={tmp_path / 'first'}"]
    run([*export, "--adapters_only", f"--out={exported}"])  # needs no base weights
    refused = run([*export, f"--out={tmp_path / 'full'}"], expect=2)
    assert f"{base}, which does not exist" in refused.stderr and "symbolic link" in refused.stderr
    base.symlink_to(tmp_path / "moved")
    trained = build.from_path(small_config(tiny_policy), str(tmp_path / "first"))
    config = small_config(tiny_policy)
    config = replace(config, model=replace(config.model, path=str(tiny_policy), adapters=str(exported)))
    parts = build.engine(config)
    for a, b in zip(weights(trained), weights(parts), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(np.abs(x).max() > 0 for x in weights(parts)[1::2])

    learning = replace(config.learning, kl_coefficient=0.01)
    batch = row_batch([(np.arange(3, 60, dtype=np.int32), np.arange(57) > 20)])
    for dtype in ("float32", "bfloat16"):  # on a CPU, programs in bfloat16 get the weights in another form
        model = replace(config.model, dtype=dtype, sampling_dtype=dtype)
        made = build.training_run(replace(config, learning=learning, model=model))
        made.begin()
        for a, b in zip(jax.tree.leaves(made.state.params), weights(parts), strict=True):
            np.testing.assert_array_equal(a, b)
        by_reference = made.learner.reference_score(made.reference, batch)
        np.testing.assert_array_equal(by_reference, made.learner.score(made.state.params, batch))
        assert np.abs(by_reference).max() > 0

    with pytest.raises(UserError, match="config.model.lora_rank: found 4 with adapters of rank 3"):
        build.engine(replace(config, model=replace(config.model, lora_rank=4)))
    missing = completed(
        [sys.executable, *command(tmp_path / "x", tiny_policy, 1, **{"model.adapters": "/absent"})[1:]]
    )
    assert missing.returncode == 2 and "/absent" in missing.stderr and "Traceback" not in missing.stderr

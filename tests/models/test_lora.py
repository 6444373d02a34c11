"""Low-rank adapters: what they compute, what is trained, and their export as an ordinary model."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import TINY, by_name, random_params, tiny_config
from runs import command, final_params, run, small_config

from psearch_jax.assembly import build
from psearch_jax.config import Lora
from psearch_jax.models import decoder, hf, lora
from psearch_jax.models.backend import Backend
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.train.trainer import train_step
from psearch_jax.types import RewardParts, UserError

CONFIG = tiny_config(tied=False)
ADAPTERS = Lora(rank=3, alpha=6.0)


def some_pair(config) -> tuple[nnx.State, nnx.State]:
    """Base parameters, and adapters whose b is no longer 0."""
    rng = np.random.default_rng(1)
    fresh = lora.init_adapters(config, ADAPTERS, 0)
    noise = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), fresh)
    return random_params(config), noise


@pytest.fixture(scope="module")
def pair() -> tuple[nnx.State, nnx.State]:
    return some_pair(CONFIG)


def merged(base, adapters, dtype=jnp.float32) -> nnx.State:
    """The parameters of an ordinary model that computes the same function."""
    low = nnx.to_pure_dict(adapters)["adapters"]

    def value(path, variable):
        if path[-1] not in lora.KERNELS:
            return variable
        stacks = variable.get_value(), low[f"{path[-1]}_a"], low[f"{path[-1]}_b"]
        layers = [lora.merge_kernel(*stacks, layer, ADAPTERS, jnp.dtype(dtype))[0] for layer in range(CONFIG.layers)]
        return variable.replace(jnp.stack(layers))

    return nnx.from_flat_state({path: value(path, variable) for path, variable in nnx.to_flat_state(base)})


def test_a_merged_kernel_is_w_plus_scale_a_b(pair):
    """The merge equals the product in float64, and reports the rounding error."""
    base, adapters = pair
    combined = nnx.to_pure_dict(merged(base, adapters))
    before, low = nnx.to_pure_dict(base), nnx.to_pure_dict(adapters)["adapters"]
    for name, (inner, _) in lora.KERNELS.items():
        a, b = np.asarray(low[f"{name}_a"], np.float64), np.asarray(low[f"{name}_b"], np.float64)
        rows = int(np.prod(a.shape[1:-1]))
        assert a.ndim == 2 + len(inner)
        delta = 2.0 * np.stack([x.reshape(rows, 3) @ y.reshape(3, -1) for x, y in zip(a, b, strict=True)])
        kernel = np.asarray(before["layers"][name], np.float64)
        expected = kernel + delta.reshape(kernel.shape)
        np.testing.assert_allclose(combined["layers"][name], expected, atol=1e-5)
        stacks = before["layers"][name], low[f"{name}_a"], low[f"{name}_b"]
        rounded, lost, added = lora.merge_kernel(*stacks, 1, ADAPTERS, jnp.dtype("bfloat16"))
        error = np.asarray(rounded, np.float64) - expected[1]
        assert float(lost) == pytest.approx(float(np.sum(error**2)), rel=0.01)
        assert float(added) == pytest.approx(float(np.sum(delta[1] ** 2)), rel=1e-4)


@pytest.mark.parametrize("family", TINY)
def test_the_live_model_is_the_merged_one(family):
    """The merged weights compute the function that was trained."""
    config = tiny_config(tied=False, **TINY[family])
    base, adapters = some_pair(config)
    ids = np.random.default_rng(0).integers(0, 400, (2, 40)).astype(np.int32)
    live = nnx.merge(decoder.graphdef(config, jnp.float32, lora=ADAPTERS), lora.join_adapters(base, adapters))
    plain = nnx.merge(decoder.graphdef(config, jnp.float32), merged(base, adapters))
    off = nnx.merge(decoder.graphdef(config, jnp.float32), lora.split_adapters(lora.join_adapters(base, adapters))[0])
    with jax.default_matmul_precision("highest"):
        ours, theirs, without = (m.logits(m.hidden(ids)[0], 1.0, CONFIG.vocab_rows) for m in (live, plain, off))
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()
    assert np.abs(ours - without).max() > 0.1 * np.abs(theirs).max()


def test_layers_apart_keep_their_adapters(pair):
    """Unstacked layers decode with their own adapters."""
    ids = np.random.default_rng(0).integers(0, 400, (3, 1)).astype(np.int32)
    for backend in (Backend(unstack="per_call"), Backend(unstack="once", kernels_left=True)):
        graph = decoder.graphdef(CONFIG, jnp.float32, backend=backend, lora=ADAPTERS)
        model = nnx.merge(graph, lora.join_adapters(*pair))
        wanted, kept = model.hidden(ids, keep_kv=True)
        ours, ours_kept = model.hidden(ids, keep_kv=True, unstacked=model.unstack())
        for x, y in zip((ours, *ours_kept), (wanted, *kept), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def fields(**changes) -> dict:
    return {"model.lora_rank": 4, "eval.questions_per_kind": 0, "rollout.search_turns": 2, **changes}


def test_only_adapters_are_trained(tiny_policy):
    """State and updates cover adapters only; the base stays as it is and is the reference."""
    parts = build.training_run(small_config(tiny_policy, **fields(**{"learning.learning_rate": 1e-2})))
    parts.reward = lambda rollouts: [  # every group has a signal
        RewardParts({}, float(t.sample % 2)) for t in rollouts
    ]
    parts.begin()
    shapes = [x.shape for x in jax.tree.leaves(parts.state.params)]
    assert len(shapes) == 14 and all(4 in (shape[1], shape[-1]) for shape in shapes)
    assert parts.reference is parts.learner.base
    before = jax.tree.map(np.asarray, parts.learner.base)
    start = jax.tree.map(np.asarray, parts.state.params)
    first = {}
    for step in range(2):
        metrics, _ = train_step(parts, next(parts.loader), step)
        first = first or metrics
    assert first["kl"] == pytest.approx(0, abs=1e-6) and metrics["gradient_norm"] > 0
    base, moved = lora.split_adapters(jax.tree.map(np.asarray, parts.learner.sampling_copy(parts.state.params)))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, base)))
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, start, moved)))


@pytest.mark.slow
def test_a_run_with_adapters_is_exported_and_evaluated(tiny_policy, tmp_path):
    """A checkpoint has only adapters and finds its base by name and digest; its export is one ordinary model."""
    full = tmp_path / "run"
    run(command(full, tiny_policy, 2, **fields()))
    assert sum(f.stat().st_size for f in (full / "checkpoints" / "2" / "params").rglob("*") if f.is_file()) < 200_000

    run([sys.executable, "launch/export_hf.py", f"--checkpoint={full}", f"--out={tmp_path / 'hf'}"])
    exported = hf.load_hf(tmp_path / "hf")[1]
    flat = by_name(exported)
    ours = final_params(full)
    base = by_name(hf.load_hf(tiny_policy)[1])
    assert all(np.array_equal(ours[name], base[name]) for name in base)
    changed = {name for name in base if not np.array_equal(flat[name], base[name])}
    assert changed == {f"layers.{name}" for name in lora.KERNELS}
    assert "Adapters of rank 4" in (tmp_path / "hf" / "README.md").read_text()

    flags = [f"--model={full}", "--benchmark=closed_world:single", "--count=4", f"--out={tmp_path / 'e'}"]
    run([sys.executable, "launch/eval.py", *flags])
    assert "closed_world:single" in json.loads((tmp_path / "e" / "results.json").read_text())["benchmarks"]

    plain = command(full, tiny_policy, 4, **fields(**{"model.lora_rank": 0}))
    assert "model.lora_rank: 4, now 0" in run(plain, expect=2).stderr
    assert "another architecture" in run([*plain, "--allow_changes"], expect=2).stderr
    # On another machine the base has another path: it is located by its requested name and checked by its digest.
    step = full / "checkpoints" / "2"
    record = checkpoint.read_loop(step)

    def rewrite_record(settings: dict, **changed: str) -> None:
        written = record | {"lora": record["lora"] | changed, "settings": record["settings"] | settings}
        (step / "loop" / "metadata").write_text(json.dumps(written))

    rewrite_record({}, path="/nowhere/base")
    again = by_name(checkpoint.load_params(step)[1])
    assert all(np.array_equal(again[name], base[name]) for name in base)
    rewrite_record({}, path="/nowhere/base", name="/nowhere/either")
    with pytest.raises(UserError, match="/nowhere/base, which does not exist"):
        checkpoint.load_params(step)
    rewrite_record({"model.path": record["settings"]["model.path"] | {"is": "0"}})
    with pytest.raises(UserError, match="other weights than those that are in"):
        checkpoint.load_params(step)

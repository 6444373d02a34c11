"""16-bit runs, as on accelerators: samplers that match trainers, small log-prob gaps, and no skipped updates."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_sampler, one_device_mesh, random_params, started, tiny_config, training_config
from runs import metrics_without_clocks, small_config

from psearch_jax.assembly import build
from psearch_jax.config import Lora
from psearch_jax.models import lora
from psearch_jax.rollout.collect import Collector
from psearch_jax.train import trainer
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.types import RewardParts, TrainBatch

BRIEF = {
    "rollout.context_tokens": 128,
    "rollout.prompt_tokens": 64,
    "rollout.turn_tokens": 16,
    "rollout.obs_tokens": 32,
    "learning.kl_coefficient": 0.0,
    "train.steps": 3,
    "eval.questions_per_kind": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sampled", "bound"), [("bfloat16", "bfloat16", 0.02), ("float32", "float16", 0.003)]
)
def test_a_run_in_sixteen_bits(dtype, sampled, bound, tiny_policy, tmp_path, monkeypatch):
    """Float32 parameters learn in the dtypes of accelerators, no update is skipped, and sampler and trainer differ by
    less than `bound` in the mean log-prob per sampled token; the log-probs are around -6."""
    monkeypatch.setattr(Collector, "warm_up", lambda *_, **__: None)  # compiles only the shapes that occur
    fields = {**BRIEF, "model.dtype": dtype, "model.sampling_dtype": sampled}
    run = build.training_run(small_config(tiny_policy, **fields))
    run.reward = lambda rollouts: [RewardParts({}, float(t.ids.sum() % 2)) for t in rollouts]
    run.begin()
    assert {x.dtype.name for x in jax.tree.leaves(run.state.params)} == {"float32"}
    summary = trainer.train(run, tmp_path)
    for row in metrics_without_clocks(tmp_path):
        assert row["skipped"] == row["status/not_finite"] == 0 and row["gradient_norm"] > 0
        assert 0 < row["logp_gap"] < bound
    assert all(figures["tokens"] > 0 for moment in ("before", "after") for figures in summary[moment].values())


@pytest.mark.slow
def test_adapters_sample_from_the_policy_they_train(tiny_tokenizer):
    """The sampler adds adapters to its 16-bit base as the trainer does; a merged copy would lose the first updates."""
    config, adapters, half, mesh = tiny_config(tied=False), Lora(32, 64.0), jnp.dtype("bfloat16"), one_device_mesh()
    rows, positions, width = 16, 64, 12
    model = {"dtype": "bfloat16", "sampling_dtype": "bfloat16", "lora_rank": 32, "lora_alpha": 64.0}
    settings = training_config(positions, model=model, micro_batch_rows=rows, learning_rate=2e-5)  # qwen7b_lora.py
    optimizer = make_optimizer(settings.learning, 10)
    n_ids = tiny_tokenizer.size
    base = jax.tree.map(lambda x: x.astype(half), random_params(config, scale=0.1))
    learner = Learner(settings, config, optimizer, mesh, n_ids, base=base)
    sampler = make_sampler(tiny_tokenizer, config, mesh, dtype=half, lora=adapters)
    state = init_state(lora.init_adapters(config, adapters, 0), optimizer, mesh)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 390, (rows, width)).astype(np.int32)
    keys = rng.integers(0, 2**32, (rows, 2), np.uint32)

    def as_array(k: jax.Array, v: jax.Array) -> np.ndarray:
        return np.stack([np.asarray(x[-1], np.float32) for x in (k, v)])  # of the last layer

    def by_sampler() -> np.ndarray:
        weights = sampler.weights(learner.sampling_copy(state.params))
        cache = sampler.prefill(weights, prompts, np.full(rows, width, np.int32)).cache
        return as_array(cache.k, cache.v)[..., :width, :]

    frozen = learner._frozen  # made here, and not while the function is traced
    trained = jax.jit(lambda params: nnx.merge(learner._graph, frozen, params).hidden(prompts, keep_kv=True)[1])
    first, gaps = (by_sampler(), as_array(*trained(state.params))), []
    np.testing.assert_array_equal(*first)
    for step in range(4):
        weights = sampler.weights(learner.sampling_copy(state.params))
        state_of_rows = started(sampler, weights, prompts.tolist(), keys + step, positions, 60)
        rolled = jax.device_get(sampler.generate(weights, state_of_rows, 1.0))
        mask = rolled.mask.astype(np.float32)
        advantage = mask * rng.normal(size=(rows, 1)).astype(np.float32)
        zeros = np.zeros_like(mask)
        batch = TrainBatch(rolled.ids, rolled.length, mask, advantage, zeros, zeros, rolled.logprobs, zeros, zeros)
        old = learner.score(state.params, batch)
        gaps.append(float(np.abs(old - rolled.logprobs)[rolled.mask].mean()))
        state, metrics = learner.update(state, replace(batch, old_logprobs=old, ref_logprobs=old))
        moved, wanted = by_sampler() - first[0], as_array(*trained(state.params)) - first[1]
        assert np.linalg.norm(wanted) > 0 and metrics["skipped"] == 0
        assert np.linalg.norm(moved - wanted) <= 0.05 * np.linalg.norm(wanted), step
    # At the first step the adapters are 0, so its gap is the base's. A processor with bfloat16 instructions computes
    # both sides alike, up to single roundings.
    assert 0 < max(gaps) < max(1.3 * gaps[0], 1e-4) < 0.05, gaps

    held = dict(nnx.to_flat_state(base))
    for path, variable in nnx.to_flat_state(learner.sampling_copy(state.params)):
        value = variable.get_value()
        if path[0] == "adapters":
            assert value.dtype == np.float32
        else:
            assert value is held[path].get_value(), "the sampling copy must not copy the base weights"

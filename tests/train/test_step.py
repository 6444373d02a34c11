"""What a step of a training run hands from one stage to the next: each stage has tests of its own elsewhere."""

from __future__ import annotations

import jax
import numpy as np
from runs import small_config

from psearch_jax.assembly import build
from psearch_jax.train.trainer import train_step
from psearch_jax.types import RewardParts


def begin_run(policy, reward=None, **fields):
    """A run before its first step; `reward`: a function from a trajectory to its outcome."""
    run = build.training_run(small_config(policy, **fields))
    if reward is not None:
        run.reward = lambda rollouts: [RewardParts({"outcome": reward(t)}, float(reward(t))) for t in rollouts]
    run.begin()
    return run


def spy_on_updates(run, monkeypatch):
    """The mini-batches that later steps of the run learn from."""
    seen, update = [], run.learner.update
    monkeypatch.setattr(run.learner, "update", lambda *a: (seen.append(a[1]), update(*a))[1])
    return seen


def test_the_kl_is_that_to_the_policy_of_step_0(tiny_policy, monkeypatch):
    """The reference does not move with the policy."""
    run = begin_run(tiny_policy, lambda t: t.sample % 2, **{"learning.learning_rate": 1e-2})
    start, seen = jax.tree.map(np.array, run.state.params), spy_on_updates(run, monkeypatch)
    for step in range(2):
        seen.clear()
        kl = train_step(run, next(run.loader), step)[0]["kl"]
    for batch in seen:
        np.testing.assert_allclose(batch.ref_logprobs, run.learner.score(start, batch), atol=1e-5)
        assert np.abs(batch.ref_logprobs - batch.old_logprobs).max() > 1e-3
    assert kl > 0


def test_redrawn_groups_are_those_learned_from(tiny_policy, monkeypatch):
    """The update learns from groups with a signal, whichever draw they are from."""
    silent: set[str] = set()
    fields = {"train.dynamic_sampling_rounds": 3}
    run = begin_run(tiny_policy, lambda t: t.question.id not in silent and t.sample % 2, **fields)
    start = run.loader.state()
    silent |= {q.id for q in next(run.loader)[:3]}
    run.loader.restore(start)
    seen = spy_on_updates(run, monkeypatch)
    _, rollouts = train_step(run, next(run.loader), 0)
    assert len(rollouts.draws) == 2 and len(rollouts.trajectories) > 8
    assert all((batch.advantage != 0).any(axis=1).all() for batch in seen) and sum(len(b.ids) for b in seen) == 8


def test_a_run_scores_at_the_temperature_that_it_samples_at(tiny_policy):
    """Sampler and trainer have the same log-probs at any temperature."""
    run = begin_run(tiny_policy, **{"rollout.temperature": 0.7})
    assert train_step(run, next(run.loader), 0)[0]["logp_gap"] < 1e-4

"""Figures about a step that are computed from its rollouts and seconds."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tiny_config

from psearch_jax.config import Config, from_mapping
from psearch_jax.runtime.accelerators import CHIPS
from psearch_jax.train.monitoring import figures
from psearch_jax.types import Question, RewardParts, Trajectory, Turn
from retrieval.protocol import Passage


def test_the_peak_share_of_updates(monkeypatch):
    """FLOPs of real tokens, with a backward pass of half the cost for adapters, against the published peak."""
    chip, model = CHIPS["TPU v5 lite"], tiny_config(64, width=32, layers=2)
    mask = np.zeros((3, 8), np.float32)
    mask[0, 2:5] = mask[1, 3:7] = 1
    batch = SimpleNamespace(length=np.asarray([5, 7, 0]), mask=mask)
    full, adapters = Config(), from_mapping({"model": {"lora_rank": 4}})

    def utilisation(config, policy, critic):
        learner = SimpleNamespace(mesh=SimpleNamespace(size=4))
        run = SimpleNamespace(config=config, model=model, critic=critic or None, learner=learner)
        return figures.utilisation(run, batch, 2.0, policy)

    assert utilisation(full, True, False) is None  # a CPU has no published peak

    monkeypatch.setattr(figures, "chip_of", lambda device: chip)
    weights = model.layers * (2 * model.width * (model.heads + model.kv_heads) * model.head_dim + 3 * 32 * model.mlp)
    pairs = 4 * model.layers * model.heads * model.head_dim * (5**2 + 7**2) / 2
    trunk, head = 2 * weights * 12 + pairs, 2 * model.vocab_rows * model.width * 7
    for config, policy, critic, passes, flops in [
        (full, True, False, 3, trunk + head),
        (adapters, True, False, 2, trunk + head),
        (full, False, True, 3, trunk),
        (full, True, True, 3, 2 * trunk + head),
    ]:
        share = utilisation(config, policy, critic)
        assert share == pytest.approx(passes * flops / (2.0 * 4 * chip.flops))


def rolled(kind, answer, queries=(), shown="Alan", logprob=-1.0) -> Trajectory:
    """A rollout of `Ada?` with one search, if any, whose passages have the title `shown`."""
    passages = ((Passage("1", shown, "x"),),) * len(queries)
    turns = (Turn("", "search", True, queries, passages, n_sampled=1),) if queries else ()
    turns += (Turn("", "answer", True, answer=answer, n_sampled=1),)
    logprobs, mask = np.array([0, logprob, 3 * logprob]), np.array([False, True, True])
    question = Question("s", "1", "?", ("Ada",), kind)
    return Trajectory(question, 0, "answered", turns, np.ones(3, np.int32), mask, logprobs, 1)


def test_rollout_metrics_by_hand():
    """Shares and means of four rollouts."""
    rollouts = [
        rolled("parallel", "Ada", ("a", "b"), shown="Ada", logprob=-0.1),
        rolled("parallel", "Alan", ("a",), shown="Ada"),
        rolled("sequential", "Ada", ("a",), shown="Ada", logprob=-0.3),
        rolled("sequential", "Alan"),
    ]
    rewards = [RewardParts(float(i), 0, 0, 0) for i in range(4)]
    metrics = figures.rollout_metrics(rollouts, rewards, np.array([1.0, -1.0, 0.0, 0.0]), 2)
    expected = {"em/parallel": 0.5, "split/parallel": 0.5, "split/sequential": 0, "searches/sequential": 0.5}
    expected |= {"turns/parallel": 2, "turns/sequential": 1.5, "searched_0": 0.25, "searched_1": 0.75}
    expected |= {"wrong_though_seen": 1 / 3, "logprob_of_correct": -0.4, "groups_without_signal": 0.5}
    expected |= {"reward/parallel/split/outcome": 0, "reward/parallel/not_split/outcome": 1}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_yes_and_no_in_a_passage_are_no_answer():
    """`He left no heir.` does not contain the answer `no`."""
    said_no = replace(
        rolled("parallel", "yes", ("a",), shown="no heir"), question=Question("s", "1", "?", ("no",), "parallel")
    )
    metrics = figures.rollout_metrics([said_no], [RewardParts(0, 0, 0, 0)], np.zeros(1), 1)
    assert np.isnan(metrics["wrong_though_seen"])

"""Figures about a step that are computed from its rollouts and seconds."""

import numpy as np
import pytest

from psearch_jax.train.monitoring import figures
from psearch_jax.types import Question, RewardParts, Trajectory, Turn
from retrieval.protocol import Passage


def rollout(kind, answer, queries=(), shown="Alan", logprob=-1.0) -> Trajectory:
    """A rollout of `Ada?` with one search, if any, that shows a passage of title `shown` and cuts another one."""
    passages = ((Passage("1", shown, "x"), Passage("2", "Ada", "y")),) * len(queries)
    texts = ((f"({shown}) x",),) * len(queries)
    turns = (Turn("", "search", True, queries, passages, n_sampled=1, shown=texts),) if queries else ()
    turns += (Turn("", "answer", True, answer=answer, n_sampled=1),)
    logprobs, mask = np.array([0, logprob, 3 * logprob]), np.array([False, True, True])
    question = Question("s", "1", "?", ("Ada",), kind)
    return Trajectory(question, 0, "answered", turns, np.ones(3, np.int32), mask, logprobs, 1)


def test_rollout_metrics_by_hand():
    """Shares and means of four rollouts."""
    rollouts = [
        rollout("parallel", "Ada", ("a", "b"), shown="Ada", logprob=-0.1),
        rollout("parallel", "Alan", ("a",), shown="Ada"),
        rollout("sequential", "Ada", ("a",), logprob=-0.3),
        rollout("sequential", "Alan"),
    ]
    rewards = [RewardParts({"outcome": i, "own": 2 * i}, 3.0 * i) for i in range(4)]
    metrics = figures.rollout_metrics(rollouts, rewards, np.array([1.0, -1.0, 0.0, 0.0]), 2)
    expected = {"em/parallel": 0.5, "split/parallel": 0.5, "split/sequential": 0, "searches/sequential": 0.5}
    expected |= {"turns/parallel": 2, "turns/sequential": 1.5, "searched_0": 0.25, "searched_1": 0.75}
    expected |= {"wrong_though_seen": 0.5, "logprob_of_correct": -0.4, "groups_without_signal": 0.5}
    expected |= {"reward/parallel/split/outcome": 0, "reward/parallel/not_split/own": 2}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)

"""Which rollouts of a step are trained on, and which questions replace those without a learning signal."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from runs import assert_same_run, metrics_without_clocks, small_config, write_transcripts

from psearch_jax.assembly import build
from psearch_jax.rl.advantages import trained_rows
from psearch_jax.train import trainer
from psearch_jax.train.rollouts import collect_rollouts
from psearch_jax.types import Question, RewardParts


def loud(question: Question) -> bool:
    """Whether this test gives a question's rollouts different rewards: true for about half of all questions."""
    return zlib.crc32(question.id.encode()) % 2 == 0


def build_run(tiny_policy, **fields) -> trainer.Run:
    parts = build.training_run(small_config(tiny_policy, **fields))
    parts.reward = lambda rollouts: [RewardParts({}, float(loud(t.question) and t.sample % 2)) for t in rollouts]
    return parts


def test_groups_with_a_signal_come_first_and_none_is_cut():
    """Complete groups, in their order."""
    silent, first, second = [0.0, 0.0], [1.0, -1.0], [-0.5, 0.5]
    advantages = np.asarray([*silent, *first, *silent, *second, *first], np.float32)
    for count, rows in (
        (2, [2, 3, 6, 7]),
        (3, [2, 3, 6, 7, 8, 9]),
        (4, [0, 1, 2, 3, 6, 7, 8, 9]),  # too few have a signal: the first group without one is used too
        (5, list(range(10))),
        (9, list(range(10))),
    ):
        assert trained_rows(advantages, 2, count).tolist() == rows


def test_silent_groups_are_drawn_again(tiny_policy):
    """Groups with equal rewards are replaced, no question is used twice, and the number of draws is limited."""
    parts = build_run(tiny_policy, **{"train.dynamic_sampling_rounds": 3})
    once, several = build_run(tiny_policy), 0
    once.begin()
    parts.begin()
    for step in range(3):
        questions = next(parts.loader)
        single_draw = collect_rollouts(once, questions, step, {})
        redrawn = collect_rollouts(parts, questions, step, times := {})
        assert [t.ids.tolist() for t in single_draw.trajectories] == [t.ids.tolist() for t in redrawn.trajectories[:8]]
        rows = trained_rows(redrawn.advantages, 2, 4)
        asked = [t.question for t in redrawn.trajectories[::2]]
        assert len({(q.source, q.id) for q in asked}) == len(asked) == 4 * len(redrawn.draws) and set(times) == {
            "rollout",
            "reward",
        }
        assert redrawn.usage.row_steps > 0 and redrawn.usage.slots == single_draw.usage.slots
        assert all(loud(redrawn.trajectories[i].question) for i in rows) or len(redrawn.draws) == 4
        assert len(redrawn.draws) == 1 or sum(map(loud, asked[:-4])) < 4
        several += len(redrawn.draws) > 1
    assert several


@pytest.mark.slow
def test_a_run_that_draws_again_resumes_to_the_bit(tiny_policy, tmp_path):
    """The loader's position after the extra draws is saved. Transcripts are used in the same steps."""
    fields = {
        "train.scripted": str(write_transcripts(tmp_path / "transcripts.jsonl", small_config(tiny_policy))),
        "train.scripted_steps": 3,
        "train.dynamic_sampling_rounds": 2,
        "train.steps": 4,
        "eval.questions_per_kind": 0,
        "learning.warmup_ratio": 0.0,
    }
    trainer.train(build_run(tiny_policy, **fields), tmp_path / "whole")
    trainer.train(build_run(tiny_policy, **{**fields, "train.steps": 2}), tmp_path / "parts")
    trainer.train(build_run(tiny_policy, **fields), tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    rows = metrics_without_clocks(tmp_path / "whole")
    assert any(row["draws"] > 1 for row in rows) and rows[2]["scripted"] > 0 and "scripted" not in rows[3]

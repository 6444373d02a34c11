"""Runs whose rollouts are ahead of the updates (train.staleness)."""

from __future__ import annotations

import json
import signal
import subprocess

import numpy as np
import pytest
from helpers import question
from runs import (
    assert_same_run,
    command,
    ended,
    metrics_without_clocks,
    run,
    start,
    start_run,
    wait_for,
)

from psearch_jax.train.monitoring.figures import staleness, token_versions
from psearch_jax.types import Trajectory

# Rollouts of several turns and few slots, so that some are continued in another step; rewards that differ.
STALE = {
    "train.staleness": 2,
    "rollout.samples": 4,
    "rollout.turn_tokens": 48,
    "rollout.context_tokens": 384,
    "rollout.search_turns": 2,
    "learning.importance_cap": 2.0,
    "learning.learning_rate": 1e-3,
    "learning.mini_batch_rollouts": 8,
    "train.checkpoint_every_steps": 1,
}
STEPS = 5


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run."""
    workdir = tmp_path_factory.mktemp("straight")
    run(command(workdir, "toy", STEPS, **STALE))
    return workdir


def test_a_stale_run_measures_its_staleness(straight):
    """Metrics have the age of the tokens and the effective sample size."""
    rows = metrics_without_clocks(straight)
    assert rows[0]["staleness"] == rows[0]["staleness/0"] - 1 == 0
    assert all(0 < row["staleness"] <= 2 and 0 < row["continued"] < 1 for row in rows[2:])
    assert all(abs(sum(row.get(f"staleness/{age}", 0) for age in range(3)) - 1) < 1e-6 for row in rows)
    assert rows[0]["effective_sample_size"] > 0.999
    assert rows[0]["logp_gap"] < 1e-4 < rows[-1]["logp_gap"], "older weights give other log-probs"
    assert 0.5 < rows[-1]["effective_sample_size"] < 0.9999


@pytest.mark.parametrize(
    ("number", "every", "awaited"),
    [(signal.SIGKILL, 1, "checkpoints/3"), (signal.SIGTERM, 100, "trajectories/000000.jsonl")],
)
def test_an_interrupted_stale_run_resumes_to_the_bit(straight, tmp_path, number, every, awaited):
    """Its checkpoint holds the rollouts in flight, as they were before the interrupted step."""
    fields = {**STALE, "train.checkpoint_every_steps": every}
    process = start(command(tmp_path, "toy", STEPS, **fields), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / awaited).exists, process)
    process.send_signal(number)
    process.wait(300)
    assert not (tmp_path / "summary.json").exists()
    run(command(tmp_path, "toy", STEPS, **fields))
    assert_same_run(tmp_path, straight)


def test_other_settings_need_consent_and_rollouts_start_anew(tmp_path):
    """Rollouts in flight of other settings are dropped, and all groups are those of one question."""
    run(command(tmp_path, "toy", 2, **STALE))
    changed = {**STALE, "train.staleness": 1, "rollout.samples": 8, "rollout.context_tokens": 320}
    refused = run(command(tmp_path, "toy", 3, **changed), expect=2)
    assert all(name in refused.stderr for name in ("train.staleness", "rollout.samples", "rollout.context_tokens"))
    resumed = run([*command(tmp_path, "toy", 4, **changed), "--allow_changes"])
    assert "rollouts in flight are dropped" in resumed.stderr
    assert all(row["staleness"] <= 1 for row in metrics_without_clocks(tmp_path)[2:])
    for step in (2, 3):
        prompts: dict[str, set] = {}
        for row in map(json.loads, (tmp_path / "trajectories" / f"{step:06d}.jsonl").read_text().splitlines()):
            prompts.setdefault(row["question"], set()).add(tuple(row["ids"][: row["mask"].index(1)]))
        assert all(len(own) == 1 for own in prompts.values()) and len(set.union(*prompts.values())) == len(prompts)


@pytest.mark.weekly
def test_stale_runs_of_two_processes(tmp_path):
    """They resume to the bit after SIGKILL, and one process takes up the rollouts of both."""
    # The mini-batches of tests/support/runs.py; two devices of one process, or two processes of one device.
    fields = {**STALE, "train.prompts": 4, "eval.questions_per_kind": 0, "train.checkpoint_every_steps": 2}

    def finish(count: int, workdir, steps: int) -> None:
        results = ended(start_run(count, 2 // count, workdir, "toy", steps, **fields))
        assert [code for code, _, _ in results] == [0] * count, [err[-2000:] for _, _, err in results]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(2, whole, 4)
    started = start_run(2, 1, killed, "toy", 4, **fields)
    wait_for(lambda: (killed / "checkpoints" / "2").is_dir(), started[0])
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(2, killed, 4)
    assert_same_run(killed, whole)
    rows = metrics_without_clocks(whole)
    assert any(row["continued"] > 0 for row in rows)
    finish(1, killed, 6)  # one process takes up the rollouts of both
    rows = metrics_without_clocks(killed)
    assert len(rows) == 6 and all(row["staleness"] <= 2 for row in rows) and rows[4]["continued"] > 0


def trajectory(versions, mask) -> Trajectory:
    n = len(mask)
    mask = np.asarray(mask, bool)
    return Trajectory(question(0), 0, "answered", (), np.arange(n, dtype=np.int32), mask, -1.0 * mask, 2, versions)


def test_ages_by_hand():
    """Of sampled tokens only."""
    one = trajectory(((2, 3), (5, 4)), [0, 0, 1, 1, 0, 1])
    two = trajectory(((2, 5),), [0, 0, 1, 1])
    assert token_versions(one).tolist() == [3, 3, 3, 3, 3, 4]
    ages = {"staleness/0": 0.4, "staleness/1": 0.2, "staleness/2": 0.4}
    assert staleness([one, two], step=5) == pytest.approx({"staleness": 1.0, "continued": 0.5, **ages})

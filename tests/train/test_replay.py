"""Recorded rollouts, and runs that learn from them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import same_bits
from programs import Program
from runs import command, final_params, metrics_without_clocks, run, small_config, wait_for, write_transcripts

from psearch_jax.assembly import build
from psearch_jax.config import RolloutSection
from psearch_jax.train.replay import Recording, record, remove_from
from psearch_jax.train.rollouts import collect_rollouts
from psearch_jax.types import UserError

# A policy whose rewards differ: the learner of the recorded run must have something to learn.
RECORDED = {
    "train.record_rollouts": True,
    "train.dynamic_sampling_rounds": 1,
    "rollout.samples": 4,
    "rollout.turn_tokens": 48,
    "rollout.context_tokens": 384,
    "rollout.search_turns": 2,
}
STEPS = 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recorded run that learns something, in its first step from transcripts, too."""
    workdir = tmp_path_factory.mktemp("recorded")
    file = write_transcripts(workdir / "transcripts.jsonl", small_config("toy"))
    run(command(workdir, "toy", STEPS, **RECORDED, **{"train.scripted": file, "train.scripted_steps": 1}))
    rows = metrics_without_clocks(workdir)
    assert all(row["gradient_norm"] > 1e-3 for row in rows) and 0 < rows[0]["scripted"] <= 1 / 4
    assert "scripted" not in rows[1]
    return workdir


def replay_command(recorded, workdir, steps: int = STEPS, **fields) -> list[str]:
    return command(workdir, "toy", steps, **{**RECORDED, "train.replay": recorded, **fields})


def test_a_replay_repeats_the_run_to_the_bit(recorded, tmp_path):
    """Also after SIGKILL; it neither samples nor evaluates, but its checkpoint can be evaluated."""
    process = Program(replay_command(recorded, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "trajectories" / "000000.jsonl").is_file(), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(replay_command(recorded, tmp_path))
    assert same_bits(final_params(tmp_path), final_params(recorded))
    ours, theirs = (metrics_without_clocks(workdir) for workdir in (tmp_path, recorded))
    for repeated, original in zip(ours, theirs, strict=True):
        assert repeated == {k: v for k, v in original.items() if not k.startswith(("cost/", "eval/"))}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["before"] == summary["after"] == {}
    assert not (tmp_path / "rollouts").exists()
    asked = ["--benchmark=closed_world:single", "--count=2", f"--out={tmp_path / 'evaluation'}"]
    run([sys.executable, "launch/eval.py", f"--model={tmp_path}", *asked])
    assert (tmp_path / "evaluation" / "results.json").is_file()


def test_another_objective_on_the_same_rollouts(recorded, tmp_path):
    """Rewards, advantages and updates follow the settings of the replay."""
    fields = {"learning.advantage": "leave_one_out", "reward.decomposition": 0}
    fields |= {"train.scripted": "gone.jsonl", "train.scripted_steps": 1}  # the recording has the transcripts
    run(replay_command(recorded, tmp_path, **fields))
    assert not same_bits(final_params(tmp_path), final_params(recorded))
    ours, theirs = (
        [json.loads(line) for line in (workdir / "trajectories" / "000001.jsonl").read_text().splitlines()]
        for workdir in (tmp_path, recorded)
    )
    assert [row["ids"] for row in ours] == [row["ids"] for row in theirs]
    assert [row["reward"]["decomposition"] for row in ours] == [0.0] * len(ours)


def test_every_field_of_a_trajectory_is_recorded(tmp_path):
    """Also an empty draw; other groups or a smaller context are refused, and steps that are repeated removed."""
    parts = build.training_run(small_config("toy", **RECORDED))
    parts.begin()
    draws = [*collect_rollouts(parts, next(parts.loader), 0, {}).draws, []]  # the last one repeated its questions
    for step in (0, 1, 2):
        record(tmp_path, step, draws)
    remove_from(tmp_path, 1)
    recording = Recording(str(tmp_path))
    loaded = recording.load(0, parts.config.rollout)
    assert [len(draw) for draw in loaded] == [len(draw) for draw in draws]
    for ours, original in zip(sum(loaded, []), sum(draws, []), strict=True):
        for name, value in vars(original).items():
            np.testing.assert_equal(getattr(ours, name), value)
            assert getattr(getattr(ours, name), "dtype", None) == getattr(value, "dtype", None)
    assert any(turn.seen for t in sum(draws, []) for turn in t.turns)
    longest = max(len(t.ids) for t in sum(draws, []))
    refused = [
        ({"samples": 1}, f"samples: found 1, accepted: {parts.config.rollout.samples}"),
        ({"context_tokens": longest - 1}, f"context_tokens: found .*, accepted: at least {longest}"),
    ]
    for change, message in refused:
        with pytest.raises(UserError, match=message):
            recording.load(0, replace(parts.config.rollout, **change))
    asked = [replace(t.question, id="another") for t in sum(draws, [])[:1]]
    with pytest.raises(UserError, match="000000.json.z: found no rollouts of question 'another'"):
        recording.check_questions(0, draws, asked)
    with pytest.raises(UserError, match="000001.json.z: not found; accepted for config.train.steps: at most 1"):
        recording.check_steps(0, 2)


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_recording_is_refused(recorded, tmp_path, damage):
    """In one line."""
    (tmp_path / "rollouts").mkdir()
    content = bytearray((recorded / "rollouts" / "000000.json.z").read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 0xFF
    (tmp_path / "rollouts" / "000000.json.z").write_bytes(content)
    with pytest.raises(UserError, match="000000.json.z: cannot be read"):
        Recording(str(tmp_path)).load(0, RolloutSection())

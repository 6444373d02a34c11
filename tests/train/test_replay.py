"""Recorded rollouts, and runs that learn from them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from programs import Program
from runs import command, final_params, metrics_without_clocks, run, small_config, wait_for

from psearch_jax.assembly import build
from psearch_jax.config import RolloutSection
from psearch_jax.train import replay
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
STEPS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recorded run."""
    workdir = tmp_path_factory.mktemp("recorded")
    run(command(workdir, "toy", STEPS, **RECORDED))
    assert all(
        row["groups_without_signal"] < 1 and row["gradient_norm"] > 1e-3 for row in metrics_without_clocks(workdir)
    )
    return workdir


def replaying(recorded, workdir, **fields) -> list[str]:
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return [sys.executable, "launch/train.py", f"--replay={recorded}", f"--workdir={workdir}", *flags]


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)


def test_a_replay_repeats_the_run_to_the_bit(recorded, tmp_path):
    """A learner that reads something that is not recorded, or a value that the file rounds, cannot be debugged from a
    recording; one that samples or evaluates takes the time that a replay saves."""
    out = run(replaying(recorded, tmp_path / "again")).stdout
    assert same(final_params(tmp_path / "again"), final_params(recorded)) and "not evaluated" not in out
    ours, theirs = (metrics_without_clocks(workdir) for workdir in (tmp_path / "again", recorded))
    for own, wanted in zip(ours, theirs, strict=True):
        sampled = {name for name in wanted if name.startswith(("cost/", "probe/", "eval/"))}
        assert own == {name: value for name, value in wanted.items() if name not in sampled}
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["before"] == summary["after"] == {}
    assert not any(summary["compilations"][name] for name in ("prefill", "admit", "extend", "generate"))
    assert not (tmp_path / "again" / "rollouts").exists()


def test_another_objective_on_the_same_rollouts(recorded, tmp_path):
    """A replay that ignores its own settings would make all objectives look alike."""
    run(replaying(recorded, tmp_path, **{"learning.advantage": "leave_one_out", "reward.decomposition": 0}))
    assert not same(final_params(tmp_path), final_params(recorded))
    ours, theirs = (
        [json.loads(line) for line in (workdir / "trajectories" / "000001.jsonl").read_text().splitlines()]
        for workdir in (tmp_path, recorded)
    )
    assert [row["ids"] for row in ours] == [row["ids"] for row in theirs]
    assert [row["reward"]["decomposition"] for row in ours] == [0.0] * len(ours)


def test_a_killed_replay_resumes_bit_for_bit(recorded, tmp_path):
    """A resumed replay that starts again at the first recorded step, or continues by sampling."""
    process = Program(replaying(recorded, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "trajectories" / "000001.jsonl").is_file(), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(replaying(recorded, tmp_path))
    assert same(final_params(tmp_path), final_params(recorded))


def test_every_field_of_a_trajectory_is_recorded(tmp_path):
    """A field left out would get its default in a replay, and rewards that read it would differ."""
    parts = build.training_run(small_config("toy", **RECORDED))
    parts.begin()
    draws = [*collect_rollouts(parts, next(parts.loader), 0, {}).draws, []]  # the last one repeated its questions
    replay.write(tmp_path, 0, draws)
    read = replay.Recording(str(tmp_path)).draws(0, parts.config.rollout)
    assert [len(draw) for draw in read] == [len(draw) for draw in draws]
    for ours, wanted in zip(sum(read, []), sum(draws, []), strict=True):
        for name in ("ids", "mask", "logprobs"):
            array = getattr(wanted, name)
            np.testing.assert_array_equal(getattr(ours, name), array)
            assert getattr(ours, name).dtype == array.dtype
        assert (ours.sample, ours.status, ours.turns) == (wanted.sample, wanted.status, wanted.turns)
        assert ours.prompt_length == wanted.prompt_length and ours.question.contents == wanted.question.contents
        assert ours.question.kind == wanted.question.kind and parts.reward([ours]) == parts.reward([wanted])
    assert any(turn.passages for t in sum(draws, []) for turn in t.turns)
    # Half a group would be learned from with the advantages of the complete one; a longer rollout fits no row.
    longest = max(len(t.ids) for t in sum(draws, []))
    refused = [
        ({"samples": 1}, f"samples: found 1, accepted: {parts.config.rollout.samples}"),
        ({"context_tokens": longest - 1}, f"context_tokens: found .*, accepted: at least {longest}"),
    ]
    for change, message in refused:
        with pytest.raises(UserError, match=message):
            replay.Recording(str(tmp_path)).draws(0, replace(parts.config.rollout, **change))


def test_what_a_replay_refuses(recorded, tmp_path, tiny_policy):
    """Rollouts of other questions, or a traceback in the middle of a run that lacks them."""
    for fields, message in (
        ({"train.steps": STEPS + 1}, f"000003.npz: not found; accepted for config.train.steps: at most {STEPS}"),
        ({"seed": 5}, "000000.npz: found no rollouts of question"),
        ({"train.prompts": 8}, "000000.npz: found no rollouts of question"),
    ):
        refused = run(replaying(recorded, tmp_path / "refused", **fields), expect=2).stderr
        assert message in refused and "Traceback" not in refused
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = run(replaying(empty, tmp_path / "refused"), expect=2).stderr
    assert f"{empty}: holds no checkpoint, accepted: a run directory" in refused
    run(command(tmp_path / "plain", tiny_policy, 1))
    refused = run(replaying(tmp_path / "plain", tmp_path / "refused"), expect=2).stderr
    assert "has no recorded rollouts, accepted: the directory of a run with train.record_rollouts=true" in refused
    refused = run([sys.executable, "launch/train.py", f"--workdir={tmp_path / 'refused'}"], expect=2).stderr
    assert "--config: none given, accepted: a file such as configs/smoke.py, or --replay=RUN" in refused


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_recording(recorded, tmp_path, damage):
    """A file cut by a full disk, or with a wrong byte, would end in a traceback of the zip reader."""
    (tmp_path / "rollouts").mkdir()
    content = bytearray((recorded / "rollouts" / "000000.npz").read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        start = content.index(b"ids.npy") + len("ids.npy") + 40
        content[start : start + 16] = b"\xff" * 16  # in the compressed data, not in a table of the archive
    (tmp_path / "rollouts" / "000000.npz").write_bytes(content)
    with pytest.raises(UserError, match="000000.npz: cannot be read"):
        replay.Recording(str(tmp_path)).draws(0, RolloutSection())

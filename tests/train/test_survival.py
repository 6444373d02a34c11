"""What a run survives: kills at any moment, other machines, and disks that fill up, turn read-only or vanish."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from programs import ROOT
from runs import (
    assert_same_params,
    command,
    final_params,
    metrics_without_clocks,
    run,
    small_config,
    start,
    wait_for,
)

from psearch_jax.assembly import build
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.types import UserError

QUICK = {"eval.questions_per_kind": 0}
KILLS, STEPS = 10, 50
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # nobody reads the output of a killed process


def steps_on_disk(workdir: Path) -> int:
    return len(list((workdir / "trajectories").glob("*.jsonl")))


def times_of_steps(workdir: Path) -> dict[str, int]:
    """When the file of each step was written, in nanoseconds."""
    times = {}
    for file in (workdir / "trajectories").glob("*.jsonl"):
        # A resumed run removes the steps after its checkpoint, perhaps during this loop.
        with contextlib.suppress(FileNotFoundError):
            times[file.name] = file.stat().st_mtime_ns
    return times


@pytest.mark.slow
def test_kills_change_nothing(tiny_policy, tmp_path):
    """A half-written file, a key or a batch used twice, or an incomplete checkpoint used: each shows in the end.

    With rollouts ahead of the updates, whose checkpoints hold all that others hold, and the rollouts in flight.
    """
    rng = np.random.default_rng(0)
    fields = {**QUICK, "train.checkpoint_every_steps": 2, "train.staleness": 1, "rollout.yield_share": 0.1}
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    run(command(uninterrupted, tiny_policy, STEPS, **fields))
    written = times_of_steps(uninterrupted).values()
    step_s, start_s = (max(written) - min(written)) / 1e9 / STEPS, None  # seconds on this machine
    for _ in range(KILLS):
        began = time.monotonic()
        process = start(command(killed, tiny_policy, STEPS, **fields), **QUIET)
        before = times_of_steps(killed)

        def new_steps(before: dict = before) -> int:
            return len(times_of_steps(killed).items() - before.items())

        # In one kill of five the process is still starting; otherwise it has done some steps.
        if start_s is not None and rng.random() < 0.2:
            time.sleep(rng.uniform(0, start_s))
        else:
            more = int(rng.integers(1, 3))  # more steps can follow before it is killed, many on a busy machine
            wait_for(lambda more=more, new_steps=new_steps: new_steps() >= more, process)
            start_s = min(start_s or 60.0, time.monotonic() - began)
            time.sleep(rng.uniform(0, step_s))
        assert process.poll() is None, "the run ended before it was killed often enough"
        process.send_signal(signal.SIGKILL)
        process.wait()
    run(command(killed, tiny_policy, STEPS, **fields))
    assert metrics_without_clocks(killed) == metrics_without_clocks(uninterrupted)
    assert [row["step"] for row in metrics_without_clocks(killed)] == list(range(STEPS))
    assert any(row["continued"] for row in metrics_without_clocks(killed))
    ours, theirs = final_params(killed), final_params(uninterrupted)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)
    for step in range(STEPS):
        name = f"{step:06d}.jsonl"
        assert (killed / "trajectories" / name).read_text() == (uninterrupted / "trajectories" / name).read_text()


@pytest.mark.slow
def test_a_run_goes_on_over_another_mesh(tmp_path):
    """A checkpoint tied to its mesh would end the run on a slice that comes back smaller or larger."""
    policy = Path("toy")  # earns rewards; if all were equal, gradients would only be rounding errors
    uninterrupted, moved = tmp_path / "whole", tmp_path / "moved"
    run(command(uninterrupted, policy, 4, **QUICK))
    process = start(command(moved, policy, 4, **QUICK), **QUIET)
    wait_for(lambda: (moved / "trajectories" / "000002.jsonl").is_file(), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    over = {"mesh.fsdp": 2, "mesh.tensor": 2}
    process = start(command(moved, policy, 4, **QUICK, **over), devices=4)
    assert process.wait(600) == 0, process.stderr.read()[-2000:]
    assert_same_params(moved, uninterrupted)
    for a, b in zip(metrics_without_clocks(moved), metrics_without_clocks(uninterrupted), strict=True):
        assert a["reward"] == pytest.approx(b["reward"]) and a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def in_namespace(script: str) -> subprocess.CompletedProcess:
    """Runs a shell script that may mount file systems visible only to itself."""
    return subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def namespaces() -> None:
    if shutil.which("unshare") is None or in_namespace("mount -t tmpfs none /mnt").returncode:
        pytest.skip("this system lets nobody mount a file system of their own (unshare -rm)")


def one_line(stderr: str) -> str:
    """The line about the run's end; there must be no traceback."""
    assert "Traceback" not in stderr, stderr[-3000:]
    (line,) = [line for line in stderr.splitlines() if line.startswith("train: ")]
    return line


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_takes_no_more(namespaces, tiny_policy, tmp_path, trouble):
    """A run overnight must end with one line and its last good checkpoint, not with a damaged one and a traceback."""
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    fields = {**QUICK, "train.checkpoint_every_steps": 1, "train.keep_checkpoints": 1000}
    endless = " ".join(map(str, command(disk / "run", tiny_policy, 1000, **fields)))
    short = " ".join(map(str, command(disk / "run", tiny_policy, 2, **fields)))
    # A full disk fills during the run; a read-only one is there when the run resumes.
    first = "true" if trouble == "full" else f"{short} && mount -o remount,ro {disk}"
    script = f"mount -t tmpfs -o size=24m none {disk}; {first} && {endless}; code=$?; "
    done = in_namespace(script + f"cp -r {disk}/run {saved}; exit $code")
    assert done.returncode == 2, done.stderr[-3000:]
    line = one_line(done.stderr)
    assert str(disk / "run") in line and "written (" in line and "the same command" in line
    step = checkpoint.load_params(saved)[2]["step"]
    assert step >= 1
    run(command(saved, tiny_policy, step + 1, **fields))
    assert [row["step"] for row in metrics_without_clocks(saved)] == list(range(step + 1))


@pytest.mark.slow
def test_a_directory_that_vanishes(tiny_policy, tmp_path):
    """A run whose directory is removed would compute for hours without saving anything."""
    fields = {**QUICK, "train.checkpoint_every_steps": 3}
    process = start(command(tmp_path / "run", tiny_policy, 1000, **fields))
    wait_for(lambda: steps_on_disk(tmp_path / "run") >= 2, process)
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "written (" in one_line(err), err[-2000:]


def saved_run(policy: Path, workdir: Path, steps: int, **train) -> list[int]:
    """The steps kept by a run that saved after each of them."""
    parts = build.training_run(small_config(policy))
    parts.begin()
    record = {"model": checkpoint.model_record(parts.model), "loader": parts.loader.state(), "tokenizer": str(policy)}
    keeper = checkpoint.Checkpoints(workdir / "checkpoints", **train)
    for step in range(1, steps + 1):
        keeper.save(step, parts.state, record)
    keeper.wait()
    keeper.close()
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def test_which_checkpoints_are_kept(tiny_policy, tmp_path):
    """A disk filled by old checkpoints, or a milestone removed before it was evaluated."""
    assert saved_run(tiny_policy, tmp_path / "a", 5, keep=2) == [4, 5]
    assert saved_run(tiny_policy, tmp_path / "b", 7, keep=2, keep_every=3) == [3, 6, 7]


def test_export_and_evaluation_pass_over_a_damaged_checkpoint(tiny_policy, tmp_path, caplog):
    """The newest checkpoint may be cut short by a full disk; an older complete one must be used."""
    saved_run(tiny_policy, tmp_path, 2)
    params = tmp_path / "checkpoints" / "2" / "params"
    largest = max(params.rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    assert checkpoint.load_params(tmp_path)[2]["step"] == 1
    assert "trying the previous one" in caplog.text
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.load_params(tmp_path / "checkpoints" / "2")
    run([sys.executable, "launch/export_hf.py", f"--checkpoint={tmp_path}", f"--out={tmp_path / 'hf'}"])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "qwen2"

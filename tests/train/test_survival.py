"""What a run survives: kills at any moment, other machines, and disks that fill up or turn read-only."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from programs import ROOT
from runs import assert_same_params, assert_same_run, command, metrics_without_clocks, run, start, wait_for

from psearch_jax.train.checkpointing import checkpoint

QUICK = {"eval.questions_per_kind": 0}
KILLS, STEPS = 5, 24
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # nobody reads the output of a killed process


def times_of_steps(workdir: Path) -> dict[str, int]:
    """When the file of each step was written, in nanoseconds."""
    times = {}
    for file in (workdir / "trajectories").glob("*.jsonl"):
        # A resumed run removes the steps after its checkpoint, perhaps during this loop.
        with contextlib.suppress(FileNotFoundError):
            times[file.name] = file.stat().st_mtime_ns
    return times


@pytest.mark.weekly
def test_kills_change_nothing(tiny_policy, tmp_path):
    """A run that is killed at random moments ends bit for bit as an uninterrupted one, with rollouts in flight."""
    rng = np.random.default_rng(0)
    fields = {**QUICK, "train.checkpoint_every_steps": 2, "train.staleness": 1}
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    run(command(uninterrupted, tiny_policy, STEPS, **fields))
    written = times_of_steps(uninterrupted).values()
    step_s = (max(written) - min(written)) / 1e9 / STEPS  # seconds on this machine
    for kill in range(KILLS):
        process = start(command(killed, tiny_policy, STEPS, **fields), **QUIET)
        before = times_of_steps(killed)
        if kill == 2:  # while it resumes
            time.sleep(rng.uniform(0, 5))
        else:
            new_steps = lambda before=before: len(times_of_steps(killed).items() - before.items())  # noqa: E731
            wait_for(lambda new_steps=new_steps: new_steps() >= 1, process)
            time.sleep(rng.uniform(0, step_s))
        assert process.poll() is None, "the run ended before it was killed often enough"
        process.send_signal(signal.SIGKILL)
        process.wait()
    run(command(killed, tiny_policy, STEPS, **fields))
    assert_same_run(killed, uninterrupted)
    assert [row["step"] for row in metrics_without_clocks(killed)] == list(range(STEPS))
    assert any(row["continued"] for row in metrics_without_clocks(killed))


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(tmp_path):
    """A checkpoint of one device is continued on four, equal up to rounding."""
    policy = Path("toy")  # earns rewards; if all were equal, gradients would only be rounding errors
    uninterrupted, moved = tmp_path / "whole", tmp_path / "moved"
    run(command(uninterrupted, policy, 3, **QUICK))
    run(command(moved, policy, 2, **QUICK))
    process = start(command(moved, policy, 3, **QUICK, **{"mesh.fsdp": 2, "mesh.tensor": 2}), devices=4)
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


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_failing_disk_ends_a_run_in_one_line(namespaces, tiny_policy, tmp_path, trouble):
    """The last complete checkpoint stays, and the run resumes from it."""
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    fields = {**QUICK, "train.checkpoint_every_steps": 1, "train.keep_checkpoints": 1000}
    endless = " ".join(map(str, command(disk / "run", tiny_policy, 1000, **fields)))
    short = " ".join(map(str, command(disk / "run", tiny_policy, 2, **fields)))
    # A full disk fills during the run; a read-only one is there when the run resumes.
    first = "true" if trouble == "full" else f"{short} && mount -o remount,ro {disk}"
    script = f"mount -t tmpfs -o size=24m none {disk}; {first} && {endless}; code=$?; "
    done = in_namespace(script + f"cp -r {disk}/run {saved}; exit $code")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("train: ")]
    assert str(disk / "run") in line and "written (" in line and "the same command" in line
    step = checkpoint.load_params(saved)[2]["step"]
    assert step >= 1
    if trouble == "full":
        run(command(saved, tiny_policy, step + 1, **fields))
        assert [row["step"] for row in metrics_without_clocks(saved)] == list(range(step + 1))

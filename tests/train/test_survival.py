"""What a run survives: kills at any moment, other machines, and disks that fill up or turn read-only."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from programs import ROOT
from runs import assert_same_run, command, metrics_without_clocks, run, start, wait_for

from psearch_jax.train.checkpointing import checkpoint

QUICK = {"eval.questions_per_kind": 0}
KILLS, STEPS = 5, 24
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # nobody reads the output of a killed process


@pytest.mark.weekly
def test_kills_change_nothing(tiny_policy, tmp_path):
    """A run that is killed at random moments ends bit for bit as an uninterrupted one, with rollouts in flight."""
    rng = np.random.default_rng(0)
    fields = {**QUICK, "train.checkpoint_every_steps": 2, "train.staleness": 1}
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    run(command(uninterrupted, tiny_policy, STEPS, **fields))
    metrics = killed / "metrics.jsonl"
    for kill in range(KILLS):
        before = metrics.stat().st_mtime_ns if metrics.is_file() else 0
        process = start(command(killed, tiny_policy, STEPS, **fields), **QUIET)
        if kill == 2:  # while it resumes
            time.sleep(rng.uniform(0, 5))
        else:
            changed = lambda before=before: metrics.is_file() and metrics.stat().st_mtime_ns > before  # noqa: E731
            wait_for(changed, process)
            time.sleep(rng.uniform(0, 1))
        assert process.poll() is None, "the run ended before it was killed often enough"
        process.send_signal(signal.SIGKILL)
        process.wait()
    run(command(killed, tiny_policy, STEPS, **fields))
    assert_same_run(killed, uninterrupted)
    assert any(row["continued"] for row in metrics_without_clocks(killed))


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

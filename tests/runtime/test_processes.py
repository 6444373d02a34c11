"""Multi-process runs on gloo, with real processes that are really killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import (
    assert_same_params,
    ended,
    final_params,
    free_port,
    metrics_without_clocks,
    start,
    start_run,
    wait_for,
)

from psearch_jax.runtime import cli, processes
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.types import UserError


def finish(started: list[subprocess.Popen]) -> list[str]:
    """The stdout of each process; fails unless all exit with code 0."""
    results = ended(started)
    errors = [err.partition("Extension modules")[0][-4000:] for _, _, err in results]  # a crash lists them last
    assert [code for code, _, _ in results] == [0] * len(started), "\n\n".join(errors)
    return [out for _, out, _ in results]


def test_sigterm_ends_a_process_that_has_joined():
    """A process that has joined the others still ends at SIGTERM."""
    script = (
        "import sys, time; from psearch_jax.runtime import processes; "
        f"processes.start('127.0.0.1:{free_port()}', 1, 0); print('joined', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "joined\n", process.communicate()[1][-2000:]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM


def test_what_one_process_knows_reaches_all(tmp_path):
    """Host data keeps the order of one process, and an error of one process is raised in all."""
    count, address = 2, f"127.0.0.1:{free_port()}"
    program = [sys.executable, "tests/support/several_processes.py", address, str(count)]
    outs = finish([start([*program, str(i), str(tmp_path)], devices=3) for i in range(count)])
    reports = [json.loads(out.split("FOUND ")[1].splitlines()[0]) for out in outs]
    for index, got in enumerate(reports):
        assert got["first"] == (index == 0) and got["agreed"] == "of 0"
        assert got["order"] == list(range(11))
        assert got["groups"] == ["a1", "a2", "b1", "b2", "c1", "c2", "d1", "d2", "e1", "e2"]
        assert got["long"] == [[0, 3], [1, 20_000_003]]
        assert got["none"] == [None, None] and got["array"] == list(range(6))
        assert got["not compared"] == [[index]] * 3
        prefix = "" if index == 0 else "process 0 of 2: "
        assert got["unreadable"] == f"OSError: [Errno 5] {prefix}Input/output error: 'before.json'"
        assert all(got["lost"]) and not any(got["not lost"]), (got["lost"], got["not lost"])
        prefix = "" if index == 1 else "process 1 of 2: "
        assert got["search"] == f"RetrievalError: {prefix}the server is gone"
        assert got["input"] == ("UserError: found 3" if index == 0 else "UserError: process 0 of 2: found 3")
        damaged = got["damaged"]
        assert damaged["best"] == {"metric": "em", "questions": "these", "value": 0.5}
        assert damaged["record"] == {"step": 3, **damaged["best"]}
        assert "/of 1/run/3" in damaged["said"] and "cannot be read" in damaged["said"] and damaged["took"] < 30
        assert "Odd" in got["odd"] and "1 2" in got["odd"]
        calls, exchanges = got["stopped"]  # the stop is requested at the fourth call
        assert got["stopped"] == reports[0]["stopped"] and 4 <= calls < 200 and exchanges <= 4


@pytest.mark.parametrize("values", [("", 2, 0), ("127.0.0.1:1", 0, 0), ("127.0.0.1:1", 2, -1), ("127.0.0.1:1", 2, 2)])
def test_half_an_address_is_refused(values):
    """All three parts of an address are needed."""
    with pytest.raises(UserError, match="--coordinator"):
        processes.start(*values)


MESH = {"mesh.fsdp": 2, "mesh.tensor": 2}
OVERLAPPED = {"rollout.overlap_search": True, "rollout.search_turns": 1, "reward.terms": "f1=0.5"}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """The directory of a run of one process with four devices."""
    directory = tmp_path_factory.mktemp("one")
    finish(start_run(1, 4, directory, Path("toy"), 2, **MESH, **OVERLAPPED))
    rows = metrics_without_clocks(directory)
    assert any(row["reward"] != 0 and row["gradient_norm"] > 0 for row in rows)
    return directory


# Of four processes, two share every row. Of two, both share every row while they sample. Searches run in each of them
# while all decode.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "mesh"),
    [pytest.param(4, MESH, marks=pytest.mark.weekly), (2, {"mesh.fsdp": 4, "mesh.rollout_tensor": 4})],
)
def test_one_and_several_processes_agree(one_process, tmp_path, count, mesh):
    """Rollouts, searches, metrics and parameters do not depend on the number of processes or the sampler's mesh."""
    finish(start_run(count, 4 // count, tmp_path, Path("toy"), 2, **mesh, **OVERLAPPED))
    for name in ("000000", "000001"):
        ours, theirs = (
            [json.loads(line) for line in (d / "trajectories" / f"{name}.jsonl").open()]
            for d in (tmp_path, one_process)
        )
        assert len(ours) == 16
        for a, b in zip(ours, theirs, strict=True):
            assert a["ids"] == b["ids"] and a["turns"] == b["turns"] and a["reward"] == b["reward"]
    for row, expected in zip(metrics_without_clocks(tmp_path), metrics_without_clocks(one_process), strict=True):
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            assert row[key] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), key
    assert_same_params(tmp_path, one_process)
    if mesh == MESH:  # gradients are summed in the same order
        params = final_params(one_process)
        for name, value in final_params(tmp_path).items():
            np.testing.assert_allclose(value, params[name], rtol=0, atol=1e-5 * np.abs(params[name]).max())


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.weekly), 1])
def test_a_dead_process_ends_the_others(tiny_policy, tmp_path, victim):
    """A killed process ends the others within a minute, and their checkpoint stays."""
    started = start_run(
        2, 1, tmp_path, tiny_policy, 1000, **{"train.checkpoint_every_steps": 1, "rollout.search_turns": 0}
    )
    wait_for(lambda: (tmp_path / "checkpoints" / "1").is_dir(), started[1 - victim])
    started[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = ended(started)[1 - victim]
    assert time.monotonic() - killed < 60
    assert code in (cli.LOST, -signal.SIGABRT), err[-2000:]  # either our thread or jax's own may notice first
    assert "the processes of this run lost each other" in err or "another task died" in err
    assert checkpoint.read_loop(checkpoint.find_checkpoint(tmp_path))["step"] >= 1


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tiny_policy, tmp_path):
    """SIGTERM in one process makes all of them save; the run resumes on one process."""
    several, uninterrupted = tmp_path / "several", tmp_path / "whole"
    fixed = {"train.checkpoint_every_steps": 1000, "learning.warmup_ratio": 0.0}  # a share of `train.steps`
    started = start_run(2, 2, several, tiny_policy, 1000, **fixed)
    wait_for(lambda: (several / "trajectories" / "000001.jsonl").is_file(), started[0])
    started[1].send_signal(signal.SIGTERM)
    for out in finish(started):
        assert "interrupted: saved after step" in out
    step = checkpoint.read_loop(checkpoint.find_checkpoint(several))["step"]
    assert step == len(metrics_without_clocks(several)) >= 2
    finish(start_run(1, 1, several, tiny_policy, step + 2, **fixed))
    finish(start_run(1, 1, uninterrupted, tiny_policy, step + 2, **fixed))
    for row, expected in zip(metrics_without_clocks(several), metrics_without_clocks(uninterrupted), strict=True):
        assert row["reward"] == pytest.approx(expected["reward"], abs=1e-6) and row["groups_without_signal"] < 1
    assert_same_params(several, uninterrupted)


@pytest.mark.slow
def test_two_processes_evaluate_as_one(tmp_path):
    """The rows of an evaluation do not depend on the number of processes, and each is written once."""
    flags = ["--model=toy", "--config=configs/smoke.py", "--benchmark=closed_world:mixed", "--count=9"]
    flags += ["--config.rollout.slots=8", "--config.rollout.num_buckets=1"]
    for count in (1, 2):
        program = [sys.executable, "launch/eval.py", *flags, f"--out={tmp_path / str(count)}"]
        if count > 1:
            program += [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={count}"]
        numbered = [[*program, f"--process={i}"] if count > 1 else program for i in range(count)]
        outs = finish([start(command, 2 // count) for command in numbered])
        assert "closed_world:mixed" in outs[0] and all("closed_world" not in out for out in outs[1:])
    names, others = (sorted(p.name for p in (tmp_path / name).iterdir()) for name in "12")
    assert names == others
    for name in names:
        if name != "report.html":  # contains the name of its directory
            assert (tmp_path / "1" / name).read_text() == (tmp_path / "2" / name).read_text(), name


@pytest.mark.slow
def test_what_processes_cannot_share_is_refused(tiny_policy, tmp_path):
    """An odd number of slots for two processes: each prints one line and exits with code 2; neither waits."""
    over = {"mesh.tensor": 2, "rollout.slots": 3}
    for code, _, err in ended(start_run(2, 1, tmp_path, tiny_policy, 1, **over)):
        assert code == 2 and "config.rollout.slots: found 3, accepted: a multiple of the 2 processes" in err

"""Runs of several processes, on gloo, with real processes that are really killed."""

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

from psearch_jax import launching, processes
from psearch_jax.train import checkpoint
from psearch_jax.types import UserError


def finish(started: list[subprocess.Popen]) -> list[str]:
    """What each printed, all of them well."""
    found = ended(started)
    assert [code for code, _, _ in found] == [0] * len(started), [err[-2000:] for _, _, err in found]
    return [out for _, out, _ in found]


def test_what_one_process_knows_reaches_all(tmp_path):
    """A row lost or out of order trains on the wrong question; an error kept to one process hangs the others."""
    count, address = 2, f"127.0.0.1:{free_port()}"
    program = [sys.executable, "tests/several_processes.py", address, str(count)]
    outs = finish([start([*program, str(i), str(tmp_path)]) for i in range(count)])
    found = [json.loads(out.split("FOUND ")[1].splitlines()[0]) for out in outs]
    for here, one in enumerate(found):
        assert one["first"] == (here == 0) and one["agreed"] == "of 0"
        assert one["order"] == list(range(11))
        assert one["groups"] == ["a1", "a2", "b1", "b2", "c1", "c2", "d1", "d2", "e1", "e2"]
        assert (
            one["long"] == [[0, 3], [1, 20_000_003]] and one["none"] == [None, None] and one["array"] == [0, 1, 2, 3]
        )
        where = "" if here == 0 else "process 0 of 2: "
        assert one["unreadable"] == f"OSError: [Errno 5] {where}Input/output error: 'before.json'"
        assert all(one["lost"]) and not any(one["not lost"]), (one["lost"], one["not lost"])
        where = "" if here == 1 else "process 1 of 2: "
        assert one["search"] == f"RetrievalError: {where}the server is gone"
        assert one["input"] == ("UserError: found 3" if here == 0 else "UserError: process 0 of 2: found 3")
        damaged = one["damaged"]
        assert damaged["best"] == {"metric": "em", "questions": "these", "value": 0.5}
        assert damaged["record"] == {"step": 3, **damaged["best"]}
        assert "/of 1/run/3" in damaged["said"] and "cannot be read" in damaged["said"] and damaged["took"] < 30
        assert "Odd" in one["odd"] and "1 2" in one["odd"]
        calls, exchanges = one["stopped"]  # asked at the fourth look
        assert one["stopped"] == found[0]["stopped"] and 4 <= calls < 200 and exchanges <= 4


@pytest.mark.parametrize("values", [("", 2, 0), ("127.0.0.1:1", 0, 0), ("127.0.0.1:1", 2, -1), ("127.0.0.1:1", 2, 2)])
def test_half_an_address_is_refused(values):
    """A process that runs alone where it was to be one of several writes over the others' results."""
    with pytest.raises(UserError, match="--coordinator"):
        processes.start(*values)


@pytest.mark.slow
def test_one_two_and_four_processes_agree(tmp_path):
    """The same run on more hosts must be the same run: rollouts, searches, metrics and parameters."""
    policy = Path("toy")
    # Of four processes two share every row; searches are under way in each while all decode.
    over = {"mesh.fsdp": 2, "mesh.tensor": 2, "rollout.overlap_search": True}
    for count in (1, 2, 4):
        finish(start_run(count, 4 // count, tmp_path / str(count), policy, 2, **over))
    whole = metrics_without_clocks(tmp_path / "1")
    assert any(row["reward"] != 0 and row["gradient_norm"] > 0 for row in whole)
    params = final_params(tmp_path / "1")
    for count in (2, 4):
        directory = tmp_path / str(count)
        for name in ("000000", "000001"):
            ours, theirs = (
                [json.loads(line) for line in (d / "trajectories" / f"{name}.jsonl").open()]
                for d in (directory, tmp_path / "1")
            )
            assert len(ours) == 16
            for a, b in zip(ours, theirs, strict=True):
                assert a["ids"] == b["ids"] and a["turns"] == b["turns"] and a["reward"] == b["reward"]
        for row, expected in zip(metrics_without_clocks(directory), whole, strict=True):
            assert row.keys() == expected.keys()
            for key, value in expected.items():
                assert row[key] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), key
        for name, value in final_params(directory).items():
            np.testing.assert_allclose(value, params[name], rtol=0, atol=1e-5 * np.abs(params[name]).max())


@pytest.mark.slow
def test_two_processes_evaluate_as_one(tmp_path):
    """Rows of an evaluation lost between hosts, or written by two at once, would be figures of nothing."""
    flags = ["--model=toy", "--config=configs/smoke.py", "--benchmark=closed_world:mixed", "--count=9", "--slots=8"]
    for count in (1, 2):
        program = [sys.executable, "launch/eval.py", *flags, f"--out={tmp_path / str(count)}"]
        address = f"127.0.0.1:{free_port()}"
        several = [f"--coordinator={address}", f"--processes={count}"] if count > 1 else []
        outs = finish(
            [start([*program, *several, *([f"--process={i}"] if several else [])], 2 // count) for i in range(count)]
        )
        assert "closed_world:mixed" in outs[0] and all("closed_world" not in out for out in outs[1:])
    one, two = (sorted(p.name for p in (tmp_path / name).iterdir()) for name in "12")
    assert one == two
    for name in one:
        if name == "report.html":  # which names its directory
            continue
        ours, theirs = ((tmp_path / count / name).read_text() for count in "12")
        assert ours == theirs, name


@pytest.mark.slow
def test_what_processes_cannot_share_is_refused(tiny_policy, tmp_path):
    """Slots that two hosts cannot halve: one line from each, and nobody left waiting."""
    over = {"mesh.tensor": 2, "rollout.slots": 3}
    for code, _, err in ended(start_run(2, 1, tmp_path, tiny_policy, 1, **over), 120):
        assert code == 2 and "config.rollout.slots: found 3, accepted: a multiple of the 2 processes" in err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_process_ends_the_others(tiny_policy, tmp_path, victim):
    """Hosts that wait for ever for one that is gone burn a pod's hours, and nobody is told."""
    started = start_run(2, 1, tmp_path, tiny_policy, 1000, **{"train.checkpoint_every_steps": 1})
    wait_for(lambda: (tmp_path / "trajectories" / "000002.jsonl").is_file(), started[1 - victim])
    started[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = ended(started)[1 - victim]
    assert time.monotonic() - killed < 60
    assert code in (launching.LOST, -signal.SIGABRT), err[-2000:]  # our thread may hear of it first, or jax's own
    assert "the processes of this run lost each other" in err or "another task died" in err
    assert checkpoint.read_loop(checkpoint.find_checkpoint(tmp_path))["step"] >= 1


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tiny_policy, tmp_path):
    """SIGTERM of one process must save them all; what comes back may be fewer hosts."""
    several, whole = tmp_path / "several", tmp_path / "whole"
    fixed = {"train.checkpoint_every_steps": 1000, "learning.warmup_ratio": 0.0}  # counted out of `train.steps`
    started = start_run(2, 2, several, tiny_policy, 1000, **fixed)
    wait_for(lambda: (several / "trajectories" / "000001.jsonl").is_file(), started[0])
    started[1].send_signal(signal.SIGTERM)
    for out in finish(started):
        assert "interrupted: saved after step" in out
    step = checkpoint.read_loop(checkpoint.find_checkpoint(several))["step"]
    assert step == len(metrics_without_clocks(several)) >= 2
    finish(start_run(1, 1, several, tiny_policy, step + 2, **fixed))
    finish(start_run(1, 4, whole, tiny_policy, step + 2, **fixed))
    for row, expected in zip(metrics_without_clocks(several), metrics_without_clocks(whole), strict=True):
        assert row["reward"] == pytest.approx(expected["reward"], abs=1e-6)
    assert_same_params(several, whole)

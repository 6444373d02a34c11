"""A training run whose retriever dies: it waits and continues unharmed, or saves and stops."""

import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from programs import ROOT, Program
from runs import command, final_params, metrics_without_clocks, run, start, wait_for

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index

# The tiny policy is random and never searches by itself.
SEARCHING = {"rollout.initial_search": True}
SERVE = ROOT / "launch" / "serve_retriever.py"


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """The closed world's passages as an index directory."""
    root = tmp_path_factory.mktemp("world")
    write_corpus(root / "world.jsonl", ClosedWorld.make(0).passages)
    corpus = MemoryMappedCorpus(root / "world.jsonl")
    build_index(root / "index", corpus, HashingEncoder().fit(corpus))
    return root / "index"


def serve(index: Path, port: int = 0) -> tuple[Program, str]:
    flags = [f"--index={index}", f"--port={port}", "--cache_mb=0"]
    server = Program([SERVE, *flags], stderr=subprocess.DEVNULL)
    return server, server.stdout.readline().split()[-1]


def stop(server: Program) -> None:
    server.send_signal(signal.SIGKILL)
    server.communicate()


def rows(workdir: Path) -> int:
    metrics = workdir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


@pytest.mark.slow
def test_a_run_outlives_its_retriever(tiny_policy, index, tmp_path):
    """A killed server delays a run without changing it; if it stays away, the run saves, stops and can be resumed."""
    server, url = serve(index)
    try:
        fields = {"retrieval.url": url, "eval.questions_per_kind": 0, **SEARCHING}
        run(command(tmp_path / "whole", tiny_policy, 6, **fields))

        process = start(command(tmp_path / "hit", tiny_policy, 6, **fields))
        wait_for(lambda: rows(tmp_path / "hit") >= 2, process)
        stop(server)
        time.sleep(3)
        assert process.poll() is None
        server, _ = serve(index, urlsplit(url).port)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert metrics_without_clocks(tmp_path / "hit") == metrics_without_clocks(tmp_path / "whole")
        interrupted, uninterrupted = final_params(tmp_path / "hit"), final_params(tmp_path / "whole")
        assert all(np.array_equal(interrupted[name], uninterrupted[name]) for name in uninterrupted)

        # Gone for good: the run stops cleanly, and the same command resumes it once the retriever is back.
        lost = tmp_path / "lost"
        impatient = command(lost, tiny_policy, 6, **fields, **{"retrieval.retry_deadline_s": 1.0})
        process = start(impatient)
        wait_for(lambda: rows(lost) >= 3, process)
        stop(server)
        _, errors = process.communicate(timeout=300)
        last = errors.strip().splitlines()[-1]
        assert process.returncode == 2 and "no answer in 1 s" in last and url in last, errors
        steps_done = rows(lost)
        assert (lost / "checkpoints" / str(steps_done)).is_dir() and steps_done < 6
        server, _ = serve(index, urlsplit(url).port)
        resumed_run = run(impatient)
        assert f"resuming after step {steps_done}" in resumed_run.stderr
        assert metrics_without_clocks(lost) == metrics_without_clocks(tmp_path / "whole")
    finally:
        stop(server)

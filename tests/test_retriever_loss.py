"""A training run whose retriever dies: it waits, goes on unharmed, or saves and stops."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from runs import ROOT, command, final_params, metrics_without_clocks, run, wait_for

from psearch_jax.data.closed_world import ClosedWorld
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.directory import build_index
from retrieval.hashing import HashingEncoder

# The tiny policy is random and never asks for anything itself.
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


def serve(index: Path, port: int = 0) -> tuple[subprocess.Popen, str]:
    flags = [f"--index={index}", f"--port={port}", "--cache_queries=0"]
    server = subprocess.Popen([sys.executable, str(SERVE), *flags], stdout=subprocess.PIPE, text=True)
    return server, server.stdout.readline().split()[-1]


def stop(server: subprocess.Popen) -> None:
    server.send_signal(signal.SIGKILL)
    server.communicate()


def rows(workdir: Path) -> int:
    metrics = workdir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


@pytest.mark.slow
def test_a_run_outlives_its_retriever(tiny_policy, index, tmp_path):  # noqa: F811
    """kill -9 of the server ends the run, feeds it empty results, or changes what it learns."""
    server, url = serve(index)
    try:
        fields = {"retrieval.url": url, "eval.questions_per_kind": 0, **SEARCHING}
        run(command(tmp_path / "whole", tiny_policy, 6, **fields))

        process = subprocess.Popen(
            command(tmp_path / "hit", tiny_policy, 6, **fields), cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: rows(tmp_path / "hit") >= 2, process)
        stop(server)
        time.sleep(3)
        assert process.poll() is None
        server, _ = serve(index, urlsplit(url).port)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert metrics_without_clocks(tmp_path / "hit") == metrics_without_clocks(tmp_path / "whole")
        resumed, whole = final_params(tmp_path / "hit"), final_params(tmp_path / "whole")
        assert all(np.array_equal(resumed[name], whole[name]) for name in whole)

        # Gone for good: the run stops in order, and the same command goes on when the retriever is back.
        lost = tmp_path / "lost"
        impatient = command(lost, tiny_policy, 6, **fields, **{"retrieval.patience_s": 1.0})
        process = subprocess.Popen(impatient, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: rows(lost) >= 3, process)
        stop(server)
        _, errors = process.communicate(timeout=300)
        last = errors.strip().splitlines()[-1]
        assert process.returncode == 2 and "no answer in 1 s" in last and url in last, errors
        done = rows(lost)
        assert (lost / "checkpoints" / str(done)).is_dir() and done < 6
        server, _ = serve(index, urlsplit(url).port)
        resumed_run = run(impatient)
        assert f"resuming behind step {done}" in resumed_run.stderr
        assert metrics_without_clocks(lost) == metrics_without_clocks(tmp_path / "whole")
    finally:
        stop(server)


def test_an_absent_retriever_stops_the_start(tiny_policy, tmp_path):  # noqa: F811
    """A run without any retriever trains on empty results, or ends in a traceback."""
    fields = {
        "retrieval.url": "http://127.0.0.1:9/retrieve",
        "retrieval.patience_s": 0.5,
        "eval.questions_per_kind": 0,
        **SEARCHING,
    }
    done = run(command(tmp_path / "w", tiny_policy, 1, **fields), expect=2)
    assert "no answer in 0 s" in done.stderr.strip().splitlines()[-1]
    for url in ("127.0.0.1:8000/retrieve", "http://127.0.0.1:8000", "ftp://host/retrieve"):
        done = run(command(tmp_path / "v", tiny_policy, 1, **{"retrieval.url": url}), expect=2)
        assert "config.retrieval.url" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert json.loads((tmp_path / "w" / "config.json").read_text())["retrieval"]["patience_s"] == 0.5

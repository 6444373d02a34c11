"""`launch/bench.py retrieval`: search compared with FAISS and NumPy, BM25 with bm25s and tantivy, one batch with many
calls, and the encoder with PyTorch.

The methods run one after another in one process on the same data: compare the ratios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search import encoder as encoder_benchmark
from benchmarks.search import lexical
from benchmarks.search.vectors import BUILDERS, TARGETS, K, clustered, compare
from benchmarks.speed.timing import machine
from psearch_jax.eval.tables import table
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index
from retrieval.protocol import Passage
from retrieval.ranking.index import EXACT_BELOW_ROWS, ScannIndex, exact_search, tree_settings, tune
from retrieval.remote.client import HttpRetriever

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("vectors", "bm25", "batching", "encoder")
ROLLOUTS = 512
CONCURRENT_CLIENTS = 64


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(flags)}
    if "vectors" in flags.parts:
        report["vectors"] = []
        for rows in flags.rows:
            report["vectors"] += compare(rows, flags.queries, flags.dimensions, tuple(flags.methods), _log)
    if "bm25" in flags.parts:
        report["bm25"] = []
        for rows in flags.bm25_rows:
            report["bm25"] += lexical.compare(rows, flags.bm25_queries, flags.bm25_peers, _log)
    if "batching" in flags.parts:
        report["batching"] = in_process(flags.batching_rows, flags.dimensions) + over_http(flags.http_rows)
    if "encoder" in flags.parts:
        report["encoder"] = encoder_benchmark.measure(flags.model, flags.sentences, _log)
    for part in PARTS:
        if part in report:
            print(f"\n{part}\n{_table(report[part])}")
    if flags.json:
        temporary = Path(f"{flags.json}.tmp")
        temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        temporary.replace(flags.json)


def in_process(rows: int, dimensions: int) -> list[dict[str, Any]]:
    """Search without encoding: the sub-queries of all rollouts in one call, and in many."""
    groups = _rollouts()
    vectors, queries = clustered(rows, sum(groups), dimensions)
    where = f"in process, {rows} rows"
    if rows < EXACT_BELOW_ROWS:
        index = ScannIndex.from_vectors(vectors)
    else:
        index = ScannIndex.from_vectors(vectors, tree_settings(*vectors.shape))
        index = tune(index, queries, exact_search(vectors, queries, K), TARGETS[0])
        where += f", recall {TARGETS[0]}"
    ends = np.cumsum(groups)
    parts = [queries[end - size : end] for size, end in zip(groups, ends, strict=True)]
    ways = {
        "one batch": lambda: index.search(queries, K),
        "one call per rollout": lambda: [index.search(part, K) for part in parts],
        "one call per sub-query": lambda: [index.search(query[None], K) for query in queries],
    }
    return _compare_calls(where, ways)


def over_http(rows: int) -> list[dict[str, Any]]:
    """Encoding, search and transport, with this project's server in a separate process and no cache."""
    groups = _rollouts()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(f"{folder}/corpus.jsonl", _passages(rows))
        corpus = MemoryMappedCorpus(f"{folder}/corpus.jsonl")
        build_index(f"{folder}/index", corpus, HashingEncoder().fit(corpus))
        queries = [f"{p.title} {p.text[:20]} {n}" for n, p in enumerate(_passages(sum(groups), seed=1))]
        ends = np.cumsum(groups)
        parts = [queries[end - size : end] for size, end in zip(groups, ends, strict=True)]
        command = [sys.executable, str(ROOT / "launch" / "serve_retriever.py"), f"--index={folder}/index"]
        server = subprocess.Popen([*command, "--port=0", "--cache_queries=0"], stdout=subprocess.PIPE, text=True)
        try:
            client = HttpRetriever(server.stdout.readline().split()[-1], retry_deadline_s=0)
            with ThreadPoolExecutor(CONCURRENT_CLIENTS) as pool:
                ways: dict[str, Callable[[], Any]] = {
                    "one batch": lambda: client.search(queries, K),
                    "one call per rollout": lambda: [client.search(part, K) for part in parts],
                    "one call per sub-query": lambda: [client.search([query], K) for query in queries],
                    f"one call per rollout, {CONCURRENT_CLIENTS} at once": lambda: list(
                        pool.map(lambda part: client.search(part, K), parts)
                    ),
                }
                lines = _compare_calls(f"over HTTP, {rows} rows", ways)
        finally:
            server.terminate()
            server.communicate()
    return lines


def _compare_calls(setup: str, calls: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    lines, first = [], None
    for name, call in calls.items():
        call()  # warm
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        first = first or seconds
        lines.append({"setup": setup, "calls": name, "seconds": round(seconds, 3), "ratio": round(seconds / first, 1)})
        _log(str(lines[-1]))
    return lines


def _rollouts() -> list[int]:
    """The number of sub-queries of each rollout: 1 to 4."""
    return np.random.default_rng(0).integers(1, 5, ROLLOUTS).tolist()


def _passages(count: int, seed: int = 0) -> list[Passage]:
    """Passages of 60 words from a vocabulary in which few words are common."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefghiklmnoprstuvw"), rng.integers(3, 10))) for _ in range(20_000)]
    picks = np.minimum(rng.zipf(1.3, (count, 62)), len(words)) - 1
    lines = [[words[pick] for pick in row] for row in picks]
    return [Passage(str(n), " ".join(line[:2]) + f" {n}", " ".join(line[2:])) for n, line in enumerate(lines)]


def _table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table of the lines' common columns."""
    columns = list(lines[0])
    return table([columns, *(["" if line[c] is None else str(line[c]) for c in columns] for line in lines)])


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench retrieval", description=__doc__)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="parts to run")
    parser.add_argument("--rows", nargs="+", type=int, default=[6_000, 100_000, 1_000_000], help="numbers of vectors")
    parser.add_argument("--dimensions", type=int, default=384, help="width of a vector")
    parser.add_argument("--queries", type=int, default=1024, help="queries per batch of vector search")
    parser.add_argument(
        "--methods", nargs="+", default=list(BUILDERS), choices=list(BUILDERS), help="methods of vector search"
    )
    parser.add_argument("--bm25_rows", nargs="+", type=int, default=[1_000_000], help="numbers of passages for BM25")
    parser.add_argument("--bm25_queries", type=int, default=1279, help="queries per batch of BM25")
    parser.add_argument(
        "--bm25_peers", action=argparse.BooleanOptionalAction, default=True, help="also run bm25s and tantivy"
    )
    parser.add_argument("--batching_rows", type=int, default=100_000, help="vectors for batching in process")
    parser.add_argument("--http_rows", type=int, default=6_000, help="passages for batching over HTTP")
    parser.add_argument("--model", help="directory of a BERT encoder (default: MiniLM's shape, random weights)")
    parser.add_argument("--sentences", type=int, default=1024, help="texts per measurement of the encoder")
    return parser.parse_args(argv)

"""`launch/bench.py retrieval`: vector search compared with NumPy and FAISS, BM25 with bm25s, and one batch of queries
with many calls. All methods run one after another in one process on the same data: compare the ratios.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import timing
from retrieval.protocol import Passage
from retrieval.ranking.bm25 import Bm25Ranker
from retrieval.ranking.index import EXACT_BELOW_ROWS, ScannIndex, exact_search, tree_settings, tune

K = 3
TARGET = 0.95  # recall to which all approximate methods are tuned
INTRINSIC_DIMENSIONS = 48  # sentence vectors vary in far fewer directions than they have coordinates
ROWS_PER_CLUSTER = 50
ROLLOUTS = 512  # whose sub-queries are searched in one batch and in many calls
Search = Callable[[np.ndarray], np.ndarray]  # queries [Q, D] -> rows [Q, K]


def main(argv: Sequence[str]) -> None:
    parser = timing.make_parser("retrieval", __doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[6_000, 1_000_000], help="numbers of passages")
    parser.add_argument("--dimensions", type=int, default=384, help="width of a vector")
    flags = parser.parse_args(argv)
    has_faiss, has_bm25s = timing.find_peers(True, "faiss"), timing.find_peers(True, "bm25s", "numba")
    lines: list[dict[str, Any]] = []
    for rows in flags.rows:
        lines += [{"rows": rows} | line for line in compare_vectors(rows, flags.dimensions, has_faiss)]
        lines += [{"rows": rows} | line for line in compare_bm25(rows, has_bm25s)]
    timing.report(flags, "retrieval", lines)


def measure(method: str, search: Callable[[], Any], reference_s: float | None, **figures: Any) -> dict[str, Any]:
    """A line with the best of three calls; `speedup` is relative to `reference_s`, the first line's seconds."""
    seconds = min(time_once(search) for _ in range(3))
    line = {"method": method, "seconds": float(f"{seconds:.3g}"), **figures}
    return line | {"speedup": round((reference_s or seconds) / seconds, 2)}


def time_once(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare_vectors(rows: int, dimensions: int, has_faiss: bool) -> Iterator[dict[str, Any]]:
    """A line per method of vector search, for the sub-queries (1 to 4) of all rollouts in one batch."""
    groups = np.random.default_rng(0).integers(1, 5, ROLLOUTS)
    vectors, queries = clustered_vectors(rows, int(groups.sum()), dimensions)
    truth = exact_search(vectors, queries, K)
    exact = measure("numpy, exact", lambda: exact_search(vectors, queries, K), None, recall=1.0)
    yield exact

    def recall_of(search: Search) -> float:
        return round(float((truth[:, :, None] == search(queries)[:, None, :]).any(axis=2).mean()), 4)

    if rows < EXACT_BELOW_ROWS:
        index = ScannIndex.from_vectors(vectors)
    else:
        index = tune(ScannIndex.from_vectors(vectors, tree_settings(rows, dimensions)), queries, truth, TARGET)
    methods: dict[str, Search] = {"this project": lambda q: index.search(q, K)[0]}
    if has_faiss:
        methods["faiss IVF-Flat"] = faiss_ivf(vectors, recall_of)
    for name, search in methods.items():
        yield measure(name, lambda search=search: search(queries), exact["seconds"], recall=recall_of(search))
    parts = np.split(queries, np.cumsum(groups)[:-1])
    yield measure(
        "this project, a call per rollout", lambda: [index.search(part, K) for part in parts], exact["seconds"]
    )


def clustered_vectors(rows: int, queries: int, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors [rows, D] in clusters of uneven size, and held-out queries [queries, D] from the same clusters."""
    rng = np.random.default_rng(0)
    clusters = max(1, rows // ROWS_PER_CLUSTER)
    centres = rng.standard_normal((clusters, INTRINSIC_DIMENSIONS), np.float32)
    lift = rng.standard_normal((INTRINSIC_DIMENSIONS, dimensions), np.float32) / math.sqrt(INTRINSIC_DIMENSIONS)
    # Squared uniform numbers: a few clusters are large, most are small.
    member = (clusters * rng.random(rows + queries) ** 2).astype(np.int64)
    out = np.empty((rows + queries, dimensions), np.float32)
    for start in range(0, len(out), 2**16):
        chosen = member[start : start + 2**16]
        inner = centres[chosen] + 0.6 * rng.standard_normal((len(chosen), INTRINSIC_DIMENSIONS), np.float32)
        block = inner @ lift + 0.1 * rng.standard_normal((len(chosen), dimensions), np.float32)
        out[start : start + 2**16] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return out[:rows], out[rows:]


def faiss_ivf(vectors: np.ndarray, recall_of: Callable[[Search], float]) -> Search:
    """The smallest number of probes that reaches `TARGET`."""
    import faiss

    faiss.omp_set_num_threads(os.cpu_count())
    leaves, dimensions = 2 * math.isqrt(len(vectors)), vectors.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimensions), dimensions, leaves, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    for index.nprobe in sorted({min(leaves, math.ceil(1.3**step)) for step in range(40)}):
        if recall_of(lambda q: index.search(q, K)[1]) >= TARGET:
            break
    return lambda q: index.search(q, K)[1]


def compare_bm25(rows: int, has_bm25s: bool) -> Iterator[dict[str, Any]]:
    """BM25 over passages of 60 words from a vocabulary in which few words are common; queries are cut from them."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in row) for row in np.minimum(rng.zipf(1.3, (rows, 60)), 50_000)]
    queries = [" ".join(texts[i].split()[:8]) for i in rng.integers(0, rows, 1000)]
    ranker = Bm25Ranker.build([Passage(str(i), "", text) for i, text in enumerate(texts)])
    ours, _ = ranker.rank(queries, K)
    first = measure("BM25, this project", lambda: ranker.rank(queries, K), None)
    yield first
    if has_bm25s:
        import bm25s

        peer = bm25s.BM25(method="lucene", k1=1.2, b=0.75, backend="numba")
        peer.index(bm25s.tokenize(texts, stopwords=None, show_progress=False), show_progress=False)
        asked = bm25s.tokenize(queries, stopwords=None, show_progress=False)
        arguments = {"k": K, "n_threads": os.cpu_count(), "show_progress": False, "return_as": "documents"}
        same = float((peer.retrieve(asked, **arguments)[:, 0] == ours[:, 0]).mean())
        yield measure("BM25, bm25s", lambda: peer.retrieve(asked, **arguments), first["seconds"], same_first=same)

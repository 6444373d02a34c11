"""ScaNN as this project uses it, compared with NumPy and FAISS: same vectors, all tuned to the same recall."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.ranking.index import EXACT_BELOW_ROWS, ScannIndex, exact_search, recall, tree_settings, tune

K = 3
TARGETS = (0.95, 0.99)
INTRINSIC_DIMENSIONS = 48  # sentence vectors vary in far fewer directions than they have coordinates
ROWS_PER_CLUSTER = 50

WATCH = """
import select, sys
def anonymous():
    with open(f"/proc/{sys.argv[1]}/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))
peak = anonymous()
print(peak, flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]:
    peak = max(peak, anonymous())
print(peak)
"""

Search = Callable[[np.ndarray], np.ndarray]  # queries [Q, D] -> rows [Q, K]


def clustered(rows: int, queries: int, dimensions: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors [rows, D] in clusters of uneven size, and held-out queries [queries, D] from the same clusters."""
    rng = np.random.default_rng(seed)
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


def compare(rows: int, queries: int, dimensions: int, methods: tuple[str, ...], log: Callable[[str], None]) -> list:
    """One line per method and target: recall, seconds per batch, speedup over exact NumPy, build seconds, size."""
    vectors, asked = clustered(rows, queries, dimensions)
    truth = exact_search(vectors, asked, K)
    exact_s = _seconds(lambda: exact_search(vectors, asked, K))
    lines = [_line(rows, "numpy exact", None, 1.0, exact_s, exact_s, 0.0, [0], vectors.nbytes, vectors.nbytes, {})]
    log(str(lines[-1]))
    for name in methods:
        start = time.perf_counter()
        with growth() as grown:
            index, disk, memory = BUILDERS[name](vectors)
        build_s = time.perf_counter() - start
        for target in (None,) if index.exact else TARGETS:
            measured, seconds, setting = index.cheapest(asked, truth, target)
            lines.append(_line(rows, name, target, measured, seconds, exact_s, build_s, grown, disk, memory, setting))
            log(str(lines[-1]))
        del index
    return lines


def _line(rows, name, target, measured, seconds, exact_s, build_s, grown, disk, memory, setting) -> dict[str, Any]:
    return {
        "rows": rows,
        "method": name,
        "target": target,
        "recall": round(measured, 4),
        "batch_s": round(seconds, 4),
        "speedup_over_exact": round(exact_s / seconds, 1),
        "build_s": round(build_s, 1),
        "build_mb": round(grown[0] / 2**20),
        "disk_mb": round(disk / 2**20),
        "memory_mb": round(memory / 2**20),
        "setting": setting,
    }


@contextmanager
def growth() -> Iterator[list[int]]:
    """Yields a list that gets, at the end, the peak growth of this process's anonymous memory in bytes."""
    watch = [sys.executable, "-c", WATCH, str(os.getpid())]  # a separate process, since a builder may hold the GIL
    grown: list[int] = []
    with subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watcher:
        try:
            assert watcher.stdout is not None
            before = int(watcher.stdout.readline())
            yield grown
        finally:
            peak, _ = watcher.communicate()
    grown.append(int(peak) - before)


class _Scann:
    """This project's index: exact below its threshold, otherwise tuned as `build_index --target_recall` does."""

    def __init__(self, index: ScannIndex):
        self.index, self.exact = index, index.tree is None

    def cheapest(self, queries: np.ndarray, truth: np.ndarray, target: float | None) -> tuple[float, float, dict]:
        tuned = self.index if target is None else tune(self.index, queries, truth, target)
        setting = {} if tuned.tree is None else asdict(tuned.tree)
        return recall(tuned, queries, truth), _seconds(lambda: tuned.search(queries, K)), setting


class _Faiss:
    """A FAISS index with a ladder of settings, cheapest first; `exact` if it has no settings."""

    def __init__(self, search: Search, apply: Callable[..., None] | None = None, ladder: list[dict] | None = None):
        self.search, self.apply, self.ladder, self.exact = search, apply, ladder or [{}], ladder is None

    def cheapest(self, queries: np.ndarray, truth: np.ndarray, target: float | None) -> tuple[float, float, dict]:
        """The fastest setting that reaches the target, or the one with the best recall if none does."""
        reaching, best = [], (0.0, 0.0, {})
        for group in self._groups():
            for setting in group:  # recall grows within a group, so the first one that reaches the target is cheapest
                if self.apply:
                    self.apply(**setting)
                rows = self.search(queries)
                measured = float((truth[:, :, None] == rows[:, None, :]).any(axis=2).mean())
                if measured > best[0]:
                    best = (measured, _seconds(lambda: self.search(queries)), setting)
                if target is None or measured >= target:
                    reaching.append((measured, _seconds(lambda: self.search(queries)), setting))
                    break
        return min(reaching, key=lambda entry: entry[1]) if reaching else best

    def _groups(self) -> Iterator[list[dict]]:
        """The ladder grouped by refinement factor."""
        factors = sorted({setting.get("k_factor", 0) for setting in self.ladder})
        for factor in factors:
            yield [setting for setting in self.ladder if setting.get("k_factor", 0) == factor]


def _scann(vectors: np.ndarray) -> tuple[_Scann, int, int]:
    tree = tree_settings(*vectors.shape) if len(vectors) >= EXACT_BELOW_ROWS else None
    index = ScannIndex.from_vectors(vectors, tree)
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "scann")
        sizes = {p.name: p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()}
    size, codes = sum(sizes.values()), sum(n for name, n in sizes.items() if name.startswith("hashed_dataset"))
    # In memory two codes share a byte. The vectors count for every method, though a tree leaves them mapped on disk.
    return _Scann(index), size + vectors.nbytes, size - codes // 2 + vectors.nbytes


def _flat(vectors: np.ndarray) -> tuple[_Faiss, int, int]:
    faiss = _faiss()
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return _Faiss(lambda q: index.search(q, K)[1]), vectors.nbytes, vectors.nbytes


def _probes(leaves: int) -> list[int]:
    return sorted({min(leaves, math.ceil(1.3**step)) for step in range(4, 40)})


def _ivf(vectors: np.ndarray, factor: int = 2) -> tuple[_Faiss, int, int]:
    faiss = _faiss()
    rows, dimensions = vectors.shape
    leaves = factor * math.isqrt(rows)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimensions), dimensions, leaves, faiss.METRIC_INNER_PRODUCT)
    index.cp.max_points_per_centroid = 64
    index.train(vectors)
    index.add(vectors)

    def apply(nprobe: int) -> None:
        index.nprobe = nprobe

    return _Faiss(lambda q: index.search(q, K)[1], apply, [{"nprobe": n} for n in _probes(leaves)]), *_size(index)


def _ivf_pq(vectors: np.ndarray) -> tuple[_Faiss, int, int]:
    faiss = _faiss()
    rows, dimensions = vectors.shape
    leaves = 2 * math.isqrt(rows)
    base = faiss.IndexIVFPQ(
        faiss.IndexFlatIP(dimensions), dimensions, leaves, dimensions // 4, 8, faiss.METRIC_INNER_PRODUCT
    )
    base.cp.max_points_per_centroid = 128
    index = faiss.IndexRefineFlat(base)
    index.train(vectors)
    index.add(vectors)

    def apply(nprobe: int, k_factor: int) -> None:
        base.nprobe, index.k_factor = nprobe, k_factor

    ladder = [{"nprobe": n, "k_factor": f} for f in (4, 16, 64) for n in _probes(leaves)]
    return _Faiss(lambda q: index.search(q, K)[1], apply, ladder), *_size(index)


def _hnsw(vectors: np.ndarray) -> tuple[_Faiss, int, int]:
    faiss = _faiss()
    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 64
    index.add(vectors)

    def apply(efSearch: int) -> None:  # noqa: N803 (FAISS's own name)
        index.hnsw.efSearch = efSearch

    ladder = [{"efSearch": math.ceil(8 * 1.4**step)} for step in range(16)]
    return _Faiss(lambda q: index.search(q, K)[1], apply, ladder), *_size(index)


BUILDERS = {
    "scann": _scann,
    "faiss Flat": _flat,
    "faiss IVF-Flat": _ivf,
    "faiss IVF-Flat, 4x lists": functools.partial(_ivf, factor=8),
    "faiss IVF-PQ": _ivf_pq,
    "faiss HNSW": _hnsw,
}


def _faiss() -> Any:
    import faiss  # only a peer in benchmarks: pip install -e '.[bench]'

    faiss.omp_set_num_threads(os.cpu_count())
    return faiss


def _size(index: Any) -> tuple[int, int]:
    """Bytes on disk and in memory, which are equal for FAISS."""
    with tempfile.TemporaryDirectory() as folder:
        _faiss().write_index(index, f"{folder}/index")
        size = os.path.getsize(f"{folder}/index")
    return size, size


def _seconds(call: Callable[[], Any]) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)

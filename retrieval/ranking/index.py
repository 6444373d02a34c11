"""ScaNN over passage vectors: exact for small corpora, a tree with quantised scores for large ones.

The final scores are always exact inner products of ScaNN's candidates, so that a replayed search gives equal results.
"""

from __future__ import annotations

import bisect
import errno
import functools
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from retrieval.protocol import CorpusError, Encoder, RetrievalError

_STDERR = threading.RLock()
EXACT_BELOW_ROWS = 100_000  # below, a tree lost recall and saved no time
MIN_TREE_ROWS = 16  # the fewest that ScaNN's quantiser can be trained on
SCORE_DECIMALS = 4
QUERIES_PER_TASK = 256  # a batch is spread over the cores in parts of at most this size
SPARE_CANDIDATES = 8  # fetched beyond k, to detect ties at the cut
MAX_CANDIDATES = 4096  # more equal scores than this at the cut are not ordered by row


@dataclass(frozen=True)
class TreeSettings:
    """How a tree is built and searched; the defaults come from `tree_settings`."""

    leaves: int  # partitions of the corpus
    searched_leaves: int  # partitions searched per query
    reordered: int  # candidates per query that are scored again from an 8-bit copy
    dimensions_per_block: int  # of the quantiser: more give smaller, coarser codes
    soar_lambda: float = 1.5  # weight of the spilled second partition (Sun et al. 2023, SOAR)


class ScannIndex:
    """Maximum inner product search. Results of a query do not depend on the rest of its batch."""

    def __init__(self, vectors: np.ndarray, searcher: Any, tree: TreeSettings | None = None):
        """`vectors` [N, D] float32, possibly memory-mapped; `searcher`: ScaNN's over them, exact without `tree`."""
        self.rows, self.dimensions = vectors.shape
        self.vectors = vectors
        self.tree = tree
        self._searcher = searcher

    @classmethod
    def from_vectors(
        cls, vectors: np.ndarray, tree: TreeSettings | None = None, log: Path | None = None
    ) -> ScannIndex:
        """Index `vectors` [N, D]: exact, or with `tree`. ScaNN's output is appended to `log`.

        Raises `CorpusError` on a vector that is not finite: ScaNN would abort the process.
        """
        if vectors.ndim != 2 or not len(vectors):
            raise CorpusError(f"the vectors have shape {vectors.shape}, expected [N, D] with N >= 1")
        if not isinstance(vectors, np.memmap):
            vectors = np.ascontiguousarray(vectors, np.float32)
        refuse_non_finite(vectors)
        with redirect_stderr(log):
            return cls(vectors, _build_searcher(vectors, tree), tree)

    @classmethod
    def load(cls, directory: Path, vectors: np.ndarray, tree: TreeSettings) -> ScannIndex:
        """Open the index that `save` wrote into `directory`, over the same `vectors` [N, D].

        Raises `CorpusError` if ScaNN reports an error; a damaged tree can also make it abort the process.
        """
        try:
            with redirect_stderr():
                searcher = _import_scann().scann_ops_pybind.load_searcher(str(directory))
        except RuntimeError as error:
            raise CorpusError(f"{directory}: ScaNN cannot open it ({error}); build the index again") from None
        return cls(vectors, searcher, tree)

    def save(self, directory: Path, log: Path | None = None) -> None:
        """Write the tree into the new `directory`. ScaNN's output is appended to `log`.

        Raises `OSError` when the disk has not enough space.
        """
        assert self.tree is not None
        directory.mkdir()
        needed = tree_bytes(self.rows, self.dimensions, self.tree)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"the tree takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        try:
            with redirect_stderr(log):
                self._searcher.serialize(str(directory), relative_path=True)
        except RuntimeError as error:
            raise OSError(errno.EIO, f"ScaNN cannot write the tree ({error})") from None

    def with_search(self, searched_leaves: int, reordered: int) -> ScannIndex:
        """The same tree, searched with more or less effort."""
        assert self.tree is not None
        tree = replace(self.tree, searched_leaves=searched_leaves, reordered=reordered)
        return ScannIndex(self.vectors, self._searcher, tree)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best rows per query: row ids [Q, k] int64 and scores [Q, k] float32, best first.

        Scores are exact inner products rounded to four decimals; at ties the lower row comes first. Missing results
        (a zero query, k > N) have id -1 and score -inf. Raises `RetrievalError` on a non-finite query.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        if not np.isfinite(queries).all():
            raise RetrievalError("a query vector is not finite: the encoder overflowed or its weights are damaged")
        ids, scores = empty_result(len(queries), k)
        pending, candidates = np.flatnonzero(queries.any(axis=1)), k + SPARE_CANDIDATES
        limit = min(self.rows, max(candidates, MAX_CANDIDATES))
        while pending.size:
            candidates = min(candidates, limit)
            rows, values = self._rescore(queries[pending], candidates)
            width = min(k, candidates)
            ids[pending, :width], scores[pending, :width] = rows[:, :width], values[:, :width]
            # When the k-th score ties with the last candidate's, rows beyond the cut may tie too: fetch more.
            tied = values[:, width - 1] < values[:, -1] + 1.5 * 10.0**-SCORE_DECIMALS
            pending = pending[tied] if candidates < limit else pending[:0]
            candidates *= 4
        return ids, scores

    def _rescore(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` best rows [Q, count] by ScaNN, scored exactly, rounded and ordered by (-score, row).

        ScaNN's own scores vary in the last bits with the batch size, so a replay would order ties differently.
        """
        effort = {}
        if self.tree is not None:
            reordered = max(self.tree.reordered, count)
            effort = {"pre_reorder_num_neighbors": reordered, "leaves_to_search": self.tree.searched_leaves}
        share = -(-len(queries) // (os.cpu_count() or 1))
        try:
            rows, approximate = self._searcher.search_batched_parallel(
                queries, count, batch_size=min(QUERIES_PER_TASK, share), **effort
            )
        except RuntimeError as error:
            raise RetrievalError(f"ScaNN failed on {len(queries)} queries: {error}") from error
        rows = rows.astype(np.int64)
        missing = np.isnan(approximate)  # a tree with too few results pads with row 0 and NaN
        scores = np.empty(rows.shape)
        rows_per_block = max(1, 2**24 // (count * self.dimensions))  # 64 MB of gathered vectors at a time
        for start in range(0, len(queries), rows_per_block):
            block = slice(start, start + rows_per_block)
            scores[block] = np.einsum("qcd,qd->qc", self.vectors[rows[block]], queries[block], dtype=np.float64)
        scores = np.where(missing, -np.inf, np.round(scores, SCORE_DECIMALS) + 0.0)  # + 0.0: no negative zero
        rows[missing] = -1
        return sort_best_first(rows, scores)


class DenseRanker:
    """Implements `Ranker`: one encoding and one index search per call."""

    def __init__(self, index: ScannIndex, encoder: Encoder):
        """Raises `CorpusError` when the encoder's vectors have another width."""
        if encoder.dimensions != index.dimensions:
            raise CorpusError(
                f"the index holds vectors of {index.dimensions} dimensions, the encoder makes {encoder.dimensions}"
            )
        self.index, self.encoder, self.rows = index, encoder, index.rows

    @property
    def identity(self) -> Any:
        """See `Ranker.identity`."""
        return {"encoder": self.encoder.identity, "tree": asdict(self.index.tree) if self.index.tree else None}

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ranker.rank`."""
        return self.index.search(self.encoder.encode_queries(queries), k)


def tree_settings(rows: int, dimensions: int) -> TreeSettings:
    """Settings for a corpus of this size: about 2 sqrt(rows) leaves, a tenth of them searched.

    A tenth suits encoders of unknown quality (hashed words form few clusters); `tune` measures what a corpus needs.
    """
    leaves = min(rows, 2 * math.isqrt(rows))
    return TreeSettings(
        leaves=leaves,
        searched_leaves=max(1, leaves // 10),
        reordered=min(100, rows),
        # With more than 256 blocks ScaNN silently drops its faster selection of the best rows.
        dimensions_per_block=max(min(2, dimensions), math.ceil(dimensions / 256)),
    )


def training_rows(rows: int, leaves: int) -> int:
    """How many vectors train the tree's partitions."""
    return min(rows, max(250_000, 40 * leaves))


def tree_bytes(rows: int, dimensions: int, tree: TreeSettings) -> int:
    """The bytes that ScaNN writes to disk for a tree: the reorder copy, a byte per code, leaf numbers, and centroids.

    Every vector is in two leaves (SOAR), with different codes in each. In memory two codes share a byte.
    """
    codes = 2 * math.ceil(dimensions / tree.dimensions_per_block)
    return rows * (dimensions + codes + 8) + 8 * tree.leaves * dimensions


def tune(index: ScannIndex, queries: np.ndarray, truth: np.ndarray, target: float) -> ScannIndex:
    """The index with the fastest search whose `measure_recall` reaches `target`, or with the best recall if none does.

    Recall grows with the number of searched leaves and of reordered candidates. For every number of candidates,
    bisection gives the fewest leaves that reach the target; the fastest of these pairs is chosen.

    Args:
      queries: [Q, D] float32.
      truth: [Q, k] int64, their best rows by `exact_search`.
    """
    assert index.tree is not None
    k = truth.shape[1]
    ladder = sorted({min(index.tree.leaves, math.ceil(1.3**step)) for step in range(60)})
    measured: list[tuple[float, float, ScannIndex]] = []  # recall, seconds, index
    for reordered in (16, 32, 64, 128, 256, 512):
        if not k + SPARE_CANDIDATES <= reordered <= index.rows:
            continue
        efforts = [index.with_search(leaves, reordered) for leaves in ladder]
        reach = functools.partial(measure_recall, queries=queries, truth=truth)
        candidate = efforts[bisect.bisect_left(efforts, target, hi=len(efforts) - 1, key=reach)]
        seconds = min(_time_search(candidate, queries, k) for _ in range(3))
        measured.append((measure_recall(candidate, queries, truth), seconds, candidate))
    reaching = [entry for entry in measured if entry[0] >= target]
    if not reaching:
        return max(measured, key=lambda entry: entry[0], default=(0, 0, index))[2]
    return min(reaching, key=lambda entry: entry[1])[2]


def measure_recall(index: ScannIndex, queries: np.ndarray, truth: np.ndarray) -> float:
    """The share of the true best rows `truth` [Q, k] in the results of a search for k rows; ids of -1 are skipped."""
    ids, _ = index.search(queries, truth.shape[1])
    hits = (truth[:, :, None] == ids[:, None, :]).any(axis=2)
    return float(hits[truth >= 0].mean())


def exact_search(vectors: np.ndarray, queries: np.ndarray, k: int, block_rows: int = 2**16) -> np.ndarray:
    """The best rows [Q, k] int64 of `vectors` [N, D] per query [Q, D], by brute force; -1 where k > N."""
    best, scores = empty_result(len(queries), k)
    for start in range(0, len(vectors), block_rows):
        products = queries @ np.asarray(vectors[start : start + block_rows]).T
        width = min(k, products.shape[1])
        top = np.argpartition(-products, width - 1, axis=1)[:, :width]
        ids = np.concatenate([best, top + start], axis=1)
        values = np.concatenate([scores, np.take_along_axis(products, top, axis=1)], axis=1)
        best, scores = (array[:, :k] for array in sort_best_first(ids, values))
    return best


def sort_best_first(ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order each row by descending score, equal scores by ascending id."""
    order = np.lexsort((ids, -scores), axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)


def empty_result(queries: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The empty result: ids of -1 [Q, k] int64 and scores of -inf [Q, k] float32."""
    return np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf, np.float32)


def refuse_non_finite(vectors: np.ndarray, first_row: int = 0, block_rows: int = 2**16) -> None:
    """Raise `CorpusError` naming the first row that is not finite: ScaNN aborts the process on NaN."""
    for start in range(0, len(vectors), block_rows):
        bad = np.flatnonzero(~np.isfinite(vectors[start : start + block_rows]).all(axis=1))
        if bad.size:
            raise CorpusError(f"the vector of passage row {first_row + start + bad[0]} is not finite")


def _build_searcher(vectors: np.ndarray, tree: TreeSettings | None) -> Any:
    """A ScaNN searcher over `vectors` [N, D]: brute force, or tree + quantised scores + reordering."""
    scann = _import_scann()
    builder = scann.scann_ops_pybind.builder(vectors, 10, "dot_product")
    if tree is None:
        return builder.score_brute_force().build()
    return (
        builder.tree(
            num_leaves=tree.leaves,
            num_leaves_to_search=tree.searched_leaves,
            training_sample_size=training_rows(len(vectors), tree.leaves),
            spherical=True,
            soar_lambda=tree.soar_lambda,
        )
        .score_ah(tree.dimensions_per_block, anisotropic_quantization_threshold=0.2)
        .reorder(tree.reordered, quantize=scann.ReorderType.INT8)
        .build()
    )


def _time_search(index: ScannIndex, queries: np.ndarray, k: int) -> float:
    start = time.perf_counter()
    index.search(queries, k)
    return time.perf_counter() - start


def _import_scann() -> Any:
    """ScaNN, imported late: clients of a remote retriever do not need it."""
    # It imports TensorFlow, for operations that are not used here, and fails if it finds another version than its own.
    is_absent = "tensorflow" not in sys.modules
    if is_absent:
        sys.modules["tensorflow"] = cast(Any, None)  # an import of it then fails, as if it were not installed
    try:
        import scann
    except ImportError as error:
        raise RetrievalError(f"ScaNN cannot be imported ({error}); install it: pip install scann (Linux)") from None
    finally:
        if is_absent:
            del sys.modules["tensorflow"]
    return scann


@contextmanager
def redirect_stderr(log: Path | None = None) -> Iterator[None]:
    """Append what ScaNN's C++ writes to file descriptor 2 to `log`, or discard it without one.

    One thread at a time, because the process has one such descriptor. Other output to it also goes to the log.
    """
    with _STDERR, open(log or os.devnull, "ab") as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)

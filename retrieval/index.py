"""A ScaNN index over passage vectors, in memory or as a directory that proves its own integrity.

An index directory is self-contained and can be moved:

    manifest.json         rows, dimensions, metric, encoder identity, self-check, size and sha256 of every other file
    corpus.jsonl          the passages         corpus.offsets.npy   where each row starts
    vectors.npy           [N, D] float32       encoder_*            what the encoder needs besides its identity
    scann/                the search tree; absent for small corpora, whose exact search needs the vectors alone
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from retrieval.corpus import MemoryMappedCorpus
from retrieval.manifest import load_array, read_manifest, write_manifest
from retrieval.protocol import CorpusError, Encoder, Passage, RetrievalError

EXACT_BELOW_ROWS = 100_000  # up to here a tree lost recall and saved no time
SCORE_DECIMALS = 4
# A tenth of the leaves: hashed words form few clusters (recall@3 is 0.73 on 16k random texts, 0.93 at four tenths),
# dense encoders reach 0.99 with less.
SEARCHED_LEAVES_DIVISOR = 10
QUERIES_PER_TASK = 64  # a batch is spread over the cores in pieces of this size
SPARE_CANDIDATES = 8  # fetched beyond k, so that ties at the cut are seen
MAX_CANDIDATES = 4096  # more equal scores than this at the cut are not told apart by row
COPY_BELOW_BYTES = 256 * 2**20  # larger corpora are hard-linked into the index where the disk allows it
ENCODE_ROWS = 4096
SELF_CHECK_ROWS = 200


class ScannIndex:
    """Maximum inner product search. Equal queries get equal results, whatever else is in the batch."""

    def __init__(self, vectors: np.ndarray, searcher: Any, manifest: dict[str, Any] | None = None):
        """`vectors` [N, D] float32 (may be memory-mapped), `searcher` a ScaNN searcher over them."""
        self.vectors = vectors
        self.manifest = manifest or {}
        self._searcher = searcher

    @property
    def rows(self) -> int:
        """N, the number of passages."""
        return self.vectors.shape[0]

    @property
    def dimensions(self) -> int:
        """D, the width of a vector."""
        return self.vectors.shape[1]

    @classmethod
    def from_vectors(cls, vectors: np.ndarray, exact_below_rows: int = EXACT_BELOW_ROWS) -> ScannIndex:
        """Index `vectors` [N, D] in memory: exact search below `exact_below_rows`, a tree from there on."""
        if vectors.ndim != 2 or not len(vectors):
            raise CorpusError(f"the vectors have shape {vectors.shape}, expected [N, D] with N >= 1")
        vectors = np.ascontiguousarray(vectors, np.float32) if not isinstance(vectors, np.memmap) else vectors
        _refuse_non_finite(vectors)
        return cls(vectors, _build_searcher(vectors, exact_below_rows))

    @classmethod
    def build(
        cls,
        directory: str | os.PathLike[str],
        corpus: MemoryMappedCorpus,
        encoder: Encoder,
        overwrite: bool = False,
        exact_below_rows: int = EXACT_BELOW_ROWS,
    ) -> ScannIndex:
        """Encode and index a corpus into `directory`, which appears only when it is complete; return it opened.

        Raises `CorpusError` when the directory is in the way, cannot be written, or an encoding is not finite.
        """
        directory = Path(directory).absolute()
        _refuse_occupied(directory, corpus.path, overwrite)
        partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
        replaced = directory.with_name(f".{directory.name}.{os.getpid()}.replaced")
        try:
            partial.mkdir(parents=True)
            _fill(partial, corpus, encoder, exact_below_rows)
            if directory.exists():
                os.replace(directory, replaced)
            os.replace(partial, directory)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise CorpusError(f"{directory}: the index cannot be written ({error})") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return cls.open(directory)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> ScannIndex:
        """Open an index directory after checking every file against its manifest.

        ScaNN itself loads damaged files without a word and then answers wrongly. Raises `CorpusError` naming the file.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        vectors = load_array(directory / "vectors.npy", (manifest["rows"], manifest["dimensions"]), np.float32)
        load_array(directory / "corpus.offsets.npy", (manifest["rows"],), np.int64)
        has_tree = any(name.startswith("scann/") for name in manifest["files"])
        searcher = _load_searcher(directory / "scann") if has_tree else _build_searcher(vectors, len(vectors) + 1)
        return cls(vectors, searcher, manifest)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best rows per query: ids [Q, k] int64 and scores [Q, k] float32, best first.

        Scores are exact inner products rounded to four decimals, ties go to the lower row. Where there is nothing to
        return (a zero query, k > N) the id is -1 and the score -inf. Raises `RetrievalError` on a non-finite query.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimensions:
            raise ValueError(f"queries have shape {queries.shape}, expected [Q, {self.dimensions}]")
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        if not np.isfinite(queries).all():
            raise RetrievalError("a query vector is not finite: the encoder overflowed or its weights are damaged")
        ids = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        pending, candidates = np.flatnonzero(queries.any(axis=1)), k + SPARE_CANDIDATES
        limit = min(self.rows, max(candidates, MAX_CANDIDATES))
        while pending.size:
            candidates = min(candidates, limit)
            found, values = self._rescored(queries[pending], candidates)
            width = min(k, candidates)
            ids[pending, :width], scores[pending, :width] = found[:, :width], values[:, :width]
            # When the k-th score ties with the last candidate's, rows beyond the cut may tie as well: look further.
            tied = values[:, width - 1] < values[:, -1] + 1.5 * 10.0**-SCORE_DECIMALS
            pending = pending[tied] if candidates < limit else pending[:0]
            candidates *= 4
        return ids, scores

    def _rescored(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` best rows [Q, count] by ScaNN, scored exactly, rounded and ordered by (-score, row).

        ScaNN's own scores change in the last bits with the batch size, which would break ties differently in a replay.
        """
        try:
            found, approximate = self._searcher.search_batched_parallel(
                queries, count, pre_reorder_num_neighbors=max(100, 4 * count), batch_size=QUERIES_PER_TASK
            )
        except RuntimeError as error:
            raise RetrievalError(f"ScaNN failed on {len(queries)} queries: {error}") from error
        found = found.astype(np.int64)
        missing = np.isnan(approximate)  # a tree that finds too few pads with row 0 and NaN
        scores = np.empty(found.shape)
        rows_per_block = max(1, 2**24 // (count * self.dimensions))  # 64 MB of gathered vectors at a time
        for start in range(0, len(queries), rows_per_block):
            block = slice(start, start + rows_per_block)
            scores[block] = np.einsum("qcd,qd->qc", self.vectors[found[block]], queries[block], dtype=np.float64)
        scores = np.where(missing, -np.inf, np.round(scores, SCORE_DECIMALS) + 0.0)  # + 0.0: no negative zero
        found[missing] = -1
        order = np.lexsort((found, -scores), axis=1)
        return np.take_along_axis(found, order, axis=1), np.take_along_axis(scores, order, axis=1)


def encode_corpus(corpus: Sequence[Passage], encoder: Encoder, out: np.ndarray | None = None) -> np.ndarray:
    """Encode all passages into `out` (made when None): [N, D] float32. Raises `CorpusError` on a non-finite vector."""
    out = np.empty((len(corpus), encoder.dimensions), np.float32) if out is None else out
    with tqdm(total=len(corpus), desc="encoding", unit=" rows", delay=2, disable=None) as bar:
        for start in range(0, len(corpus), ENCODE_ROWS):
            stop = min(start + ENCODE_ROWS, len(corpus))
            out[start:stop] = encoder.encode_passages([corpus[row] for row in range(start, stop)])
            _refuse_non_finite(out[start:stop], start)
            bar.update(stop - start)
    return out


def _refuse_non_finite(vectors: np.ndarray, first_row: int = 0) -> None:
    """ScaNN aborts the process on a NaN row, beyond the reach of `except`."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if bad.size:
        raise CorpusError(f"the vector of passage row {first_row + bad[0]} is not finite")


def _refuse_occupied(directory: Path, corpus_file: Path, overwrite: bool) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not overwrite:
        raise CorpusError(f"{directory}: exists and is not empty; name another directory or pass --overwrite")
    if not (directory / "manifest.json").is_file():
        raise CorpusError(f"{directory}: has no manifest.json, so it is not an index and is not overwritten")
    if corpus_file.absolute().is_relative_to(directory):
        raise CorpusError(f"{directory}: holds the corpus {corpus_file.name} that is to be indexed; name another one")


def _fill(directory: Path, corpus: MemoryMappedCorpus, encoder: Encoder, exact_below_rows: int) -> None:
    """Write every file of an index, the manifest last."""
    _copy_or_link(corpus.path, directory / "corpus.jsonl")
    np.save(directory / "corpus.offsets.npy", np.asarray(corpus.offsets))
    encoder.save(directory)
    shape = (len(corpus), encoder.dimensions)
    vectors = np.lib.format.open_memmap(directory / "vectors.npy", "w+", np.float32, shape)
    encode_corpus(corpus, encoder, vectors)
    vectors.flush()
    index = ScannIndex(vectors, _build_searcher(vectors, exact_below_rows))
    if not _is_exact(len(vectors), exact_below_rows):
        (directory / "scann").mkdir()
        with _quiet():
            index._searcher.serialize(str(directory / "scann"), relative_path=True)
    write_manifest(
        directory,
        {
            "rows": len(corpus),
            "dimensions": encoder.dimensions,
            "encoder": encoder.identity,
            "self_check": self_check(index, corpus, encoder),
        },
    )


def self_check(index: ScannIndex, corpus: Sequence[Passage], encoder: Encoder) -> dict[str, Any]:
    """Ask for evenly spaced passages by title and first six words; `found` counts those in the top 3."""
    rows = np.unique(np.linspace(0, len(corpus) - 1, SELF_CHECK_ROWS).astype(int))
    passages = [corpus[int(row)] for row in rows]
    queries = encoder.encode_queries([" ".join([p.title, *p.text.split()[:6]]) for p in passages])
    ids, _ = index.search(queries, k=3)
    return {"queries": len(rows), "found": int((ids == rows[:, None]).any(axis=1).sum())}


def _copy_or_link(source: Path, target: Path) -> None:
    if source.stat().st_size >= COPY_BELOW_BYTES:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another file system: the copy below is the remedy
    shutil.copyfile(source, target)


def _is_exact(rows: int, exact_below_rows: int) -> bool:
    return rows < max(exact_below_rows, 16)  # a tree needs 16 rows


def _build_searcher(vectors: np.ndarray, exact_below_rows: int) -> Any:
    """A ScaNN searcher over `vectors` [N, D]: exact, or tree + quantised scores + int8 reordering."""
    rows, dimensions = vectors.shape
    with _quiet():
        scann = _scann()
        builder = scann.scann_ops_pybind.builder(vectors, 10, "dot_product")
        if _is_exact(rows, exact_below_rows):
            return builder.score_brute_force().build()
        leaves = min(rows, 2 * math.isqrt(rows))
        return (
            builder.tree(
                num_leaves=leaves,
                num_leaves_to_search=max(1, leaves // SEARCHED_LEAVES_DIVISOR),
                training_sample_size=min(rows, 250_000),
                spherical=True,
                soar_lambda=1.5,
            )
            # More than 256 blocks would silently switch off ScaNN's faster selection of the best rows.
            .score_ah(max(2, math.ceil(dimensions / 256)), anisotropic_quantization_threshold=0.2)
            .reorder(100, quantize=scann.ReorderType.INT8)
            .build()
        )


def _load_searcher(directory: Path) -> Any:
    with _quiet():
        return _scann().scann_ops_pybind.load_searcher(str(directory))


def _scann() -> Any:
    try:
        import scann  # imported late: a client of a remote retriever needs none
    except ImportError as error:
        raise RetrievalError(f"ScaNN cannot be imported ({error}); install it: pip install scann (Linux)") from None
    return scann


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep ScaNN's build log, which C++ writes to file descriptor 2, off the terminal."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)

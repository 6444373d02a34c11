"""Index directories: built under a temporary name, opened only if complete. Only this file knows every kind.

An index directory is self-contained and can be moved:

    manifest.json         kind, rows, encoder identity, settings, recall, self-check, size and sha256 of each file
    corpus.jsonl          the passages         corpus.offsets.npy   where each row starts
    vectors.npy           [N, D] float32       encoder*             what the encoder needs besides its identity
    scann/, scann.log     the search tree, and ScaNN's output from its build; absent for small corpora, whose
                          exact search needs only the vectors
    bm25/                 replaces vectors, encoder and tree if the encoder is bm25

While NAME is built, `.NAME.partial` has its files in index/, a record of the encoded rows, and a lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.corpus import MemoryMappedCorpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.encoding import check_vectors, copy_to, encode_to
from retrieval.manifest import load_array, read_manifest, sha256, write_manifest
from retrieval.protocol import CorpusError, Encoder, Passage, Ranker, on_disk
from retrieval.ranking.bm25 import Bm25Ranker
from retrieval.ranking.index import (
    EXACT_BELOW_ROWS,
    MIN_TREE_ROWS,
    DenseRanker,
    ScannIndex,
    TreeSettings,
    exact_search,
    measure_recall,
    tree_settings,
    tune,
)

log = logging.getLogger("retrieval")
SAMPLE_ROWS = 1000  # passages sampled as queries for recall and self-check
SAMPLE_K = 3
VECTORS, RECORD = "vectors.npy", "encoded.json"


@dataclass(frozen=True)
class BuildOptions:
    """How a dense index is built."""

    exact_below_rows: int = EXACT_BELOW_ROWS  # a corpus with fewer passages gets no tree
    target_recall: float | None = None  # of the 3 best, above 0, up to 1; None: the default search effort


def build_index(
    directory: str | os.PathLike[str],
    corpus: MemoryMappedCorpus,
    encoder: Encoder | None,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (frozen)
    vectors: np.ndarray | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Index a corpus into `directory`, which appears only when it is complete. Returns its manifest.

    After a kill or an error, the next call continues the encoding if corpus and encoder are the same.

    Args:
      encoder: of passages and queries; None: BM25.
      vectors: [N, D] float32, the passages already encoded by `encoder`.

    Raises:
      CorpusError: the directory exists, is being built by another process or cannot be written, an encoding is not
        finite, or `vectors` do not match the corpus and the encoder.
    """
    directory = on_disk(directory).resolve()  # of a symbolic link, the directory that it names
    refuse_occupied(directory, corpus.path, overwrite)
    if vectors is not None and encoder is not None:
        check_vectors(vectors, corpus, encoder)
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.{os.getpid()}.replaced")
    try:
        with _lock(partial):
            index = partial / "index"
            _clear_except_vectors(index)
            shutil.copyfile(corpus.path, index / "corpus.jsonl")
            np.save(index / "corpus.offsets.npy", np.asarray(corpus.offsets))
            fields = {"rows": len(corpus), "corpus_sha256": sha256(index / "corpus.jsonl")}
            if encoder is None:
                fields |= _build_bm25(index, corpus)
            else:
                fields |= _build_dense(partial, corpus, encoder, options, vectors)
            write_manifest(index, fields, [path for path in index.rglob("*") if path.is_file()])
            manifest = read_manifest(index)  # before the old index is removed
            if directory.exists():
                os.replace(directory, replaced)
            os.replace(index, directory)
            shutil.rmtree(partial)
            shutil.rmtree(replaced, ignore_errors=True)
    except CorpusError:
        if not (partial / RECORD).is_file():  # nothing was encoded, so a new start costs little
            shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise CorpusError(f"{directory}: the index cannot be written ({error}); run again to resume") from None
    return manifest


def open_index(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], Ranker, Sequence[Passage]]:
    """Open an index directory: its manifest, ranker and corpus.

    Raises `CorpusError` when a file is missing, damaged or of another index.
    """
    directory = on_disk(directory)
    path = directory / "manifest.json"
    manifest = read_manifest(directory)
    identity, kind, rows = manifest["encoder"], manifest["kind"], manifest["rows"]
    required = {"dense": [VECTORS], "bm25": []}.get(kind)
    if required is None:
        raise CorpusError(f"{path}: kind is {kind!r}, accepted: dense, bm25")
    for name in ("corpus.jsonl", "corpus.offsets.npy", *required):
        if name not in manifest["files"]:
            raise CorpusError(f"{path}: field files does not list {name}; build it again")
    offsets = load_array(directory / "corpus.offsets.npy", (rows,), np.int64)
    corpus = MemoryMappedCorpus(directory / "corpus.jsonl", offsets)
    if kind == "bm25":
        return manifest, Bm25Ranker.load(directory / "bm25", identity, rows), corpus
    index, encoder = _open_vectors(directory, manifest), _load_encoder(directory, identity)
    try:
        return manifest, DenseRanker(index, encoder), corpus
    except CorpusError as error:  # vectors and encoder do not match; the manifest names both
        raise CorpusError(f"{path}: {error}") from None


def sample_queries(corpus: Sequence[Passage], count: int = SAMPLE_ROWS) -> tuple[np.ndarray, list[str]]:
    """Evenly spaced rows [Q] and a query for each: the passage's title and first eight words."""
    rows = np.unique(np.linspace(0, len(corpus) - 1, count).astype(int))
    passages = [corpus[int(row)] for row in rows]
    return rows, [" ".join([p.title, *p.text.split()[:8]]) for p in passages]


def verify_index(directory: str | os.PathLike[str]) -> int:
    """Compare every byte of an index directory with its manifest; returns the number of bytes.

    Opening an index compares only sizes, small files, and samples of large files.

    Raises `CorpusError` naming the first file that differs.
    """
    manifest = read_manifest(on_disk(directory), complete=True)
    return sum(entry["bytes"] for entry in manifest["files"].values())


def refuse_occupied(directory: Path, corpus_file: Path, overwrite: bool) -> None:
    """Raise `CorpusError` if `directory` exists and may not be replaced by an index."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not overwrite:
        raise CorpusError(f"{directory}: exists and is not empty; name another directory or pass --overwrite")
    if not (directory / "manifest.json").is_file():
        raise CorpusError(f"{directory}: has no manifest.json, so it is not an index and is not overwritten")
    if corpus_file.absolute().is_relative_to(directory):
        raise CorpusError(f"{directory}: holds the corpus {corpus_file.name} that is to be indexed; name another one")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process. Raises `OSError` while another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{folder} is in use by another build") from None
        yield


def _open_vectors(directory: Path, manifest: dict[str, Any]) -> ScannIndex:
    path = directory / "manifest.json"
    vectors = load_array(directory / "vectors.npy", (manifest["rows"], manifest.get("dimensions")), np.float32)
    if manifest.get("tree") is None:
        return ScannIndex.from_vectors(vectors)
    try:
        tree = TreeSettings(**manifest["tree"])
    except TypeError as error:
        raise CorpusError(f"{path}: field tree is not a tree's settings ({error})") from None
    return ScannIndex.load(directory / "scann", vectors, tree)


def _load_encoder(directory: Path, identity: dict[str, Any]) -> Encoder:
    if identity.get("name") == HashingEncoder.name:
        return HashingEncoder.load(directory, identity)
    if identity.get("name") == "bert":
        from retrieval.encoders.encoder import BertEncoder  # imported late: loads JAX

        return BertEncoder.load(directory, identity)
    path = directory / "manifest.json"
    raise CorpusError(f"{path}: encoder {identity.get('name')!r}, accepted: hashing, bert, bm25")


def _clear_except_vectors(index: Path) -> None:
    """Make `index` a directory without files, except for vectors that an earlier build has encoded."""
    index.mkdir(exist_ok=True)
    for path in index.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != VECTORS:
            path.unlink()


def _build_bm25(index: Path, corpus: MemoryMappedCorpus) -> dict[str, Any]:
    """Write the files of a BM25 index and return its fields of the manifest."""
    (index / VECTORS).unlink(missing_ok=True)
    ranker = Bm25Ranker.build(corpus, index / "bm25")
    return {"kind": "bm25", "encoder": ranker.identity, "self_check": _self_check(ranker, *sample_queries(corpus))}


def _build_dense(
    partial: Path, corpus: MemoryMappedCorpus, encoder: Encoder, options: BuildOptions, supplied: np.ndarray | None
) -> dict[str, Any]:
    """Write the files of a dense index, with the `supplied` vectors if any; returns its fields of the manifest."""
    index, rows = partial / "index", len(corpus)
    is_exact = rows < max(options.exact_below_rows, MIN_TREE_ROWS)
    tree = None if is_exact else tree_settings(rows, encoder.dimensions)
    encoder.save(index)
    if supplied is not None:
        (partial / RECORD).unlink(missing_ok=True)
        copy_to(index / VECTORS, supplied)
    elif done := encode_to(index / VECTORS, partial / RECORD, corpus, encoder):
        log.info("%d of %d rows were already encoded", done, rows)
    vectors = np.load(index / VECTORS, mmap_mode="r")
    sampled, queries = sample_queries(corpus)
    recall = None  # not measured for exact search
    if tree is None:
        searched = ScannIndex.from_vectors(vectors)
    else:
        log.info("building the tree over %d vectors", rows)
        ScannIndex.from_vectors(vectors, tree, index / "scann.log").save(index / "scann", index / "scann.log")
        searched = ScannIndex.load(index / "scann", vectors, tree)  # measure what was written
        encoded = encoder.encode_queries(queries)
        encoded = encoded[encoded.any(axis=1)]
        if not len(encoded):
            raise CorpusError(f"{corpus.path}: the sampled passages have no words, accepted: texts to search in")
        truth = exact_search(vectors, encoded, SAMPLE_K)
        if options.target_recall is not None:
            searched = tune(searched, encoded, truth, options.target_recall)
        reached = round(measure_recall(searched, encoded, truth), 4)
        recall = {"k": SAMPLE_K, "queries": len(encoded), "target": options.target_recall, "recall": reached}
    return {
        "kind": "dense",
        "dimensions": encoder.dimensions,
        "encoder": encoder.identity,
        "tree": asdict(searched.tree) if searched.tree else None,
        "recall": recall,
        "self_check": _self_check(DenseRanker(searched, encoder), sampled, queries),
    }


def _self_check(ranker: Ranker, rows: np.ndarray, queries: list[str]) -> dict[str, int]:
    """How many of the sampled passages are in the top 3 of their own query."""
    ids, _ = ranker.rank(queries, SAMPLE_K)
    return {"queries": len(rows), "found": int((ids == rows[:, None]).any(axis=1).sum())}

"""Index directories: built under a temporary name, opened only if complete. Only this file knows every kind.

An index directory is self-contained and can be moved:

    manifest.json         kind, rows, encoder identity, settings, recall, self-check, size and sha256 of each file
    corpus.jsonl          the passages         corpus.offsets.npy   where each row starts
    vectors.npy           [N, D] float32       encoder*             what the encoder needs besides its identity
    scann/, scann.log     the search tree, and ScaNN's output from its build; absent for small corpora, whose
                          exact search needs only the vectors
    bm25/                 replaces vectors, encoder and tree if the encoder is bm25
    shard-000/ ...        of a sharded index: index directories over consecutive slices, each usable on its own

While NAME is built, `.NAME.partial` has its files in index/, the vectors as far as they are encoded, and a lock.
"""

from __future__ import annotations

import errno
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

from retrieval.corpus import ConcatenatedCorpus, MemoryMappedCorpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.encoding import RECORD, VECTORS, check_vectors, copy_to, encode_to
from retrieval.manifest import load_array, read_manifest, sha256, write_manifest
from retrieval.memory import available_memory
from retrieval.protocol import CorpusError, Encoder, Passage, Ranker, on_disk
from retrieval.ranking.bm25 import Bm25Ranker
from retrieval.ranking.budget import SHARE, disk_bytes, peak_bytes
from retrieval.ranking.index import (
    EXACT_BELOW_ROWS,
    MIN_TREE_ROWS,
    DenseRanker,
    ScannIndex,
    ShardedIndex,
    TreeSettings,
    exact_search,
    recall,
    tree_settings,
    tune,
)

log = logging.getLogger("retrieval")
SAMPLE_ROWS = 1000  # passages sampled as queries for recall and self-check
SAMPLE_K = 3


@dataclass(frozen=True)
class BuildOptions:
    """How a dense index is built."""

    shards: int | None = None  # None: the fewest whose build fits the available memory
    exact_below_rows: int = EXACT_BELOW_ROWS  # a shard with fewer passages gets no tree
    target_recall: float | None = None  # of the 3 best; None: the default search effort

    def tree_of(self, rows: int, dimensions: int) -> TreeSettings | None:
        """The tree over `rows` vectors; None: exact search."""
        return None if rows < max(self.exact_below_rows, MIN_TREE_ROWS) else tree_settings(rows, dimensions)

    def check(self, rows: int) -> None:
        """Raise `CorpusError` on options that do not fit a corpus of `rows` passages."""
        if self.shards is not None and not 1 <= self.shards <= rows:
            raise CorpusError(f"shards is {self.shards}, accepted: 1 to {rows}, the passages of the corpus")
        if self.target_recall is not None and not 0 < self.target_recall <= 1:
            raise CorpusError(f"target_recall is {self.target_recall}, accepted: above 0, up to 1")


def build_index(
    directory: str | os.PathLike[str],
    corpus: MemoryMappedCorpus,
    encoder: Encoder | None,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (frozen)
    vectors: np.ndarray | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Index a corpus into `directory`, which appears only when it is complete. Returns its manifest.

    After a kill or an error, the next call continues the encoding if texts and encoder are the same.

    Args:
      encoder: of passages and queries; None: BM25.
      vectors: [N, D] float32, the passages already encoded by `encoder`.

    Raises:
      CorpusError: the directory exists, is being built by another process or cannot be written, an option does not
        fit, an encoding is not finite, or `vectors` do not match the corpus and the encoder.
    """
    directory = on_disk(directory).resolve()  # of a symbolic link, the directory that it names
    refuse_occupied(directory, corpus.path, overwrite)
    options.check(len(corpus))
    if vectors is not None and encoder is not None:
        check_vectors(vectors, corpus, encoder)
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.{os.getpid()}.replaced")
    try:
        with _lock(partial):
            index = partial / "index"
            shutil.rmtree(index, ignore_errors=True)
            index.mkdir()
            if encoder is None:
                _build_bm25(index, corpus)
            else:
                _build_dense(partial, corpus, encoder, options, vectors)
            for name in read_manifest(index).get("shards", []):  # before the old index is removed
                read_manifest(index / name)
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
    return read_manifest(directory)


def open_index(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], Ranker, Sequence[Passage]]:
    """Open an index directory: its manifest, ranker and corpus.

    Raises `CorpusError` when a file is missing, damaged or of another index.
    """
    directory = on_disk(directory)
    path = directory / "manifest.json"
    manifest = read_manifest(directory)
    identity, kind, rows = manifest["encoder"], manifest["kind"], manifest["rows"]
    if kind == "sharded":
        parts = [open_index(directory / name) for name in manifest.get("shards", [])]
        rankers = [ranker for _, ranker, _ in parts if isinstance(ranker, DenseRanker)]
        if not rankers or any(m["kind"] != "dense" or m["encoder"] != identity for m, _, _ in parts):
            raise CorpusError(f"{path}: field shards does not match the shards")
        ranker = DenseRanker(ShardedIndex([ranker.index for ranker in rankers]), rankers[0].encoder)
        return manifest, ranker, ConcatenatedCorpus([corpus for _, _, corpus in parts])
    required = {"dense": ["vectors.npy"], "bm25": []}.get(kind)
    if required is None:
        raise CorpusError(f"{path}: kind is {kind!r}, accepted: dense, bm25, sharded")
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
    directory = on_disk(directory)
    manifest = read_manifest(directory, complete=True)
    shards = [verify_index(directory / name) for name in manifest.get("shards", [])]
    return sum(entry["bytes"] for entry in manifest["files"].values()) + sum(shards)


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
    if manifest.get("metric") != "inner_product":
        raise CorpusError(f"{path}: metric is {manifest.get('metric')!r}, accepted: inner_product")
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


def _build_bm25(directory: Path, corpus: MemoryMappedCorpus) -> None:
    shutil.copyfile(corpus.path, directory / "corpus.jsonl")
    np.save(directory / "corpus.offsets.npy", np.asarray(corpus.offsets))
    ranker = Bm25Ranker.build(corpus, directory / "bm25")
    fields = {
        "kind": "bm25",
        "rows": len(corpus),
        "encoder": ranker.identity,
        "corpus_sha256": sha256(directory / "corpus.jsonl"),
        "self_check": _self_check(ranker, *sample_queries(corpus)),
    }
    write_manifest(directory, fields, _files(directory))


def _build_dense(
    partial: Path,
    corpus: MemoryMappedCorpus,
    encoder: Encoder,
    options: BuildOptions,
    given: np.ndarray | None,
) -> None:
    """Write every file of the index into `partial`/index, the manifest last; encodes unless vectors are `given`."""
    index, shards = partial / "index", _plan_shards(options, corpus, encoder, partial, encodes=given is None)
    vectors = given
    if vectors is None:
        done = encode_to(partial, corpus, encoder)
        if done:
            log.info("%d of %d rows were already encoded", done, len(corpus))
        vectors = np.load(partial / VECTORS, mmap_mode="r")
    if shards == 1:
        ready = partial / VECTORS if given is None else None
        _build_shard(index, corpus, encoder, options, vectors, range(len(corpus)), ready)
        return
    bounds = np.linspace(0, len(corpus), shards + 1).astype(int).tolist()
    names = [f"shard-{number:03d}" for number in range(shards)]
    measured = []
    for name, start, stop in zip(names, bounds[:-1], bounds[1:], strict=True):
        log.info("%s: rows %d to %d", name, start, stop - 1)
        (index / name).mkdir()
        measured.append(_build_shard(index / name, corpus, encoder, options, vectors, range(start, stop)))
    fields = {
        "kind": "sharded",
        "rows": len(corpus),
        "dimensions": encoder.dimensions,
        "encoder": encoder.identity,
        "corpus_sha256": sha256(corpus.path),
        "shards": names,
        "recall": min(filter(None, measured), key=lambda shard: shard["recall"], default=None),  # the worst
    }
    write_manifest(index, fields, [index / name / "manifest.json" for name in names])


def _plan_shards(
    options: BuildOptions, corpus: MemoryMappedCorpus, encoder: Encoder, folder: Path, encodes: bool
) -> int:
    """The number of shards to build in `folder`; logs the memory and disk that a build with trees needs.

    Args:
      encodes: the build encodes the corpus into one file, from which several shards copy their vectors.

    Raises `OSError` when the disk has not enough space.
    """
    rows, dimensions, memory = len(corpus), encoder.dimensions, available_memory()

    def peak(shards: int) -> int:
        tree = options.tree_of(-(-rows // shards), dimensions)
        return peak_bytes(-(-rows // shards), dimensions, tree.leaves) if tree else 0

    fitting = next(count for count in range(1, rows + 1) if peak(count) <= SHARE * memory)
    shards = options.shards or fitting
    tree = options.tree_of(-(-rows // shards), dimensions)
    floats, trees = disk_bytes(rows, dimensions, None), shards * disk_bytes(-(-rows // shards), dimensions, tree)
    needed = trees + (shards > 1) * encodes * floats + corpus.path.stat().st_size
    used = sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if tree:
        log.info(
            "%d rows of %d dimensions in %d shard%s: the build is expected to take up to %.1f GB of memory "
            "(%.1f GB available) and %.1f GB of disk (%.1f GB free)",
            *(rows, dimensions, shards, "s" if shards > 1 else "", peak(shards) / 1e9, memory / 1e9),
            *(needed / 1e9, free / 1e9),
        )
        if shards < fitting:
            log.warning("--shards=%d may need more memory than is available; %d would fit", shards, fitting)
    if needed - used > free:
        raise OSError(errno.ENOSPC, f"it takes {needed / 1e9:.1f} GB, {(used + free) / 1e9:.1f} GB are free")
    return shards


def _build_shard(
    target: Path,
    corpus: MemoryMappedCorpus,
    encoder: Encoder,
    options: BuildOptions,
    vectors: np.ndarray,
    rows: range,
    ready: Path | None = None,
) -> dict[str, Any] | None:
    """Write the index directory of `rows` into the empty directory `target`; returns the measured recall.

    Args:
      vectors: [N, D] of the entire corpus.
      ready: a file that contains exactly the vectors of these rows, if there is one.
    """
    offsets = np.asarray(corpus.offsets[rows.start : rows.stop])
    if len(rows) == len(corpus):
        shutil.copyfile(corpus.path, target / "corpus.jsonl")
    else:
        corpus.write_slice(target / "corpus.jsonl", rows.start, rows.stop)
        offsets = offsets - offsets[0]
    np.save(target / "corpus.offsets.npy", offsets)
    encoder.save(target)
    if ready:
        _link(ready, target / "vectors.npy")
    else:
        copy_to(target / "vectors.npy", vectors[rows.start : rows.stop])
    shard_vectors = np.load(target / "vectors.npy", mmap_mode="r")
    index = ScannIndex.from_vectors(shard_vectors)
    if tree := options.tree_of(len(rows), encoder.dimensions):
        log.info("building the tree over %d vectors", len(rows))
        ScannIndex.from_vectors(shard_vectors, tree, target / "scann.log").save(target / "scann", target / "scann.log")
        index = ScannIndex.load(target / "scann", shard_vectors, tree)  # measure what was written
    sampled, queries = sample_queries(MemoryMappedCorpus(target / "corpus.jsonl", offsets))
    measured = None  # not measured for exact search
    if tree:
        encoded = encoder.encode_queries(queries)
        encoded = encoded[encoded.any(axis=1)]
        if not len(encoded):
            raise CorpusError(f"{corpus.path}: the sampled passages have no words, accepted: texts to search in")
        truth = exact_search(shard_vectors, encoded, SAMPLE_K)
        if options.target_recall is not None:
            index = tune(index, encoded, truth, options.target_recall)
        reached = round(recall(index, encoded, truth), 4)
        measured = {"k": SAMPLE_K, "queries": len(encoded), "target": options.target_recall, "recall": reached}
    fields = {
        "kind": "dense",
        "rows": len(rows),
        "dimensions": encoder.dimensions,
        "metric": "inner_product",
        "encoder": encoder.identity,
        "corpus_sha256": sha256(target / "corpus.jsonl"),
        "tree": asdict(index.tree) if index.tree else None,
        "recall": measured,
        "self_check": _self_check(DenseRanker(index, encoder), sampled, queries),
    }
    write_manifest(target, fields, _files(target))
    return measured


def _link(source: Path, target: Path) -> None:
    """Hard-link a file that the build has made, or copy it where the file system has no hard links.

    Files of the user are copied: rewriting a linked one would change the index, and stop a process that has it mapped.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _self_check(ranker: Ranker, rows: np.ndarray, queries: list[str]) -> dict[str, int]:
    """How many of the sampled passages are in the top 3 of their own query."""
    ids, _ = ranker.rank(queries, SAMPLE_K)
    return {"queries": len(rows), "found": int((ids == rows[:, None]).any(axis=1).sum())}


def _files(directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file() and p.name != "manifest.json"]

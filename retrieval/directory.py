"""Index directories: built in steps that survive a kill, opened only when whole. The only file that knows every kind.

An index directory is self-contained and can be moved:

    manifest.json         kind, rows, encoder identity, settings, recall, self-check, size and sha256 of each file
    corpus.jsonl          the passages         corpus.offsets.npy   where each row starts
    vectors.npy           [N, D] float32       encoder*             what the encoder needs besides its identity
    scann/                the search tree; absent for small corpora, whose exact search needs the vectors alone
    bm25/                 instead of vectors, encoder and tree where the encoder is bm25
    shard-000/ ...        of a sharded index: index directories over consecutive slices, each of use by itself
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from retrieval.bm25 import Bm25Ranker
from retrieval.corpus import ConcatenatedCorpus, MemoryMappedCorpus
from retrieval.hashing import HashingEncoder
from retrieval.hybrid import HybridRanker
from retrieval.index import (
    EXACT_BELOW_ROWS,
    LEAST_TREE_ROWS,
    DenseRanker,
    ScannIndex,
    ShardedIndex,
    TreeSettings,
    exact_search,
    recall,
    refuse_non_finite,
    tree_settings,
    tune,
)
from retrieval.manifest import copy_or_link, load_array, read_manifest, sha256, write_manifest
from retrieval.protocol import CorpusError, Encoder, Passage, Ranker, on_disk

log = logging.getLogger("retrieval")
ENCODE_ROWS = 4096
FLUSH_ROWS = 16 * ENCODE_ROWS  # what a kill can lose
SAMPLE_ROWS = 1000  # passages that recall and self-check ask for
SAMPLE_K = 3
PROGRESS = ".encoded_rows"
LEAST_AGREEMENT = 0.98  # cosine between a foreign vector and ours: 16-bit arithmetic keeps it above .999


@dataclass(frozen=True)
class BuildOptions:
    """How a dense index is made; the tree applies from `exact_below_rows` passages on."""

    shards: int = 1
    exact_below_rows: int = EXACT_BELOW_ROWS
    target_recall: float | None = None  # of the 3 best; None: the default effort
    tree: dict[str, Any] = field(default_factory=dict)  # fields of TreeSettings to set by hand


def build_index(
    directory: str | os.PathLike[str],
    corpus: MemoryMappedCorpus,
    encoder: Encoder | None,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (frozen)
    vectors: np.ndarray | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Index a corpus into `directory`, which appears only when it is complete. Returns its manifest.

    The work is done beside it, in `.NAME.partial`; after a kill the same call goes on where it stopped.

    Args:
      encoder: of passages and queries; None: BM25.
      vectors: [N, D] float32, what `encoder` makes of the passages, when they are at hand.

    Raises:
      CorpusError: the directory is in the way, being built by another process or cannot be written, an encoding is
        not finite, or `vectors` are not those of the corpus and the encoder.
    """
    directory = on_disk(directory).absolute()
    _refuse_occupied(directory, corpus.path, overwrite)
    if not 1 <= options.shards <= len(corpus):
        raise CorpusError(f"shards is {options.shards}, accepted: 1 to {len(corpus)}, the passages of the corpus")
    if encoder is None and options.shards > 1:
        raise CorpusError("shards: BM25 weighs words over the whole corpus, accepted: 1 shard")
    if vectors is not None and encoder is not None:
        _refuse_foreign_vectors(vectors, corpus, encoder)
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.{os.getpid()}.replaced")
    try:
        with _workplace(partial, _plan(corpus, encoder, options, vectors is not None)):
            _fill(partial, corpus, encoder, options, vectors)
            if directory.exists():
                os.replace(directory, replaced)
            os.replace(partial / "index", directory)
            shutil.rmtree(partial)
            shutil.rmtree(replaced, ignore_errors=True)
    except CorpusError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise CorpusError(f"{directory}: the index cannot be written ({error}); run again to go on") from None
    return read_manifest(directory)


def open_index(directories: str | os.PathLike[str]) -> tuple[Ranker, Sequence[Passage]]:
    """Open an index directory, or several over one corpus (separated by commas) fused by reciprocal rank.

    Raises:
      CorpusError: a file is missing, damaged or of another index, or the directories hold different corpora.
    """
    opened = [_open(on_disk(name)) for name in os.fspath(directories).split(",")]
    manifest, ranker, corpus = opened[0]
    if len(opened) == 1:
        return ranker, corpus
    if len({m["corpus_sha256"] for m, _, _ in opened}) > 1:
        raise CorpusError(f"{directories}: the indexes hold different corpora, accepted: indexes of one corpus")
    return HybridRanker([ranker for _, ranker, _ in opened]), corpus


def sample_queries(corpus: Sequence[Passage], count: int = SAMPLE_ROWS) -> tuple[np.ndarray, list[str]]:
    """Evenly spaced rows [Q] and a query for each: the passage's title and first eight words."""
    rows = np.unique(np.linspace(0, len(corpus) - 1, count).astype(int))
    passages = [corpus[int(row)] for row in rows]
    return rows, [" ".join([p.title, *p.text.split()[:8]]) for p in passages]


def encode_corpus(passages: Sequence[Passage], encoder: Encoder) -> np.ndarray:
    """Encode passages in memory: [N, D] float32. Raises `CorpusError` on a vector that is not finite."""
    out = np.empty((len(passages), encoder.dimensions), np.float32)
    for start, block in _encoded(passages, encoder, 0):
        out[start : start + len(block)] = block
    return out


def _open(directory: Path) -> tuple[dict[str, Any], Ranker, Sequence[Passage]]:
    manifest = read_manifest(directory)
    identity, kind = manifest["encoder"], manifest["kind"]
    if kind == "sharded":
        parts = [_open(directory / name) for name in manifest.get("shards", [])]
        if not parts or any(m["kind"] != "dense" or m["encoder"] != identity for m, _, _ in parts):
            raise CorpusError(f"{directory / 'manifest.json'}: field shards does not match the shards")
        ranker = DenseRanker(ShardedIndex([ranker.index for _, ranker, _ in parts]), parts[0][1].encoder)
        return manifest, ranker, ConcatenatedCorpus([corpus for _, _, corpus in parts])
    required = {"dense": ["vectors.npy"], "bm25": []}.get(kind)
    if required is None:
        raise CorpusError(f"{directory / 'manifest.json'}: kind is {kind!r}, known are dense, bm25, sharded")
    for name in ("corpus.jsonl", "corpus.offsets.npy", *required):
        if name not in manifest["files"]:
            raise CorpusError(f"{directory / 'manifest.json'}: field files does not list {name}; build it again")
    rows = manifest["rows"]
    offsets = load_array(directory / "corpus.offsets.npy", (rows,), np.int64)
    corpus = MemoryMappedCorpus(directory / "corpus.jsonl", offsets)
    if kind == "bm25":
        return manifest, Bm25Ranker.load(directory / "bm25", identity, rows), corpus
    return manifest, DenseRanker(_open_vectors(directory, manifest), _load_encoder(directory, identity)), corpus


def _open_vectors(directory: Path, manifest: dict[str, Any]) -> ScannIndex:
    shape = (manifest["rows"], manifest.get("dimensions"))
    if manifest.get("metric") != "inner_product":
        raise CorpusError(f"{directory / 'manifest.json'}: metric is {manifest.get('metric')!r}, known: inner_product")
    vectors = load_array(directory / "vectors.npy", shape, np.float32)
    if manifest.get("tree") is None:
        return ScannIndex.from_vectors(vectors)
    try:
        tree = TreeSettings(**manifest["tree"])
    except TypeError as error:
        raise CorpusError(f"{directory / 'manifest.json'}: field tree does not hold tree settings ({error})") from None
    return ScannIndex.load(directory / "scann", vectors, tree)


def _load_encoder(directory: Path, identity: dict[str, Any]) -> Encoder:
    if identity.get("name") == HashingEncoder.name:
        return HashingEncoder.load(directory, identity)
    if identity.get("name") == "bert":
        from retrieval.encoder import BertEncoder  # loads JAX

        return BertEncoder.load(directory, identity)
    raise CorpusError(
        f"{directory / 'manifest.json'}: encoder {identity.get('name')!r}, known are hashing, bert, bm25"
    )


def _plan(corpus: MemoryMappedCorpus, encoder: Encoder | None, options: BuildOptions, given: bool) -> dict[str, Any]:
    """What must be equal for a half-made index to be gone on with, as JSON values."""
    stat = corpus.path.stat()
    source = [str(corpus.path.absolute()), stat.st_size, stat.st_mtime_ns, len(corpus)]
    identity = encoder.identity if encoder else Bm25Ranker.name
    return {"corpus": source, "encoder": identity, "vectors_given": given, "options": asdict(options)}


@contextmanager
def _workplace(partial: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Hold `partial` alone, emptied unless it was begun with the same plan."""
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{partial} is in use by another build") from None
        begun = partial / "plan.json"
        if not begun.is_file() or begun.read_text(encoding="utf-8") != json.dumps(plan):
            shutil.rmtree(partial / "index", ignore_errors=True)
            (partial / "index").mkdir()
            begun.write_text(json.dumps(plan), encoding="utf-8")
        yield


def _fill(
    partial: Path,
    corpus: MemoryMappedCorpus,
    encoder: Encoder | None,
    options: BuildOptions,
    vectors: np.ndarray | None,
) -> None:
    """Write every file of the index into partial/index, the manifest last."""
    target, digest = partial / "index", sha256(corpus.path)
    if options.shards == 1:
        copy_or_link(corpus.path, target / "corpus.jsonl")
        np.save(target / "corpus.offsets.npy", np.asarray(corpus.offsets))
        if encoder is None:
            _fill_bm25(target, corpus, digest)
        else:
            _fill_dense(target, corpus, encoder, options, vectors, digest)
        return
    assert encoder is not None
    bounds = np.linspace(0, len(corpus), options.shards + 1).astype(int)
    names = [f"shard-{number:03d}" for number in range(options.shards)]
    for name, start, stop in zip(names, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        shard = target / name
        if (shard / "manifest.json").is_file():
            continue  # finished before a kill
        shard.mkdir(exist_ok=True)
        corpus.write_slice(shard / "corpus.jsonl", start, stop)
        part = MemoryMappedCorpus(shard / "corpus.jsonl")
        np.save(shard / "corpus.offsets.npy", np.asarray(part.offsets))
        log.info("%s: rows %d to %d", name, start, stop - 1)
        given = None if vectors is None else vectors[start:stop]
        _fill_dense(shard, part, encoder, options, given, sha256(shard / "corpus.jsonl"))
    fields = {
        "kind": "sharded",
        "rows": len(corpus),
        "dimensions": encoder.dimensions,
        "encoder": encoder.identity,
        "corpus_sha256": digest,
        "shards": names,
    }
    write_manifest(target, fields, [target / name / "manifest.json" for name in names])


def _fill_bm25(directory: Path, corpus: MemoryMappedCorpus, digest: str) -> None:
    shutil.rmtree(directory / "bm25", ignore_errors=True)
    ranker = Bm25Ranker.build(corpus)
    (directory / "bm25").mkdir()
    ranker.save(directory / "bm25")
    fields = {
        "kind": "bm25",
        "rows": len(corpus),
        "encoder": ranker.identity,
        "corpus_sha256": digest,
        "self_check": _self_check(ranker, *sample_queries(corpus)),
    }
    write_manifest(directory, fields, _files(directory))


def _fill_dense(
    directory: Path,
    corpus: MemoryMappedCorpus,
    encoder: Encoder,
    options: BuildOptions,
    given: np.ndarray | None,
    digest: str,
) -> None:
    vectors = _write_vectors(directory / "vectors.npy", corpus, encoder, given)
    encoder.save(directory)
    rows, queries = sample_queries(corpus)
    measured: dict[str, Any] | None = None  # exact search finds what there is to find
    if len(corpus) < max(options.exact_below_rows, LEAST_TREE_ROWS):
        index = ScannIndex.from_vectors(vectors)
    else:
        log.info("%s: building the tree over %d vectors", directory.name, len(corpus))
        index = ScannIndex.from_vectors(vectors, tree_settings(*vectors.shape, **options.tree))
        encoded = encoder.encode_queries(queries)
        encoded = encoded[encoded.any(axis=1)]
        truth = exact_search(vectors, encoded, SAMPLE_K)
        if options.target_recall is not None:
            index = tune(index, encoded, truth, options.target_recall)
        found = round(recall(index, encoded, truth), 4)
        measured = {"k": SAMPLE_K, "queries": len(encoded), "target": options.target_recall, "recall": found}
        shutil.rmtree(directory / "scann", ignore_errors=True)
        index.save(directory / "scann")
    fields = {
        "kind": "dense",
        "rows": index.rows,
        "dimensions": index.dimensions,
        "metric": "inner_product",
        "encoder": encoder.identity,
        "corpus_sha256": digest,
        "tree": asdict(index.tree) if index.tree else None,
        "recall": measured,
        "self_check": _self_check(DenseRanker(index, encoder), rows, queries),
    }
    (directory / PROGRESS).unlink()
    write_manifest(directory, fields, _files(directory))


def _write_vectors(path: Path, corpus: MemoryMappedCorpus, encoder: Encoder, given: np.ndarray | None) -> np.ndarray:
    """Fill the memory-mapped `path` [N, D] float32, from the row where an earlier, killed call stopped."""
    shape, progress = (len(corpus), encoder.dimensions), path.with_name(PROGRESS)
    done = int(progress.read_text()) if progress.is_file() else 0
    vectors = np.lib.format.open_memmap(path, "r+" if done else "w+", np.float32, None if done else shape)
    if done:
        log.info("%s: going on at row %d of %d", path.parent.name, done, len(corpus))
    blocks = _encoded(corpus, encoder, done) if given is None else _copied(given, done)
    for start, block in blocks:
        vectors[start : start + len(block)] = block
        done = start + len(block)
        if done == len(corpus) or done // FLUSH_ROWS > start // FLUSH_ROWS:
            vectors.flush()
            beside = progress.with_name(PROGRESS + ".tmp")
            beside.write_text(str(done))
            beside.replace(progress)
    return vectors


def _encoded(passages: Sequence[Passage], encoder: Encoder, first: int) -> Iterator[tuple[int, np.ndarray]]:
    total = len(passages)
    with tqdm(total=total, initial=first, desc="encoding", unit=" rows", delay=2, disable=None) as bar:
        for start in range(first, total, ENCODE_ROWS):
            stop = min(start + ENCODE_ROWS, total)
            block = encoder.encode_passages([passages[row] for row in range(start, stop)])
            refuse_non_finite(block, start)
            yield start, block
            bar.update(stop - start)


def _copied(vectors: np.ndarray, first: int) -> Iterator[tuple[int, np.ndarray]]:
    with tqdm(total=len(vectors), initial=first, desc="copying", unit=" rows", delay=2, disable=None) as bar:
        for start in range(first, len(vectors), FLUSH_ROWS):
            block = np.array(vectors[start : start + FLUSH_ROWS], np.float32)
            refuse_non_finite(block, start)
            yield start, block
            bar.update(len(block))


def _self_check(ranker: Ranker, rows: np.ndarray, queries: list[str]) -> dict[str, int]:
    """How many of the sampled passages are in the top 3 of their own query."""
    ids, _ = ranker.rank(queries, SAMPLE_K)
    return {"queries": len(rows), "found": int((ids == rows[:, None]).any(axis=1).sum())}


def _files(directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file() and p.name != "manifest.json"]


def _refuse_occupied(directory: Path, corpus_file: Path, overwrite: bool) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not overwrite:
        raise CorpusError(f"{directory}: exists and is not empty; name another directory or pass --overwrite")
    if not (directory / "manifest.json").is_file():
        raise CorpusError(f"{directory}: has no manifest.json, so it is not an index and is not overwritten")
    if corpus_file.absolute().is_relative_to(directory):
        raise CorpusError(f"{directory}: holds the corpus {corpus_file.name} that is to be indexed; name another one")


def _refuse_foreign_vectors(vectors: np.ndarray, corpus: MemoryMappedCorpus, encoder: Encoder) -> None:
    """Vectors of another model, corpus or order would be searched without a word; a few passages tell."""
    if vectors.shape != (len(corpus), encoder.dimensions):
        raise CorpusError(
            f"the given vectors are {list(vectors.shape)}, the corpus and the encoder make "
            f"{[len(corpus), encoder.dimensions]}"
        )
    rows = np.unique(np.linspace(0, len(corpus) - 1, 32).astype(int))
    ours = encoder.encode_passages([corpus[int(row)] for row in rows])
    theirs = np.array(vectors[rows], np.float32)
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    agreement = (ours * theirs).sum(axis=1) / np.maximum(norms, 1e-12)
    worst = int(agreement.argmin())
    if not agreement[worst] >= LEAST_AGREEMENT:
        raise CorpusError(
            f"the given vector of row {rows[worst]} is not what the encoder makes of that passage (cosine "
            f"{agreement[worst]:.2f}, expected at least {LEAST_AGREEMENT}): another model, prefix, corpus or order"
        )

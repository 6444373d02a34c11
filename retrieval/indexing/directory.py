"""Index directories: built in steps that survive a kill, opened only if complete. Only this file knows every kind.

An index directory is self-contained and can be moved:

    manifest.json         kind, rows, encoder identity, settings, recall, self-check, size and sha256 of each file
    corpus.jsonl          the passages         corpus.offsets.npy   where each row starts
    vectors.npy           [N, D] float32       encoder*             what the encoder needs besides its identity
    scann/, scann.log     the search tree, and ScaNN's output from its build; absent for small corpora, whose
                          exact search needs only the vectors
    bm25/                 replaces vectors, encoder and tree if the encoder is bm25
    shard-000/ ...        of a sharded index: index directories over consecutive slices, each usable on its own
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.corpus import ConcatenatedCorpus, MemoryMappedCorpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.build_journal import BuildJournal, build_journal
from retrieval.indexing.encoding import RECORD, VECTORS, copy_to, encode_to, refuse_foreign_vectors
from retrieval.manifest import load_array, read_manifest, sha256, write_manifest
from retrieval.memory import available_memory
from retrieval.protocol import CorpusError, Encoder, Passage, Ranker, on_disk
from retrieval.ranking.bm25 import Bm25Ranker
from retrieval.ranking.budget import SHARE, disk_bytes, peak_bytes
from retrieval.ranking.hybrid import HybridRanker
from retrieval.ranking.index import (
    EXACT_BELOW_ROWS,
    LEAST_TREE_ROWS,
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
    tree: dict[str, Any] = field(default_factory=dict)  # fields of TreeSettings to set by hand

    def tree_of(self, rows: int, dimensions: int) -> TreeSettings | None:
        """The tree over `rows` vectors; None: exact search. Raises `CorpusError` as `tree_settings`."""
        if rows < max(self.exact_below_rows, LEAST_TREE_ROWS):
            return None
        return tree_settings(rows, dimensions, **self.tree)


def check_options(options: BuildOptions, rows: int, dimensions: int | None) -> None:
    """Raise `CorpusError` on options that do not fit a corpus of `rows` passages; `dimensions` is None for BM25."""
    if options.shards is not None and not 1 <= options.shards <= rows:
        raise CorpusError(f"shards is {options.shards}, accepted: 1 to {rows}, the passages of the corpus")
    if dimensions is None and (options.shards or 1) > 1:
        raise CorpusError("shards: BM25 weighs words over the entire corpus, accepted: 1 shard")
    if options.target_recall is not None and not 0 < options.target_recall <= 1:
        raise CorpusError(f"target_recall is {options.target_recall}, accepted: above 0, up to 1")
    if dimensions is not None:
        for size in {rows // (options.shards or 1), -(-rows // (options.shards or 1))}:
            options.tree_of(size, dimensions)


def build_index(
    directory: str | os.PathLike[str],
    corpus: MemoryMappedCorpus,
    encoder: Encoder | None,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (frozen)
    vectors: np.ndarray | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Index a corpus into `directory`, which appears only when it is complete. Returns its manifest.

    The build works in `.NAME.partial` in the same folder. After a kill or an error the same call resumes there; a call
    with other options reuses the steps that do not depend on them.

    Args:
      encoder: of passages and queries; None: BM25.
      vectors: [N, D] float32, the passages already encoded by `encoder`.

    Raises:
      CorpusError: the directory exists, is being built by another process or cannot be written, an option does not
        fit, an encoding is not finite, or `vectors` do not match the corpus and the encoder.
    """
    directory = on_disk(directory).resolve()  # of a symbolic link, the directory that it names
    refuse_occupied(directory, corpus.path, overwrite)
    check_options(options, len(corpus), encoder.dimensions if encoder else None)
    sample = None if vectors is None or encoder is None else refuse_foreign_vectors(vectors, corpus, encoder)
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.{os.getpid()}.replaced")
    try:
        with build_journal(partial) as work:
            identity = encoder.identity if encoder else Bm25Ranker.name
            base = {"corpus": sha256(corpus.path), "encoder": identity, "given": sample}
            base = json.loads(json.dumps(base))
            begun = work.base["shards"] if work.base and work.base.items() >= base.items() else 1
            shards = _shards(options, corpus, encoder, work.folder, begun, encodes=vectors is None)
            work.begin(base | {"shards": shards})
            _fill(work, corpus, encoder, options, vectors)
            for name in read_manifest(work.index).get("shards", []):  # before the old index is removed
                read_manifest(work.index / name)
            if directory.exists():
                os.replace(directory, replaced)
            os.replace(work.index, directory)
            shutil.rmtree(partial)
            shutil.rmtree(replaced, ignore_errors=True)
    except CorpusError:
        if not (partial / RECORD).is_file():  # nothing was encoded, so a new start costs little
            shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise CorpusError(f"{directory}: the index cannot be written ({error}); run again to resume") from None
    return read_manifest(directory)


def open_index(directories: str | os.PathLike[str]) -> tuple[Ranker, Sequence[Passage]]:
    """Open an index directory, or several over one corpus (separated by commas) fused by reciprocal rank.

    Raises:
      CorpusError: a file is missing, damaged or of another index, or the directories contain different corpora.
    """
    opened = [_open(path) for path in listed(directories)]
    manifest, ranker, corpus = opened[0]
    if len(opened) == 1:
        return ranker, corpus
    if len({m["corpus_sha256"] for m, _, _ in opened}) > 1:
        raise CorpusError(f"{directories}: the indexes contain different corpora, accepted: indexes of one corpus")
    return HybridRanker([ranker for _, ranker, _ in opened]), corpus


def listed(directories: str | os.PathLike[str]) -> list[Path]:
    """The index directories that a list separated by commas names. Raises `CorpusError` for one on an object store."""
    return [on_disk(name.strip()) for name in os.fspath(directories).split(",")]


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


def _open(directory: Path) -> tuple[dict[str, Any], Ranker, Sequence[Passage]]:
    manifest = read_manifest(directory)
    identity, kind = manifest["encoder"], manifest["kind"]
    if kind == "sharded":
        parts = [_open(directory / name) for name in manifest.get("shards", [])]
        rankers = [ranker for _, ranker, _ in parts if isinstance(ranker, DenseRanker)]
        if not rankers or any(m["kind"] != "dense" or m["encoder"] != identity for m, _, _ in parts):
            raise CorpusError(f"{directory / 'manifest.json'}: field shards does not match the shards")
        ranker = DenseRanker(ShardedIndex([ranker.index for ranker in rankers]), rankers[0].encoder)
        return manifest, ranker, ConcatenatedCorpus([corpus for _, _, corpus in parts])
    required = {"dense": ["vectors.npy"], "bm25": []}.get(kind)
    if required is None:
        raise CorpusError(f"{directory / 'manifest.json'}: kind is {kind!r}, accepted: dense, bm25, sharded")
    for name in ("corpus.jsonl", "corpus.offsets.npy", *required):
        if name not in manifest["files"]:
            raise CorpusError(f"{directory / 'manifest.json'}: field files does not list {name}; build it again")
    rows = manifest["rows"]
    offsets = load_array(directory / "corpus.offsets.npy", (rows,), np.int64)
    corpus = MemoryMappedCorpus(directory / "corpus.jsonl", offsets)
    if kind == "bm25":
        return manifest, Bm25Ranker.load(directory / "bm25", identity, rows), corpus
    index, encoder = _open_vectors(directory, manifest), _load_encoder(directory, identity)
    try:
        return manifest, DenseRanker(index, encoder), corpus
    except CorpusError as error:  # vectors and encoder do not match; the manifest names both
        raise CorpusError(f"{directory / 'manifest.json'}: {error}") from None


def _open_vectors(directory: Path, manifest: dict[str, Any]) -> ScannIndex:
    shape = (manifest["rows"], manifest.get("dimensions"))
    if manifest.get("metric") != "inner_product":
        message = f"metric is {manifest.get('metric')!r}, accepted: inner_product"
        raise CorpusError(f"{directory / 'manifest.json'}: {message}")
    vectors = load_array(directory / "vectors.npy", shape, np.float32)
    if manifest.get("tree") is None:
        return ScannIndex.from_vectors(vectors)
    try:
        tree = TreeSettings(**manifest["tree"])
    except TypeError as error:
        raise CorpusError(f"{directory / 'manifest.json'}: field tree is not a tree's settings ({error})") from None
    return ScannIndex.load(directory / "scann", vectors, tree)


def _load_encoder(directory: Path, identity: dict[str, Any]) -> Encoder:
    if identity.get("name") == HashingEncoder.name:
        return HashingEncoder.load(directory, identity)
    if identity.get("name") == "bert":
        from retrieval.encoders.encoder import BertEncoder  # imported late: loads JAX

        return BertEncoder.load(directory, identity)
    raise CorpusError(
        f"{directory / 'manifest.json'}: encoder {identity.get('name')!r}, accepted: hashing, bert, bm25"
    )


def _shards(
    options: BuildOptions, corpus: MemoryMappedCorpus, encoder: Encoder | None, folder: Path, begun: int, encodes: bool
) -> int:
    """The number of shards to build in `folder`; logs the memory and disk that a build with trees needs.

    Args:
      begun: the number of shards of an unfinished build in `folder`, otherwise 1.
      encodes: the build encodes the corpus into one file, from which several shards copy their vectors.

    Raises `OSError` when the disk has not enough space.
    """
    if encoder is None:
        return 1
    rows, dimensions, memory = len(corpus), encoder.dimensions, available_memory()

    def peak(shards: int) -> int:
        tree = options.tree_of(-(-rows // shards), dimensions)
        return peak_bytes(-(-rows // shards), dimensions, tree.leaves) if tree else 0

    fitting = next(count for count in range(1, rows + 1) if peak(count) <= SHARE * memory)
    shards = options.shards or min(max(fitting, begun), rows)  # keep the shards of an unfinished build if they fit
    tree = options.tree_of(-(-rows // shards), dimensions)
    floats, trees = disk_bytes(rows, dimensions, None), shards * disk_bytes(-(-rows // shards), dimensions, tree)
    needed = trees + (shards > 1) * encodes * floats + corpus.path.stat().st_size
    used = sum({p.stat().st_ino: 512 * p.stat().st_blocks for p in folder.rglob("*") if p.is_file()}.values())
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


def _fill(
    work: BuildJournal,
    corpus: MemoryMappedCorpus,
    encoder: Encoder | None,
    options: BuildOptions,
    given: np.ndarray | None,
) -> None:
    """Write every file of the index into work.index, the manifest last."""
    assert work.base is not None
    digest, shards = work.base["corpus"], work.base["shards"]
    if encoder is None:
        shutil.copyfile(corpus.path, work.index / "corpus.jsonl")
        np.save(work.index / "corpus.offsets.npy", np.asarray(corpus.offsets))
        _fill_bm25(work.index, corpus, digest)
        return
    vectors = given
    if vectors is None:
        done = encode_to(work.folder, corpus, encoder)
        if done:
            log.info("%d of %d rows were already encoded", done, len(corpus))
        vectors = np.load(work.folder / VECTORS, mmap_mode="r")
    if shards == 1:
        ready = None if given is not None else work.folder / VECTORS
        _fill_dense(work, "", corpus, encoder, options, vectors, (0, len(corpus)), ready)
        return
    bounds = np.linspace(0, len(corpus), shards + 1).astype(int).tolist()
    names = [f"shard-{number:03d}" for number in range(shards)]
    parts = []
    for name, start, stop in zip(names, bounds[:-1], bounds[1:], strict=True):
        log.info("%s: rows %d to %d", name, start, stop - 1)
        parts.append(_fill_dense(work, name, corpus, encoder, options, vectors, (start, stop)))
    measured = [part["recall"] for part in parts if part["recall"]]
    fields = {
        "kind": "sharded",
        "rows": len(corpus),
        "dimensions": encoder.dimensions,
        "encoder": encoder.identity,
        "corpus_sha256": digest,
        "shards": names,
        "recall": min(measured, key=lambda one: one["recall"], default=None),  # the worst of the shards
    }
    write_manifest(work.index, fields, [work.index / name / "manifest.json" for name in names])


def _fill_bm25(directory: Path, corpus: MemoryMappedCorpus, digest: str) -> None:
    shutil.rmtree(directory / "bm25", ignore_errors=True)
    ranker = Bm25Ranker.build(corpus, directory / "bm25")
    fields = {
        "kind": "bm25",
        "rows": len(corpus),
        "encoder": ranker.identity,
        "corpus_sha256": digest,
        "self_check": _self_check(ranker, *sample_queries(corpus)),
    }
    write_manifest(directory, fields, _files(directory))


def _link(source: Path, target: Path) -> None:
    """Hard-link a file that the build has made, or copy it where the file system has no hard links.

    Files of the user are copied: rewriting a linked one would change the index, and stop a process that has it mapped.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _fill_dense(
    work: BuildJournal,
    name: str,
    corpus: MemoryMappedCorpus,
    encoder: Encoder,
    options: BuildOptions,
    vectors: np.ndarray,
    span: tuple[int, int],
    ready: Path | None = None,
) -> dict[str, Any]:
    """Build the index directory `name` of rows span[0] .. span[1]-1; returns its manifest fields.

    Finished steps are not repeated.

    Args:
      vectors: [N, D] of the entire corpus.
      ready: a file that contains exactly the vectors of these rows, if there is one.
    """
    target, (start, stop) = work.index / name, span
    tree = options.tree_of(stop - start, encoder.dimensions)
    build, effort = _plans(tree, options)

    def write_corpus() -> str:
        target.mkdir(exist_ok=True)
        offsets = np.asarray(corpus.offsets[start:stop])
        if len(offsets) == len(corpus):
            shutil.copyfile(corpus.path, target / "corpus.jsonl")
        else:
            corpus.write_slice(target / "corpus.jsonl", start, stop)
            offsets = offsets - offsets[0]
        np.save(target / "corpus.offsets.npy", offsets)
        encoder.save(target)
        return sha256(target / "corpus.jsonl")

    def write_vectors() -> None:
        if ready:
            _link(ready, target / "vectors.npy")
        else:
            copy_to(target / "vectors.npy", vectors[start:stop])

    def write_tree() -> None:
        shutil.rmtree(target / "scann", ignore_errors=True)
        scann_log = target / "scann.log"
        scann_log.unlink(missing_ok=True)
        if tree:
            log.info("%sbuilding the tree over %d vectors", f"{name}: " if name else "", stop - start)
            ScannIndex.from_vectors(own, tree, scann_log).save(target / "scann", scann_log)

    def measure() -> dict[str, Any]:
        # Measure the files that were written, not the index in memory.
        index = ScannIndex.load(target / "scann", own, tree) if tree else ScannIndex.from_vectors(own)
        rows, queries = sample_queries(part)
        measured = None  # not measured for exact search
        if index.tree:
            encoded = encoder.encode_queries(queries)
            encoded = encoded[encoded.any(axis=1)]
            if not len(encoded):
                raise CorpusError(f"{corpus.path}: the sampled passages have no words, accepted: texts to search in")
            truth = exact_search(own, encoded, SAMPLE_K)
            if options.target_recall is not None:
                index = tune(index, encoded, truth, options.target_recall)
            reached = round(recall(index, encoded, truth), 4)
            measured = {"k": SAMPLE_K, "queries": len(encoded), "target": options.target_recall, "recall": reached}
        return {
            "tree": asdict(index.tree) if index.tree else None,
            "recall": measured,
            "self_check": _self_check(DenseRanker(index, encoder), rows, queries),
        }

    digest = work.once(f"{name}/corpus", None, write_corpus)
    work.once(f"{name}/vectors", None, write_vectors)
    own = np.load(target / "vectors.npy", mmap_mode="r")
    part = MemoryMappedCorpus(target / "corpus.jsonl", np.load(target / "corpus.offsets.npy"))
    work.once(f"{name}/tree", build, write_tree)
    fields = {
        "kind": "dense",
        "rows": stop - start,
        "dimensions": encoder.dimensions,
        "metric": "inner_product",
        "encoder": encoder.identity,
        "corpus_sha256": digest,
        **work.once(f"{name}/effort", effort, measure),
    }
    work.once(f"{name}/manifest", effort, lambda: write_manifest(target, fields, _files(target)))
    return fields


def _plans(tree: TreeSettings | None, options: BuildOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that a tree on disk depends on, and all settings that its search effort depends on."""
    settings = asdict(tree) if tree else {}
    search = ("searched_leaves", "reordered")
    build = {name: value for name, value in settings.items() if name not in search}
    return build, settings | {"target": options.target_recall}


def _self_check(ranker: Ranker, rows: np.ndarray, queries: list[str]) -> dict[str, int]:
    """How many of the sampled passages are in the top 3 of their own query."""
    ids, _ = ranker.rank(queries, SAMPLE_K)
    return {"queries": len(rows), "found": int((ids == rows[:, None]).any(axis=1).sum())}


def _files(directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file() and p.name != "manifest.json"]


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

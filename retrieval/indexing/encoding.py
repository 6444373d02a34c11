"""Encodes a corpus into vectors on disk, block by block; resumes where texts and encoder are unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from retrieval.corpus import MemoryMappedCorpus
from retrieval.protocol import CorpusError, Encoder, Passage
from retrieval.ranking.budget import reserve
from retrieval.ranking.index import refuse_non_finite

FLUSH_ROWS = 65536  # a kill loses at most this many rows
VECTORS, RECORD = "vectors.npy", "encoded.json"
MIN_AGREEMENT = 0.98  # minimum cosine of a supplied vector and ours: 16-bit arithmetic keeps it above .999


def encode_corpus(passages: Sequence[Passage], encoder: Encoder) -> np.ndarray:
    """Encode passages in memory: [N, D] float32. Raises `CorpusError` on a vector that is not finite."""
    out = np.empty((len(passages), encoder.dimensions), np.float32)
    with _bar("encoding", len(passages), 0) as bar:
        for start, block in _encoded(passages, encoder, 0, len(passages)):
            out[start : start + len(block)] = block
            bar.update(len(block))
    return out


def encode_to(folder: Path, corpus: MemoryMappedCorpus, encoder: Encoder) -> int:
    """Fill `folder`/vectors.npy [N, D] float32; returns the number of rows reused from an earlier call.

    A block of rows is reused if the encoder is the same and the texts of this and all earlier blocks are unchanged.
    The path of the corpus and later rows do not matter.

    Raises:
      CorpusError: a vector is not finite; the blocks before it are kept.
      OSError: the disk has not enough space for all vectors.
    """
    path, rows = folder / VECTORS, len(corpus)
    identity = json.loads(json.dumps(encoder.identity))
    record = _read_record(folder / RECORD)
    if record["encoder"] != identity or record["block_rows"] != FLUSH_ROWS or not path.is_file():
        path.unlink(missing_ok=True)
        record = {"encoder": identity, "block_rows": FLUSH_ROWS, "rows": rows, "blocks": []}
    starts, known = range(0, rows, FLUSH_ROWS), record["blocks"]
    same = 0
    while same < min(len(starts), len(known)):
        if known[same] != corpus.digest(starts[same], min(starts[same] + FLUSH_ROWS, rows)):
            break
        same += 1
    if same == len(starts) and record["rows"] == rows:
        return rows
    record |= {"rows": rows, "blocks": known[:same]}
    _write_record(folder / RECORD, record)  # before the file changes its length
    make_array(path, (rows, encoder.dimensions))
    vectors = np.load(path, mmap_mode="r+")
    done = min(same * FLUSH_ROWS, rows)
    with _bar("encoding", rows, done) as bar:
        for first in starts[same:]:
            stop = min(first + FLUSH_ROWS, rows)
            try:
                for start, block in _encoded(corpus, encoder, first, stop):
                    vectors[start : start + len(block)] = block
                    bar.update(len(block))
            except CorpusError as error:
                kept = f"fix that passage and run again: the first {first} rows are kept" if first else "none is kept"
                raise CorpusError(f"{error}; {kept}") from None
            vectors.flush()
            record["blocks"].append(corpus.digest(first, stop))
            _write_record(folder / RECORD, record)
    return done


def copy_to(path: Path, vectors: np.ndarray) -> None:
    """Write `vectors` [N, D] float32 to `path`, block by block.

    Raises `CorpusError` on a vector that is not finite, `OSError` when the disk has not enough space.
    """
    make_array(path, vectors.shape)
    target = np.load(path, mmap_mode="r+")
    with _bar("copying", len(vectors), 0) as bar:
        for start in range(0, len(vectors), FLUSH_ROWS):
            block = np.array(vectors[start : start + FLUSH_ROWS], np.float32)
            refuse_non_finite(block, start)
            target[start : start + len(block)] = block
            bar.update(len(block))
    target.flush()


def make_array(path: Path, shape: tuple[int, ...]) -> None:
    """Make `path` a float32 array file of this shape with its disk space allocated; existing rows stay.

    Raises `OSError` when the disk has not enough space.
    """
    # NumPy pads the header so that the first axis can grow: its length does not depend on the number of rows.
    with open(path, "r+b" if path.exists() else "w+b") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        header = file.tell()
    reserve(path, header + 4 * int(np.prod(shape)))


def check_vectors(vectors: np.ndarray, corpus: MemoryMappedCorpus, encoder: Encoder) -> None:
    """Check up to 32 passages: vectors of another model, corpus or order would give wrong results without an error.

    Raises `CorpusError` when they are not the encoder's.
    """
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
    if not agreement[worst] >= MIN_AGREEMENT:
        raise CorpusError(
            f"the given vector of row {rows[worst]} is not what the encoder computes for that passage (cosine "
            f"{agreement[worst]:.2f}, expected at least {MIN_AGREEMENT}): another model, prefix, corpus or order"
        )


def _encoded(passages: Sequence[Passage], encoder: Encoder, first: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(first, stop, encoder.block_rows):
        end = min(start + encoder.block_rows, stop)
        block = encoder.encode_passages([passages[row] for row in range(start, end)])
        refuse_non_finite(block, start)
        yield start, block


def _bar(word: str, total: int, done: int) -> tqdm:
    return tqdm(total=total, initial=done, desc=word, unit=" rows", delay=2, disable=None)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
        return {key: record[key] for key in ("encoder", "block_rows", "rows", "blocks")}
    except (OSError, ValueError, TypeError, KeyError):
        return {"encoder": None, "block_rows": 0, "rows": 0, "blocks": []}


def _write_record(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)

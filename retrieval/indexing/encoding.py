"""Encodes a corpus into vectors on disk, block by block; resumes where corpus and encoder are unchanged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from retrieval.corpus import MemoryMappedCorpus
from retrieval.manifest import sha256
from retrieval.protocol import CorpusError, Encoder, Passage
from retrieval.ranking.index import refuse_non_finite

FLUSH_ROWS = 65536  # a kill loses at most this many rows
MIN_AGREEMENT = 0.98  # minimum cosine of a supplied vector and ours: 16-bit arithmetic keeps it above .999


def encode_corpus(passages: Sequence[Passage], encoder: Encoder) -> np.ndarray:
    """Encode passages in memory: [N, D] float32. Raises `CorpusError` on a vector that is not finite."""
    out = np.empty((len(passages), encoder.dimensions), np.float32)
    with _show_progress("encoding", len(passages)) as bar:
        for start, block in _encode_blocks(passages, encoder, 0, len(passages)):
            out[start : start + len(block)] = block
            bar.update(len(block))
    return out


def encode_to(path: Path, record_file: Path, corpus: MemoryMappedCorpus, encoder: Encoder) -> int:
    """Fill the array file `path` [N, D] float32; returns the number of rows reused from an earlier call.

    The rows that an interrupted call has written, by `record_file`, are reused if corpus and encoder are the same.

    Raises:
      CorpusError: a vector is not finite.
      OSError: the disk has not enough space for all vectors.
    """
    rows = len(corpus)
    inputs = {"encoder": json.loads(json.dumps(encoder.identity)), "corpus_sha256": sha256(corpus.path)}
    record = _read_record(record_file)
    done = record["rows"] if record.get("inputs") == inputs and path.is_file() else 0
    if not done:
        record_file.unlink(missing_ok=True)
        make_array(path, (rows, encoder.dimensions))
    vectors = np.load(path, mmap_mode="r+")
    with _show_progress("encoding", rows, done) as bar:
        for first in range(done, rows, FLUSH_ROWS):
            stop = min(first + FLUSH_ROWS, rows)
            for start, block in _encode_blocks(corpus, encoder, first, stop):
                vectors[start : start + len(block)] = block
                bar.update(len(block))
            vectors.flush()
            temporary = record_file.with_suffix(".tmp")
            temporary.write_text(json.dumps({"inputs": inputs, "rows": stop}), encoding="utf-8")
            temporary.replace(record_file)
    return done


def copy_to(path: Path, vectors: np.ndarray) -> None:
    """Write `vectors` [N, D] float32 to `path`, block by block.

    Raises `CorpusError` on a vector that is not finite, `OSError` when the disk has not enough space.
    """
    make_array(path, vectors.shape)
    target = np.load(path, mmap_mode="r+")
    with _show_progress("copying", len(vectors)) as bar:
        for start in range(0, len(vectors), FLUSH_ROWS):
            block = np.array(vectors[start : start + FLUSH_ROWS], np.float32)
            refuse_non_finite(block, start)
            target[start : start + len(block)] = block
            bar.update(len(block))
    target.flush()


def make_array(path: Path, shape: tuple[int, ...]) -> None:
    """Make `path` a float32 array file of this shape with its disk space allocated.

    Without allocation, writing to a memory-mapped hole on a full disk kills the process (SIGBUS).
    Raises `OSError` when the disk has not enough space.
    """
    np.lib.format.open_memmap(path, "w+", np.float32, shape)
    size = path.stat().st_size
    try:
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink()
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path.parent).free
        message = f"{path.name} takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        raise OSError(errno.ENOSPC, message) from None


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


def _encode_blocks(
    passages: Sequence[Passage], encoder: Encoder, first: int, stop: int
) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(first, stop, encoder.block_rows):
        end = min(start + encoder.block_rows, stop)
        block = encoder.encode_passages([passages[row] for row in range(start, end)])
        refuse_non_finite(block, start)
        yield start, block


def _show_progress(word: str, total: int, done: int = 0) -> tqdm:
    return tqdm(total=total, initial=done, desc=word, unit=" rows", delay=2, disable=None)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
        return record if isinstance(record["rows"], int) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}

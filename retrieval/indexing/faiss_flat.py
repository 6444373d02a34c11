"""Memory-maps the vectors of a FAISS flat index without FAISS. Search-R1 publishes wiki-18's as e5_Flat.index.

Layout, little-endian: four letters (`IxFI` inner product, `IxF2` Euclidean), int32 D, int64 N, two unused int64, one
byte "trained", int32 metric, uint64 count of floats, then N x D float32.
"""

from __future__ import annotations

import os
import struct

import numpy as np

from retrieval.protocol import CorpusError, on_disk

HEADER = struct.Struct("<4sIqqqBiQ")
KINDS = {b"IxFI": 0, b"IxF2": 1}  # letters -> FAISS's number for the metric


def read_flat(path: str | os.PathLike[str]) -> np.ndarray:
    """Map the vectors [N, D] float32 of a flat index.

    Raises `CorpusError` when the file is not a flat index of inner products, or is truncated.
    """
    path = on_disk(path)
    if not path.is_file():
        raise CorpusError(f"{path}: no such FAISS index")
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[:4] not in KINDS:
        raise CorpusError(f"{path}: begins with {head[:4]!r}, accepted: a FAISS flat index ({b'IxFI'!r})")
    letters, dimensions, rows, _, _, _, metric, floats = HEADER.unpack(head)
    if letters != b"IxFI" or metric != KINDS[letters]:
        raise CorpusError(f"{path}: a flat index by Euclidean distance, accepted: by inner product")
    if dimensions < 1 or rows < 1 or floats != rows * dimensions:
        raise CorpusError(f"{path}: {floats} floats for {rows} rows of {dimensions}, the header is damaged")
    expected = HEADER.size + 4 * floats
    if path.stat().st_size != expected:
        raise CorpusError(f"{path}: {path.stat().st_size} bytes, the header says {expected}")
    return np.memmap(path, "<f4", "r", HEADER.size, (rows, dimensions))

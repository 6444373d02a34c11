"""The manifest of an index directory: what the index is, and the size and sha256 of each of its files.

ScaNN loads damaged files without an error and then gives wrong results or aborts, so files are checked before they are
opened: all sizes, all small files, and a sample of each large file. Reading an index of 21 million passages completely
takes longer than the clients of a restarted server wait; `read_manifest(..., complete=True)` does so.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.protocol import CorpusError

FORMAT = 2
NAME = "manifest.json"
# Larger files are sampled: the first block, the last, and one at a fixed random position in each of 62 equal parts.
# That always detects a file of another index, and damage to a contiguous thirtieth of a file.
SAMPLE_ABOVE_BYTES = 64 * 2**20
SAMPLE_BLOCKS, BLOCK_BYTES = 64, 2**16
FIELDS = {"kind": str, "rows": int, "encoder": dict, "corpus_sha256": str, "files": dict}


def write_manifest(directory: Path, fields: dict[str, Any], files: Iterable[Path]) -> None:
    """Write manifest.json: `fields` and a fingerprint of each of `files` (paths inside `directory`)."""
    fingerprints = {p.relative_to(directory).as_posix(): _fingerprint(p) for p in sorted(files)}
    manifest = {"format": FORMAT, **fields, "files": fingerprints}
    temporary = directory / f"{NAME}.tmp"
    temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / NAME)


def read_manifest(directory: Path, complete: bool = False) -> dict[str, Any]:
    """Compare all listed files with the manifest and return it; of large files only a sample, unless `complete`.

    Raises `CorpusError` naming the file that is missing, damaged, foreign or unlisted.
    """
    path = directory / NAME
    if not path.is_file():
        raise CorpusError(f"{path}: missing, so {directory} is no index; make one with launch/build_index.py")
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["format"]
        entries = {
            name: (entry["bytes"], entry["sha256"], entry.get("sample")) for name, entry in manifest["files"].items()
        }
        valid = all(isinstance(manifest.get(name), type_) for name, type_ in FIELDS.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CorpusError(f"{path}: not a complete manifest; build the index again") from None
    if version != FORMAT:
        raise CorpusError(f"{path}: format {version}, this program reads {FORMAT}; build the index again")
    if not valid:
        raise CorpusError(f"{path}: not a complete manifest; build the index again")
    # An unlisted file in a folder that a library reads could be a pickle, which it would execute.
    present = {p.relative_to(directory).as_posix() for p in directory.glob("*/*") if p.is_file()}
    for name in sorted(present - entries.keys()) + [n for n in entries if n.endswith(".pkl")]:
        raise CorpusError(f"{directory / name}: not part of an index; build the index again")
    for name, (size, digest, sample) in entries.items():
        file = directory / name
        if not file.is_file():
            raise CorpusError(f"{file}: missing; build the index again")
        if file.stat().st_size != size or (
            sha256(file) != digest if complete or sample is None else sample_sha256(file) != sample
        ):
            raise CorpusError(f"{file}: differs from {NAME} (damaged or of another index); build it again")
    return manifest


def load_array(path: Path, shape: tuple[int | None, ...], dtype: type) -> np.ndarray:
    """Map an array of the index. `shape` has None for a length that the manifest lacks.

    Raises:
      CorpusError: shape or dtype differ from the manifest, or the file cannot be read.
    """
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read ({error})") from None
    if values.shape != shape or values.dtype != dtype:
        expected = f"{np.dtype(dtype)}{list(shape)}"
        raise CorpusError(f"{path}: holds {values.dtype}{list(values.shape)}, {NAME} says {expected}")
    return values


def sha256(path: Path) -> str:
    """The digest of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_sha256(path: Path) -> str:
    """The digest of SAMPLE_BLOCKS blocks of a file, in hexadecimal; their positions depend only on its size."""
    size, digest = path.stat().st_size, hashlib.sha256()
    part = (size - BLOCK_BYTES) // (SAMPLE_BLOCKS - 2)
    positions = [0, size - BLOCK_BYTES]
    for number in range(SAMPLE_BLOCKS - 2):
        draw = hashlib.sha256(f"{size} {number}".encode()).digest()
        positions.append(part * number + int.from_bytes(draw[:8]) % part)
    with open(path, "rb", buffering=0) as file:
        for position in sorted(positions):
            digest.update(os.pread(file.fileno(), BLOCK_BYTES, position))
    return digest.hexdigest()


def _fingerprint(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    return entry | ({"sample": sample_sha256(path)} if entry["bytes"] > SAMPLE_ABOVE_BYTES else {})

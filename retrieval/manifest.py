"""The manifest of an index directory: what the index is, and the size and sha256 of every file it is made of.

ScaNN loads damaged files without a word and then answers wrongly or aborts, so nothing is opened before it is checked.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.protocol import CorpusError

FORMAT = 1
METRIC = "inner_product"


def write_manifest(directory: Path, fields: dict[str, Any]) -> None:
    """Write manifest.json: `fields` and a fingerprint of every file now in `directory`."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    fingerprints = {p.relative_to(directory).as_posix(): _fingerprint(p) for p in files}
    manifest = {"format": FORMAT, "metric": METRIC, **fields, "files": fingerprints}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest after comparing every file it lists, and every file ScaNN would read, with it.

    Raises `CorpusError` naming the file that is missing, damaged, foreign or unlisted.
    """
    path = directory / "manifest.json"
    if not path.is_file():
        raise CorpusError(f"{path}: missing, so {directory} is no index; make one with launch/build_index.py")
    try:
        manifest = json.loads(path.read_bytes())
        files, metric, version = manifest["files"], manifest["metric"], manifest["format"]
        rows, dimensions, encoder = manifest["rows"], manifest["dimensions"], manifest["encoder"]
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
        valid = isinstance(rows, int) and isinstance(dimensions, int) and isinstance(encoder, dict)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise CorpusError(f"{path}: not a complete manifest; build the index again")
    if version != FORMAT or metric != METRIC:
        raise CorpusError(f"{path}: format {version}, metric {metric}; this program reads {FORMAT}, {METRIC}")
    for name in ("corpus.jsonl", "corpus.offsets.npy", "vectors.npy"):
        if name not in listed:
            raise CorpusError(f"{path}: field files does not list {name}; build the index again")
    # An unlisted file could be a pickle of document ids, which ScaNN would execute.
    present = {f"scann/{p.name}" for p in directory.glob("scann/*")}
    for name in sorted(present - listed.keys()) + [n for n in listed if n.endswith(".pkl")]:
        raise CorpusError(f"{directory / name}: not part of an index; build the index again")
    for name, (size, digest) in listed.items():
        file = directory / name
        if not file.is_file():
            raise CorpusError(f"{file}: missing; build the index again")
        if file.stat().st_size != size or _fingerprint(file)["sha256"] != digest:
            raise CorpusError(f"{file}: differs from manifest.json (damaged or of another index); build it again")
    return manifest


def load_array(path: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Map an array of the index. Raises `CorpusError` when it is not of the shape the manifest promises."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read ({error})") from None
    if found.shape != shape or found.dtype != dtype:
        expected = f"{np.dtype(dtype)}{list(shape)}"
        raise CorpusError(f"{path}: holds {found.dtype}{list(found.shape)}, manifest.json says {expected}")
    return found


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

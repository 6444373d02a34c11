"""What decides a run's numbers, as a checkpoint records it, and what differs when the run goes on.

A record holds the fields of `config.DECIDES_NUMBERS` by value. Of those in `config.DECIDES_BY_CONTENT` it holds what
they name and a fingerprint of what is there: a directory may move, and another one may take its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psearch_jax.config import DECIDES_NUMBERS, Config, fields

Record = dict[str, Any]
_BLOCK, _BLOCKS = 4096, 64  # bytes and number of the samples that a large file is known by


def record(config: Config, contents: Mapping[str, tuple[str, str]]) -> Record:
    """The record of a run.

    Args:
      config: as the method has it.
      contents: for each field that names something, what it names and a fingerprint of that.
    """
    values = {name: value for name, value in fields(config).items() if name in DECIDES_NUMBERS}
    return values | {name: {"names": named, "is": digest} for name, (named, digest) in contents.items()}


def differences(saved: Mapping[str, Any] | None, now: Record) -> dict[str, str]:
    """For every field that differs, what was and what is. A field that the saved record lacks had its default."""
    if saved is None:
        return {"settings": "none are recorded with it"}
    defaults = fields(Config())
    out = {}
    for name, new in now.items():
        old = saved.get(name, defaults.get(name))
        if isinstance(new, dict):
            if not isinstance(old, dict):
                out[name] = f"not recorded, now {new['names']!r}"
            elif old["is"] != new["is"]:
                same = old["names"] == new["names"]
                out[name] = f"what is in {new['names']}" if same else f"{old['names']!r}, now {new['names']!r}"
        elif old != new:
            out[name] = f"{old!r}, now {new!r}"
    return out


def described(changes: Mapping[str, str]) -> str:
    """Differences in one line."""
    return "; ".join(f"{name}: {change}" for name, change in changes.items())


def fingerprint(path: str | Path, patterns: Sequence[str] = ()) -> str:
    """Tells files apart by their sizes and by samples of their bytes, wherever they lie; 300 kB are read of each.

    Args:
      patterns: which files of a directory count, as `Path.glob` has it.
    """
    path, digest = Path(path), hashlib.sha256()
    files = sorted({p for pattern in patterns for p in path.glob(pattern)}) if path.is_dir() else [path]
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else ""
        size = file.stat().st_size
        digest.update(f"{name} {size};".encode())
        with open(file, "rb") as opened:
            step = max(_BLOCK, size // _BLOCKS)
            for start in (*range(0, size, step), max(0, size - _BLOCK)):
                opened.seek(start)
                digest.update(opened.read(_BLOCK))
    return digest.hexdigest()


def text_fingerprint(*texts: str) -> str:
    """The same for texts at hand."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()

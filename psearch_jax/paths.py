"""Where files lie: on a disk, or on an object store (`gs://BUCKET/...`), behind one interface.

An object store is no disk. Putting an object is atomic, renaming is not; directories are there as long as something is
in them; nothing can be appended to, and nothing can be mapped into memory. So:

- `write_whole` writes beside and renames on a disk, and puts an object on a store;
- what would be appended to is written to a disk of this machine, and put on the store from there (metrics.py);
- what is memory-mapped (weights to start from, merged question sets, passages and vectors) has to lie on a disk:
  `on_disk` says so. Checkpoints go to and come from a store by Orbax.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from etils import epath

from psearch_jax.types import UserError, first_line
from retrieval import protocol
from retrieval.protocol import is_remote

STORE = "gs://"
TOY_POLICY = Path(__file__).parent / "assets" / "toy_policy"  # what `toy` stands for


def locate(location: str | os.PathLike[str]) -> Path:
    """The path of a location: pathlib's own on a disk, an object with the same methods on an object store.

    Raises:
      UserError: an address of another kind than gs://, or without the library that reaches it.
    """
    text = os.fspath(location)
    if not is_remote(text):
        return Path(text)
    if not text.startswith(STORE):
        raise UserError(f"{text}: accepted: a path of this machine, or {STORE}BUCKET/...")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{text}: {STORE} needs gcsfs, found none; install it with `pip install gcsfs`")
    import fsspec

    # Orbax writes to the store by ways of its own: a listing kept from before would not show what it wrote.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it warns at every call where it may not see a bucket's layout
    return epath.Path(text)


def of_store(error: BaseException) -> bool:
    """Whether the library of an object store raised it: the store cannot be reached, or not be read or written."""
    if "gcsfs" not in sys.modules:
        return False
    import aiohttp
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    bare = type(error) is OSError and error.errno is None  # `Forbidden: ...`; the system's own have a number
    return bare or isinstance(error, HttpError | GoogleAuthError | aiohttp.ClientError)


def on_disk(location: str | os.PathLike[str], name: str) -> Path:
    """The path of what has to lie on a disk of this machine. Raises `UserError`, naming the flag or field `name`."""
    try:
        return protocol.on_disk(location)
    except protocol.CorpusError as error:
        raise UserError(f"{name}={error}") from None


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path without `..` and symbolic links; on an object store as it is."""
    path = locate(path)
    return path if is_remote(path) else path.resolve()


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file that is whole once it is there.

    Raises:
      OSError: whatever the library of an object store raises as well.
    """
    path, data = locate(path), content.encode() if isinstance(content, str) else content
    if not is_remote(path):
        beside = path.with_name(path.name + ".tmp")
        beside.write_bytes(data)
        beside.replace(path)
        return
    try:
        path.write_bytes(data)
    except Exception as error:
        if not of_store(error):
            raise
        raise OSError(f"{path}: {first_line(error)[:200]}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UserError` when there is no such file, or something else in it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: not found") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits, or too deep
        raise UserError(f"{path}: not JSON ({error}), accepted: a JSON object") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: found a {type(value).__name__}, accepted: a JSON object")
    return value


def make_writable(directory: str | os.PathLike[str]) -> Path:
    """The directory, made if absent, after something was written to it and removed again.

    Raises:
      OSError: it cannot be written.
    """
    path = locate(directory)
    if is_remote(path):
        probe = path / f".probe-{uuid.uuid4().hex}"  # all processes of a run come here at the same time
        write_whole(probe, b"")
        probe.unlink(missing_ok=True)
    else:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path


def remove_tree(path: Path) -> None:
    """Removes a directory with all that is in it, as far as it is there and can be removed."""
    if not is_remote(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.rmtree(missing_ok=True)

"""One interface to files on a disk and on an object store (`gs://BUCKET/...`).

On an object store, writing an object is atomic but renaming is not, a directory exists only while it contains
something, and files can neither be appended to nor memory-mapped. Therefore:

- `write_atomically` writes a temporary file and renames it on a disk, and writes one object on a store;
- files that grow are written to a local disk and uploaded from there (metrics.py);
- memory-mapped files (initial weights, merged question sets, passages and vectors) must be on a disk, which `on_disk`
  checks. Orbax reads and writes checkpoints on a store.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from etils import epath

from psearch_jax.types import UserError, first_line
from retrieval import protocol
from retrieval.protocol import is_remote

STORE = "gs://"
ASSETS = Path(__file__).parent.parent / "assets"  # packaged files
# The policies that ship, each with its tokenizer; `toy_tools` is the one for rollout.dialect=tool_calls.
TOYS = {"toy": ASSETS / "toy_policy", "toy_tools": ASSETS / "toy_tools_policy"}


def locate(location: str | os.PathLike[str]) -> Path:
    """The path of a location: a pathlib path on a disk, or an object with the same methods on an object store.

    Raises:
      UserError: the address is remote but not gs://, or gcsfs is not installed.
    """
    text = os.fspath(location)
    if not is_remote(text):
        return Path(text)
    if not text.startswith(STORE):
        raise UserError(f"{text}: accepted: a path on this machine, or {STORE}BUCKET/...")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{text}: {STORE} needs gcsfs, found none; install it with `pip install gcsfs`")
    import fsspec.config

    # Orbax does not write to the store through fsspec, so a cached listing would miss what Orbax wrote.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # without permission for the bucket's layout, each call warns
    return cast(Path, epath.Path(text))


def is_store_error(error: BaseException) -> bool:
    """Whether an error comes from the object store's library: the store cannot be reached, read or written."""
    if "gcsfs" not in sys.modules:
        return False
    import aiohttp
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    bare = type(error) is OSError and error.errno is None  # as `Forbidden: ...`; errors of the system have an errno
    from_orbax = "google.api_core.exceptions" in sys.modules and isinstance(
        error, sys.modules["google.api_core.exceptions"].GoogleAPIError
    )
    return bare or from_orbax or isinstance(error, HttpError | GoogleAuthError | aiohttp.ClientError)


def on_disk(location: str | os.PathLike[str], name: str) -> Path:
    """The path of a file that must be on a local disk. Otherwise raises `UserError` with the flag or field `name`."""
    try:
        return protocol.on_disk(location)
    except protocol.CorpusError as error:
        raise UserError(f"{name}={error}") from None


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path without `..` and symbolic links; on an object store unchanged."""
    path = locate(path)
    return path if is_remote(path) else path.resolve()


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A directory to write the contents of `out` into, renamed to `out` at the end: it is complete or absent.

    On an object store, which has no renaming, it is `out` itself. If the block raises, what it wrote is removed.
    """
    target = out
    if not is_remote(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield target
        if target != out:
            target.chmod(0o755)
            os.replace(target, out)
    except BaseException:
        remove_tree(target)
        raise


def check_new(path: Path, accepted: str = "a directory that does not exist yet", flag: str = "") -> None:
    """Raises `UserError` if `path` exists. `flag`: the start of the message, such as `--out=`."""
    if path.exists():
        raise UserError(f"{flag}{path}: exists already, accepted: {accepted}")


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file atomically, in a new directory if necessary.

    Raises:
      OSError: also in place of any error of the object store's library.
    """
    path, data = locate(path), content.encode() if isinstance(content, str) else content
    if not is_remote(path):
        temporary = path.with_name(path.name + ".tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None
        return
    try:
        path.write_bytes(data)
    except Exception as error:
        if not is_store_error(error):
            raise
        raise OSError(f"{path}: {first_line(error)[:200]}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UserError` if the file does not exist or contains anything else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: not found") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, an integer with too many digits, or too deep
        raise UserError(f"{path}: not JSON ({error}), accepted: a JSON object") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: found a {type(value).__name__}, accepted: a JSON object")
    return value


def make_writable(directory: str | os.PathLike[str]) -> Path:
    """Creates the directory if it does not exist and checks, with a temporary file, that it is writable.

    Raises:
      OSError: it is not writable.
    """
    path = locate(directory)
    if is_remote(path):
        probe = path / f".probe-{uuid.uuid4().hex}"  # unique, because all processes of a run do this at the same time
        write_atomically(probe, b"")
        probe.unlink(missing_ok=True)
    else:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path


def remove_tree(path: Path) -> None:
    """Removes a directory and its contents, if it exists; errors on a disk are ignored."""
    if not is_remote(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        epath.Path(path).rmtree(missing_ok=True)


def packaged(path: str) -> str:
    """The directory of a policy that ships (`TOYS`); any other path or name unchanged."""
    return str(TOYS.get(path, path))

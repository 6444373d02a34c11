"""Loads a user's code that a config names: a file, or a module."""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from psearch_jax.runtime.paths import on_disk
from psearch_jax.types import UserError, first_line


@functools.cache
def load_object(named: str, field: str) -> tuple[Any, str]:
    """The object at FILE.py:NAME or MODULE:NAME, and the SHA-256 of the file that it came from, however often asked.

    Raises:
      UserError: as `load_module`; or there is no such object.
    """
    source, _, name = named.rpartition(":")
    module, digest = load_module(source, field)
    if not hasattr(module, name):
        raise UserError(f"{field}: {source} has no {name!r}, accepted: FILE.py:NAME or MODULE:NAME")
    return getattr(module, name), digest


def call_object(named: str, field: str, *arguments: Any) -> Any:
    """What the class or function returns.

    Raises:
      UserError: as `load_object`; or it cannot be called, or fails.
    """
    function, _ = load_object(named, field)
    try:
        return function(*arguments)
    except Exception as error:
        where = describe_error(error, named.rpartition(":")[0])
        raise UserError(f"{field}={named}: {where}, accepted: a class or function that can be called") from error


def load_module(source: str, field: str) -> tuple[ModuleType, str]:
    """The module of `FILE.py` or of a dotted name, and the SHA-256 of its file. Runs its code, once for each content.

    Of a file, exactly the bytes that are hashed are run.

    Raises:
      UserError: it cannot be loaded; names `field`.
    """
    try:
        if not source.endswith(".py"):
            module = importlib.import_module(source)
            content = Path(str(module.__file__)).read_bytes()
        else:
            content = on_disk(source, field).read_bytes()
            module = _run(source, content)
    except Exception as error:
        where = f"{field}: {source}: cannot be loaded in {Path.cwd()}"
        raise UserError(f"{where}: {describe_error(error, source)}") from error
    return module, hashlib.sha256(content).hexdigest()


@functools.cache
def _run(source: str, content: bytes) -> ModuleType:
    module = sys.modules[source] = ModuleType(source)  # where dataclasses look their module up
    module.__file__ = source
    exec(compile(content, source, "exec"), vars(module))
    return module


def describe_error(error: Exception, file: str) -> str:
    """Type and message of an error, and the line of the file at which it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {first_line(error)}" + (f" (line {lines[-1]})" if lines else "")

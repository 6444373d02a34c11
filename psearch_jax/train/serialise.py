"""Dataclasses with NumPy arrays as compressed JSON, to keep rollouts on disk."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import types
import typing
import zlib
from typing import Any

import numpy as np


def serialise(value: Any) -> bytes:
    """Dataclasses, arrays, ranges, and lists, tuples and dicts of them, as bytes."""
    return zlib.compress(json.dumps(value, default=_encode).encode(), level=1)  # ASCII: a text may hold half a pair


def deserialise(kind: Any, content: bytes) -> Any:
    """The value of a type such as `list[Trajectory]` that `serialise` wrote.

    Raises:
      ValueError: the bytes are damaged, or those of another type.
    """
    try:
        return _decode(kind, json.loads(zlib.decompress(content)))
    except (zlib.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, np.integer):
        return int(value)
    return {"dtype": value.dtype.str, "shape": value.shape, "data": base64.b64encode(value.tobytes()).decode()}


def _decode(kind: Any, value: Any) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"]).copy()
    if kind is range:
        return range(*value)
    if dataclasses.is_dataclass(kind):
        hints = _type_hints(kind)
        return kind(**{name: _decode(hints[name], item) for name, item in value.items()})
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else _decode(arguments[0], value)
    match typing.get_origin(kind):
        case container if container is list or (container is tuple and arguments[-1] is ...):
            return container(_decode(arguments[0], item) for item in value)
        case container if container is tuple:
            return tuple(_decode(*pair) for pair in zip(arguments, value, strict=True))
        case container if container is dict:
            return {arguments[0](key): _decode(arguments[1], item) for key, item in value.items()}
    return value


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)

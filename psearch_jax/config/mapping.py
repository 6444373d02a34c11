"""Configs from nested mappings such as a ConfigDict or a config.json, and back."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from psearch_jax.config.sections import Config
from psearch_jax.types import UserError


def from_mapping(values: Mapping[str, Any], cls: type = Config, prefix: str = "config") -> Any:
    """Builds a dataclass from a nested mapping and checks keys and types; missing keys take their defaults.

    Raises:
      UserError: an unknown key (the message names the nearest known one) or a value of another type.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(sorted(known))}"
            raise UserError(f"{prefix}: unknown key {key!r}; {hint}")
        arguments[key] = _check_type(value, hints[key], f"{prefix}.{key}")
    return cls(**arguments)


def _check_type(value: Any, hint: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping | ConfigDict):
            raise UserError(f"{name}: found {value!r}, accepted: a section of fields")
        return from_mapping(value, hint, name)
    if typing.get_origin(hint) is Literal:
        accepted = typing.get_args(hint)
        if value not in accepted:
            raise UserError(f"{name}: found {value!r}, accepted: {', '.join(map(str, accepted))}")
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name}: found {value!r}, accepted: a list")
        return tuple(_check_type(item, typing.get_args(hint)[0], f"{name}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{name}: found an integer of {len(str(abs(value)))} digits, accepted: a number") from None
    if value != value:  # NaN
        raise UserError(f"{name}: found {value!r}, accepted: a number")
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise UserError(f"{name}: found {value!r} ({type(value).__name__}), accepted: {hint.__name__}")
    return value


def config_dict(**sections: Any) -> ConfigDict:
    """The defaults, changed by `sections`, as a ConfigDict in which flags can set every field.

    Raises:
      UserError: as `from_mapping`.
    """
    return ConfigDict(to_mapping(from_mapping(sections)))


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of `from_mapping`; the result can be written as JSON."""
    return dataclasses.asdict(config)

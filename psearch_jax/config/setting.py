"""The declaration of a config field: its default, documentation, accepted values and resume policy."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple


class Resume(enum.Enum):
    """What a resumed run must keep of a field, in the words of docs/configuration.md.

    - SAME_VALUE: the value affects the results;
    - SAME_CONTENT: the value names something, such as files, which may be moved or replaced;
    - FREE: the value changes length, speed, memory, servers or outputs of a run, or its results only by rounding.
    """

    SAME_VALUE = "a resumed run must keep it"
    SAME_CONTENT = "a resumed run must have the same content, but may load it from another place"
    FREE = "a resumed run may change it"


class Accepted(NamedTuple):
    """The accepted values of a field, in words for messages, and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Setting:
    """The metadata of a config field."""

    doc: str
    accepted: Accepted | None  # None: every value of the field's type
    training_only: bool  # whether `accepted` applies only to training runs
    resume: Resume


def setting(
    default: Any,
    doc: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    accepted: Accepted | None = None,
    training_only: bool = False,
    resume: Resume = Resume.SAME_VALUE,
) -> Any:
    """A dataclass field with a `Setting` as its metadata.

    Args:
      doc: complete sentences for docs/configuration.md.
      at_least, above, at_most, below: bounds of the value.
      accepted: another condition, instead of bounds. The choices of a `Literal` field follow from its type.
      training_only: the bounds or the condition apply only to training runs.
    """
    bounds = (
        ("at least", at_least, operator.ge),
        ("above", above, operator.gt),
        ("at most", at_most, operator.le),
        ("below", below, operator.lt),
    )
    given = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
    if given:
        words = ", ".join(f"{words} {bound}" for words, bound, _ in given)
        if at_least is not None and at_most is not None:
            words = f"from {at_least} to {at_most}"
        accepted = Accepted(words, lambda value: all(holds(value, bound) for _, bound, holds in given))
    metadata = {"setting": Setting(doc, accepted, training_only, resume)}
    return dataclasses.field(default=default, metadata=metadata)


def one_of(names: Collection[str]) -> Accepted:
    """Accepts the names."""
    return Accepted(", ".join(names), lambda value: value in names)


SEED = Accepted("at least 0, below 2**32", lambda value: 0 <= value < 2**32)


def settings_of(cls: type, prefix: str = "") -> dict[str, Setting]:
    """The settings of a config class and of its sections, by dotted name."""
    settings: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        if "setting" in field.metadata:
            settings[f"{prefix}{field.name}"] = field.metadata["setting"]
        else:
            settings |= settings_of(type(field.default), f"{prefix}{field.name}.")
    return settings

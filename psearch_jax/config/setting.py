"""The declaration of a config field: its default, documentation, accepted values and resume policy."""

from __future__ import annotations

import dataclasses
import enum
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple


class Resume(enum.Enum):
    """What a resumed run must keep of a field, in the words of docs/configuration.md.

    - SAME_VALUE: the value affects the results;
    - SAME_CONTENT: the value names something, such as files, which may be moved or replaced;
    - FREE: the value changes length, speed, memory, servers or outputs of a run, or its results only by rounding.
    """

    SAME_VALUE = "value"
    SAME_CONTENT = "content"
    FREE = "may change"


class Accepted(NamedTuple):
    """The accepted values of a field, in words for messages, and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Setting:
    """The metadata of a config field."""

    doc: str
    accepted: Accepted | None  # None: every value of the field's type
    resume: Resume


_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def setting(
    default: Any,
    doc: str,
    *,
    accepted: Accepted | None = None,
    resume: Resume = Resume.SAME_VALUE,
    **bounds: float,
) -> Any:
    """A dataclass field with a `Setting` as its metadata.

    Args:
      doc: complete sentences for docs/configuration.md.
      accepted: a condition, if `bounds` cannot express it. The choices of a `Literal` field follow from its type.
      bounds: `at_least`, `above`, `at_most` and `below`.
    """
    if bounds:
        words = ", ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
        accepted = Accepted(words, lambda value: all(_BOUNDS[name](value, bound) for name, bound in bounds.items()))
    return dataclasses.field(default=default, metadata={"setting": Setting(doc, accepted, resume)})


free = partial(setting, resume=Resume.FREE)
same_content = partial(setting, resume=Resume.SAME_CONTENT)
share = partial(setting, at_least=0, at_most=1)


_OWN = re.compile(r"(?:.+\.py|[^\W\d][\w.]*):[^\W\d]\w*")


def names_object(text: str) -> bool:
    """Whether a text has the form FILE.py:NAME or MODULE:NAME, by which fields name a user's own code."""
    return _OWN.fullmatch(text) is not None


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

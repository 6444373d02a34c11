"""Names of three syllables, one token each, and the renamings that a cold start applies to its rows.

A name is a head, a middle and a tail: `Ba` `ka` `san`. A quarter of all names is new: they occur in no row of any cold
start, so a policy that spells one correctly has copied it. The indices of the three syllables decide whether a name is
new, and a renaming preserves that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Names = Literal["known", "new"]

_VOWELS, _CONSONANTS, _ENDINGS = "aeiou", "bdfghjklmnprstvz", "nrlsm"
_OPEN = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_CLOSED = [syllable + ending for syllable in _OPEN for ending in _ENDINGS]


def _draw_syllables(syllables: Sequence[str], count: int, key: int) -> tuple[str, ...]:
    return tuple(syllables[i] for i in np.random.default_rng([key, 0x15]).permutation(len(syllables))[:count])


HEADS = tuple(syllable.capitalize() for syllable in _OPEN)
MIDDLES = _draw_syllables(_OPEN, 60, 1)
TAILS = _draw_syllables(_CLOSED, 80, 2)
SYLLABLES = (HEADS, MIDDLES, TAILS)
# A name's class is the sum of its syllables' indices modulo 4; the last class is new.
_CLASSES = 4
_AVOIDED = ("Nige", "Niga", "Fago", "Kike", "Puta", "Vagi", "Rape", "Hitle")


def is_new(name: str) -> bool:
    """Whether a name from `draw_names` is kept out of every cold start."""
    parts = (name[:2], name[2:4], name[4:])
    return _last_class([group.index(part) for group, part in zip(SYLLABLES, parts, strict=True)])


def _last_class(places: Sequence[int]) -> bool:
    return sum(places) % _CLASSES == _CLASSES - 1


def head(name: str) -> str:
    """The first syllable. Names that share it are hard to distinguish, so no question has two of them."""
    return name[:2]


def draw_names(rng: np.random.Generator, count: int, which: Names) -> list[str]:
    """`count` different names, all known or all new."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        h, m, t = (int(rng.integers(len(group))) for group in SYLLABLES)
        name = HEADS[h] + MIDDLES[m] + TAILS[t]
        if _last_class((h, m, t)) == (which == "new") and not name.startswith(_AVOIDED):
            drawn[name] = None
    return list(drawn)


def change_syllable(rng: np.random.Generator, name: str) -> str:
    """A known name that differs from `name` in one syllable."""
    while True:
        parts = [name[:2], name[2:4], name[4:]]
        place = int(rng.integers(len(parts)))
        parts[place] = SYLLABLES[place][rng.integers(len(SYLLABLES[place]))]
        other = "".join(parts)
        if other != name and not is_new(other) and not other.startswith(_AVOIDED):
            return other


def draw_renaming(rng: np.random.Generator, ids: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """A map [size] int32 from token id to token id that renames all names and keeps all other tokens.

    Heads, middles and tails are permuted among themselves, so names that share a syllable still do. The index classes
    of each group are shifted, and the three shifts sum to 0: known names stay known, new ones new.

    Args:
      ids: the token ids of HEADS, MIDDLES and TAILS, each in order.
      size: number of token ids.
    """
    moved = np.arange(size, dtype=np.int32)
    first, second = rng.integers(_CLASSES, size=2)
    for group, shift in zip(ids, (first, second, -first - second), strict=True):
        group = np.asarray(group, np.int32)
        for place in range(_CLASSES):
            moved[group[place::_CLASSES]] = rng.permutation(group[(place + shift) % _CLASSES :: _CLASSES])
    return moved

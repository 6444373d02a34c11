"""The few widths that work is padded to, so that a run compiles a handful of shapes and pads little."""

from __future__ import annotations

from collections.abc import Sequence


def buckets(most: int) -> tuple[int, ...]:
    """Quarters of `most`, in multiples of 16: four widths at the most, the last of them `most` itself."""
    return tuple(sorted({min(most, -(-most * part // 64) * 16) for part in (1, 2, 3, 4)}))


def pick(widths: Sequence[int], need: int) -> int:
    """The smallest width that holds `need`."""
    return next(w for w in widths if w >= need)

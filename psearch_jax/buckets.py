"""The few widths that work is padded to, so that a run compiles a handful of shapes and pads little."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 512  # of positions in a TPU's attention kernel, which runs slowly over rows that only smaller blocks divide


def buckets(most: int) -> tuple[int, ...]:
    """Quarters of `most`: four widths at the most, the last of them `most` itself.

    Below four blocks they are rounded up to multiples of 16, from there on to the nearest multiple of `BLOCK`.
    """
    if most < 4 * BLOCK:
        widths = (-(-most * part // 64) * 16 for part in (1, 2, 3, 4))
    else:
        widths = (round(most * part / (4 * BLOCK)) * BLOCK for part in (1, 2, 3))
    return tuple(sorted({min(most, width) for width in widths} | {most}))


def pick(widths: Sequence[int], need: int) -> int:
    """The smallest width that holds `need`."""
    return next(w for w in widths if w >= need)

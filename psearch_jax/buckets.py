"""The few widths that work is padded to, so that a run compiles a handful of shapes and pads little."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 512  # of positions in a TPU's attention kernel, which runs slowly over rows that only smaller blocks divide


def buckets(most: int, count: int = 4) -> tuple[int, ...]:
    """Parts of `most`, quarters by default: `count` widths at the most, the last of them `most` itself.

    Below four blocks they are rounded up to multiples of 16, from there on to the nearest multiple of `BLOCK`.
    """
    if most < 4 * BLOCK:
        widths = (-(-most * part // (16 * count)) * 16 for part in range(1, count + 1))
    else:
        widths = (max(1, round(most * part / (count * BLOCK))) * BLOCK for part in range(1, count))
    return tuple(sorted({min(most, width) for width in widths} | {most}))


def row_widths(longest: int, count: int = 4) -> tuple[int, ...]:
    """`buckets` for rows that trajectories share, as wide as the longest of them at least.

    From four blocks on the widest is a whole number of blocks, too: packing fills what that adds. On a TPU a width of
    6,196 positions moved a tenth more bytes than one of 6,656, by the compiler's count.
    """
    return buckets(longest + (-longest % BLOCK if longest >= 4 * BLOCK else 0), count)


def pick(widths: Sequence[int], need: int) -> int:
    """The smallest width that holds `need`."""
    return next(w for w in widths if w >= need)

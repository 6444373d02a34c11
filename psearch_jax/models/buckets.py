"""The widths that arrays are padded to: few, so that a run compiles few shapes, but enough to pad little."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 512  # positions per block of the TPU attention kernel, which is slow when only smaller blocks divide a row


def buckets(most: int, count: int = 4) -> tuple[int, ...]:
    """At most `count` evenly spaced widths up to `most`; the last one is `most` itself.

    For `most` below 4 * BLOCK they are rounded up to multiples of 16, otherwise to the nearest multiple of BLOCK.
    """
    if most < 4 * BLOCK:
        widths = (-(-most * part // (16 * count)) * 16 for part in range(1, count + 1))
    else:
        widths = (max(1, round(most * part / (count * BLOCK))) * BLOCK for part in range(1, count))
    return tuple(sorted({min(most, width) for width in widths} | {most}))


def row_widths(longest: int, count: int = 4) -> tuple[int, ...]:
    """`buckets` for packed rows, of which the widest holds at least the longest trajectory.

    From 4 * BLOCK on, the widest is also a multiple of BLOCK; packing fills the added positions. By the compiler's
    count for a TPU, a width of 6,196 positions moved a tenth more bytes than one of 6,656.
    """
    return buckets(longest + (-longest % BLOCK if longest >= 4 * BLOCK else 0), count)


def pick(widths: Sequence[int], need: int) -> int:
    """The smallest width that is at least `need`. Raises ValueError if there is none."""
    width = next((w for w in widths if w >= need), None)
    if width is None:
        raise ValueError(f"{need} positions found, accepted: at most {max(widths)}")
    return width

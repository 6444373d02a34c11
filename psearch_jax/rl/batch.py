"""Turns trajectories and advantages into batches and packed micro-batches."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from psearch_jax.models.buckets import pick
from psearch_jax.types import MicroBatch, TrainBatch, Trajectory


def make_batch(trajectories: Sequence[Trajectory], advantages: np.ndarray, context_tokens: int) -> TrainBatch:
    """Pads trajectories on the right to S = context_tokens. The trajectories give the mask; token ids never do.

    A `not_finite` trajectory keeps only its first token, masked: the trainer would likely compute a NaN or infinity on
    the rest, and 0 times that makes the gradient NaN. Its row stays: mini-batches and `constant_length` count rows.

    Args:
      advantages: [N], one per trajectory, assigned to each of its sampled tokens.
    """
    n, width = len(trajectories), context_tokens
    ids = np.zeros((n, width), np.int32)
    mask, logprobs = np.zeros((n, width), np.float32), np.zeros((n, width), np.float32)
    length = np.zeros(n, np.int32)
    for i, t in enumerate(trajectories):
        s = length[i] = len(t.ids) if t.status != "not_finite" else 1
        ids[i, :s] = t.ids[:s]
        if t.status != "not_finite":
            logprobs[i, :s], mask[i, :s] = t.logprobs, t.mask
    zeros = np.zeros((n, width), np.float32)
    per_token = mask * advantages[:, None].astype(np.float32)
    return TrainBatch(ids, length, mask, per_token, zeros, zeros, logprobs, values=zeros, returns=zeros)


def mini_batches(batch: TrainBatch, rollouts: int) -> list[TrainBatch]:
    """Splits a batch into mini-batches of `rollouts` rows, in order; the last may be shorter.

    Rows of a group are adjacent and `rollouts` is a multiple of the group size, so no group is split.
    """
    rows = np.arange(len(batch.length))
    return [select_rows(batch, rows[start : start + rollouts]) for start in rows[::rollouts]]


def select_rows(batch: TrainBatch, rows: np.ndarray) -> TrainBatch:
    """The rows of a batch at indices `rows`."""
    return TrainBatch(*(getattr(batch, name)[rows] for name in TrainBatch.__dataclass_fields__))


class Place(NamedTuple):
    """The position of a batch's trajectory in a micro-batch."""

    trajectory: int
    row: int
    start: int


def micro_batches(
    batch: TrainBatch, rows: int, widths: Sequence[int], per_row: int | None = None
) -> list[tuple[list[Place], MicroBatch]]:
    """Packs a batch into micro-batches of exactly `rows` rows, each as wide as one of `widths`, the widest first.

    Trajectory lengths vary severalfold, so short ones share a row. A bin-packing heuristic chooses the number and
    widths of the micro-batches. For each of `widths` as the minimum row width, best-fit packing gives a candidate. Its
    micro-batches are then narrowed or removed while everything still fits. The cheapest candidate wins.

    Args:
      per_row: maximum trajectories in a row; None: any number.
    """
    lengths = np.sort(batch.length[batch.length > 0])[::-1].tolist()
    max_per_row = per_row or 0  # 0: any number, and no need to count
    candidates = [
        _shrink(_open_rows(lengths, widths, min_width, rows, max_per_row), lengths, widths, rows, max_per_row)
        for min_width in widths
    ]
    # Rows of several widths were opened one at a time, so packing into all of them at once can fail. With rows of
    # one width it always succeeds.
    fitting = [candidate for candidate in candidates if _fit(lengths, candidate, rows, max_per_row) is not None]
    row_widths = min(fitting, key=lambda candidate: _cost(candidate, widths[-1]))
    order = [int(i) for i in np.argsort(-batch.length, kind="stable") if batch.length[i] > 0]
    bins = _fit(lengths, row_widths, rows, max_per_row)
    assert bins is not None, "the chosen widths were checked to fit"
    packed: list[list[Place]] = [[] for _ in row_widths]
    used: dict[int, int] = {}
    for i, at in zip(order, bins, strict=True):
        micro_batch, row = divmod(at, rows)
        packed[micro_batch].append(Place(i, row, used.get(at, 0)))
        used[at] = used.get(at, 0) + int(batch.length[i])
    return [(places, _pack(batch, places, rows, width)) for places, width in zip(packed, row_widths, strict=True)]


def padding(pieces: Sequence[tuple[list[Place], MicroBatch]]) -> float:
    """The share of the micro-batches' positions that are padding."""
    real, total = (sum(count(piece.segments) for _, piece in pieces) for count in (np.count_nonzero, np.size))
    return 1 - real / total if total else 0.0


def _cost(row_widths: Sequence[int], context: int) -> float:
    """Cost of micro-batches in positions: sum of w * (1 + w / (4 * context)), as attention adds up to a quarter."""
    return sum(width + width**2 / (4 * context) for width in row_widths)


def _open_rows(
    lengths: Sequence[int], widths: Sequence[int], min_width: int, rows: int, max_per_row: int
) -> list[int]:
    """Widths, widest first, of micro-batches that hold `lengths` (descending) in rows of at least `min_width`."""
    room: list[tuple[int, int]] = []  # of each open row its free positions and trajectories, by free positions
    opened = []
    for length in lengths:
        at = bisect.bisect_left(room, (length,))
        if at == len(room):
            opened.append(pick(widths, max(length, min_width)))
            free, shared = opened[-1], 0
        else:
            free, shared = room.pop(at)
        if not max_per_row or shared + 1 < max_per_row:
            bisect.insort(room, (free - length, shared + bool(max_per_row)))
    return sorted(opened, reverse=True)[::rows]


def _fit(lengths: Sequence[int], row_widths: Sequence[int], rows: int, max_per_row: int) -> list[int] | None:
    """Best fit: the row of each of `lengths` (descending), the fullest with room for it; None if one does not fit.

    Rows are numbered across the micro-batches, `rows` in each. `max_per_row` is the number of lengths that a row has
    room for (0: any number).
    """
    # As in `_open_rows`: of equally full rows, the one with fewer lengths.
    room = sorted((width, 0, row) for row, width in enumerate(width for width in row_widths for _ in range(rows)))
    out = []
    for length in lengths:
        at = bisect.bisect_left(room, (length,))
        if at == len(room):
            return None
        free, shared, row = room.pop(at)
        out.append(row)
        if not max_per_row or shared + 1 < max_per_row:
            bisect.insort(room, (free - length, shared + bool(max_per_row), row))
    return out


def _shrink(
    row_widths: list[int], lengths: Sequence[int], widths: Sequence[int], rows: int, max_per_row: int
) -> list[int]:
    """Narrows or removes micro-batches while all lengths fit, trying the largest savings first."""
    changes = sorted(((old - new, old, new) for old in widths for new in (0, *widths) if new < old), reverse=True)
    for _, old, new in changes:
        while old in row_widths:
            fewer = list(row_widths)
            fewer.remove(old)
            fewer = sorted([*fewer, new] if new else fewer, reverse=True)
            if sum(fewer) * rows < sum(lengths) or _fit(lengths, fewer, rows, max_per_row) is None:
                break
            row_widths = fewer
    return row_widths


def _pack(batch: TrainBatch, places: Sequence[Place], rows: int, width: int) -> MicroBatch:
    names = [name for name in TrainBatch.__dataclass_fields__ if name != "length"]
    out = {name: np.zeros((rows, width), getattr(batch, name).dtype) for name in names}
    segments, positions = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32)
    for i, row, start in places:
        n = int(batch.length[i])
        for name in names:
            out[name][row, start : start + n] = getattr(batch, name)[i, :n]
        segments[row, start : start + n] = segments[row].max() + 1
        positions[row, start : start + n] = np.arange(n)
    return MicroBatch(segments=segments, positions=positions, **out)

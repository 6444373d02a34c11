"""Trajectories and advantages to the arrays that `update` reads."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from psearch_jax.buckets import pick
from psearch_jax.types import Packed, TrainBatch, Trajectory


def make_batch(
    trajectories: Sequence[Trajectory], advantages: np.ndarray, context_tokens: int, train_unfinished: bool = True
) -> TrainBatch:
    """Pads trajectories on the right to S = context_tokens; the mask comes with them and is never guessed from ids.

    Of a trajectory that ended as `not_finite` only the first id is kept, masked: what it computed is likely not finite
    for the trainer either, and 0 times that would spoil the gradient of all. It stays a row, as rows are counted.

    Args:
      advantages: [N] one per trajectory, spread over its sampled ids.
      train_unfinished: False masks trajectories that did not end with an answer.
    """
    n, width = len(trajectories), context_tokens
    ids = np.zeros((n, width), np.int32)
    mask, logprobs = np.zeros((n, width), np.float32), np.zeros((n, width), np.float32)
    length = np.zeros(n, np.int32)
    for i, t in enumerate(trajectories):
        s = length[i] = len(t.ids) if t.status != "not_finite" else 1
        ids[i, :s] = t.ids[:s]
        if t.status == "not_finite":
            continue
        logprobs[i, :s] = t.logprobs
        if train_unfinished or t.status == "answered":
            mask[i, :s] = t.mask
    zeros = np.zeros((n, width), np.float32)
    spread = mask * advantages[:, None].astype(np.float32)
    return TrainBatch(ids, length, mask, spread, zeros, zeros, logprobs, values=zeros, returns=zeros)


def mini_batches(batch: TrainBatch, rollouts: int) -> list[TrainBatch]:
    """Cuts a batch into pieces of `rollouts` rows, in order; the last may be shorter.

    Rows of a group stand together and `rollouts` is a multiple of the group's size, so no group is cut.
    """
    return [take_rows(batch, np.arange(i, min(i + rollouts, len(batch.length)))) for i in _starts(batch, rollouts)]


class Place(NamedTuple):
    """Where a trajectory of a batch lies in a micro-batch."""

    trajectory: int
    row: int
    start: int


def micro_batches(
    batch: TrainBatch, rows: int, widths: Sequence[int], together: bool = True
) -> list[tuple[list[Place], Packed]]:
    """Cuts a batch into micro-batches of exactly `rows` rows, each as wide as one of `widths`.

    Trajectories of one batch differ in length by factors, so short ones share a row. How many micro-batches of which
    widths that takes is found by trying, as bins to be packed: from what it takes when no row is narrower than each of
    `widths`, a micro-batch is made narrower or left out for as long as everything still finds room. What then costs
    least is taken. The widest come first.

    Args:
      together: a row may hold several trajectories; else each has a row of its own.
    """
    n = np.sort(batch.length[batch.length > 0])[::-1].tolist()
    if not together:
        taken = [pick(widths, length) for length in n[::rows]]
    else:
        tried = [_shrunk(_opened(n, widths, least, rows), n, widths, rows) for least in widths]
        # Rows of several widths, opened as they were needed, may not hold what is packed into all of them at once;
        # rows of one width always do.
        tried = [taken for taken in tried if _fitted(n, taken, rows) is not None]
        taken = min(tried, key=lambda taken: _cost(taken, widths[-1]))
    order = [int(i) for i in np.argsort(-batch.length, kind="stable") if batch.length[i] > 0]
    if together:
        bins = _fitted(n, taken, rows)
        assert bins is not None, "they found room when the widths were chosen"
    else:
        bins = list(range(len(n)))
    places: list[list[Place]] = [[] for _ in taken]
    used: dict[int, int] = {}
    for i, at in zip(order, bins, strict=True):
        piece, row = divmod(at, rows)
        places[piece].append(Place(i, row, used.get(at, 0)))
        used[at] = used.get(at, 0) + int(batch.length[i])
    return [(some, _packed(batch, some, rows, width)) for some, width in zip(places, taken, strict=True)]


def padding(pieces: Sequence[tuple[list[Place], Packed]]) -> float:
    """The share of the positions of micro-batches that hold no real id."""
    real, all_of_them = (sum(count(piece.segments) for _, piece in pieces) for count in (np.count_nonzero, np.size))
    return 1 - real / max(all_of_them, 1)


def _cost(taken: Sequence[int], context: int) -> float:
    """What micro-batches cost, in positions: attention makes those of long rows up to a quarter dearer."""
    return sum(width + width**2 / (4 * context) for width in taken)


def _opened(n: Sequence[int], widths: Sequence[int], least: int, rows: int) -> list[int]:
    """The widths of micro-batches that hold falling lengths when no row is narrower than `least`, the widest first."""
    room: list[int] = []  # what is left of each open row, rising
    opened = []
    for length in n:
        at = bisect.bisect_left(room, length)
        if at == len(room):
            opened.append(pick(widths, max(length, least)))
            bisect.insort(room, opened[-1] - length)
        else:
            bisect.insort(room, room.pop(at) - length)
    return sorted(opened, reverse=True)[::rows]


def _fitted(n: Sequence[int], taken: Sequence[int], rows: int) -> list[int] | None:
    """The row of each of falling lengths, in the fullest with room for it; None when one finds no room.

    Rows are counted through the micro-batches, `rows` in each.
    """
    room = sorted((width, row) for row, width in enumerate(width for width in taken for _ in range(rows)))
    out = []
    for length in n:
        at = bisect.bisect_left(room, (length,))
        if at == len(room):
            return None
        left, row = room.pop(at)
        bisect.insort(room, (left - length, row))
        out.append(row)
    return out


def _shrunk(taken: list[int], n: Sequence[int], widths: Sequence[int], rows: int) -> list[int]:
    """Micro-batches made narrower, or left out, for as long as all lengths find room: by the most positions first."""
    changes = sorted(((old - new, old, new) for old in widths for new in (0, *widths) if new < old), reverse=True)
    for _, old, new in changes:
        while old in taken:
            fewer = list(taken)
            fewer.remove(old)
            fewer = sorted([*fewer, new] if new else fewer, reverse=True)
            if sum(fewer) * rows < sum(n) or _fitted(n, fewer, rows) is None:
                break
            taken = fewer
    return taken


def _packed(batch: TrainBatch, places: Sequence[Place], rows: int, width: int) -> Packed:
    moved = [name for name in TrainBatch.__dataclass_fields__ if name != "length"]
    out = {name: np.zeros((rows, width), getattr(batch, name).dtype) for name in moved}
    segments, positions = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32)
    for i, row, start in places:
        n = int(batch.length[i])
        for name in moved:
            out[name][row, start : start + n] = getattr(batch, name)[i, :n]
        segments[row, start : start + n] = segments[row].max() + 1
        positions[row, start : start + n] = np.arange(n)
    return Packed(segments=segments, positions=positions, **out)


def take_rows(batch: TrainBatch, places: np.ndarray) -> TrainBatch:
    """The rows at `places`."""
    return TrainBatch(*(getattr(batch, name)[places] for name in TrainBatch.__dataclass_fields__))


def _starts(batch: TrainBatch, size: int) -> range:
    return range(0, len(batch.length), size)

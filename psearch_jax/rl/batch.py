"""Trajectories and advantages to the arrays that `update` reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psearch_jax.buckets import pick
from psearch_jax.types import TrainBatch, Trajectory


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
    return TrainBatch(ids, length, mask, mask * advantages[:, None].astype(np.float32), zeros, zeros, logprobs)


def mini_batches(batch: TrainBatch, rollouts: int) -> list[TrainBatch]:
    """Cuts a batch into pieces of `rollouts` rows, in order; the last may be shorter.

    Rows of a group stand together and `rollouts` is a multiple of the group's size, so no group is cut.
    """
    return [take_rows(batch, np.arange(i, min(i + rollouts, len(batch.length)))) for i in _starts(batch, rollouts)]


def micro_batches(batch: TrainBatch, rows: int, widths: Sequence[int]) -> list[tuple[np.ndarray, TrainBatch]]:
    """Cuts a batch into pieces of exactly `rows` rows of like length, each padded to the smallest width that holds it.

    Long and short trajectories differ by factors; padding all to the longest would spend most of the time on nothing.

    Returns:
      (the rows' places in `batch`, the piece) for each piece; the last piece is filled up with empty rows.
    """
    order = np.argsort(batch.length, kind="stable")
    pieces = []
    for i in _starts(batch, rows):
        places = order[i : i + rows]
        width = pick(widths, batch.length[places].max(initial=1))
        pieces.append((places, take_rows(batch, places, rows, width)))
    return pieces


def take_rows(batch: TrainBatch, places: np.ndarray, rows: int | None = None, width: int | None = None) -> TrainBatch:
    """The rows at `places`, filled up with empty ones (length 0, mask 0) to `rows`, cut to `width` positions."""
    extra = (rows or len(places)) - len(places)

    def one(a: np.ndarray) -> np.ndarray:
        a = a[places] if a.ndim == 1 else a[places, :width]
        return np.concatenate([a, np.zeros((extra, *a.shape[1:]), a.dtype)]) if extra else a

    return TrainBatch(*(one(getattr(batch, name)) for name in TrainBatch.__dataclass_fields__))


def _starts(batch: TrainBatch, size: int) -> range:
    return range(0, len(batch.length), size)

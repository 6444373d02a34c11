"""Trajectories and advantages to the arrays that `update` reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psearch_jax.types import TrainBatch, Trajectory


def length_bucket(longest: int, context_tokens: int) -> int:
    """The padded length of a batch: half of the context if that is enough, else all of it (two shapes in a run)."""
    half = -(-context_tokens // 32) * 16
    return half if longest <= half else context_tokens


def make_batch(
    trajectories: Sequence[Trajectory], advantages: np.ndarray, context_tokens: int, train_unfinished: bool = True
) -> TrainBatch:
    """Pads trajectories on the right; the loss mask comes with them and is never guessed from ids.

    Args:
      advantages: [N] one per trajectory, spread over its sampled ids.
      train_unfinished: False masks trajectories that did not end with an answer.
    """
    width = length_bucket(max(len(t.ids) for t in trajectories), context_tokens)
    n = len(trajectories)
    ids = np.zeros((n, width), np.int32)
    mask, logprobs = np.zeros((n, width), np.float32), np.zeros((n, width), np.float32)
    length = np.zeros(n, np.int32)
    for i, t in enumerate(trajectories):
        s = length[i] = len(t.ids)
        ids[i, :s] = t.ids
        logprobs[i, :s] = t.logprobs
        if train_unfinished or t.status == "answered":
            mask[i, :s] = t.mask
    zeros = np.zeros((n, width), np.float32)
    return TrainBatch(ids, length, mask, mask * advantages[:, None].astype(np.float32), zeros, zeros, logprobs)


def pad_rows(batch: TrainBatch, rows: int) -> TrainBatch:
    """Adds empty rows (length 0, mask 0) up to `rows`."""
    extra = rows - len(batch.length)
    return TrainBatch(
        *(
            np.concatenate([a, np.zeros((extra, *a.shape[1:]), a.dtype)]) if extra else a
            for a in (getattr(batch, f) for f in TrainBatch.__dataclass_fields__)
        )
    )


def mini_batches(batch: TrainBatch, rollouts: int) -> list[TrainBatch]:
    """Cuts a batch into pieces of `rollouts` rows, in order; the last one is padded with empty rows.

    Rows of a group stand together and `rollouts` is a multiple of the group's size, so no group is cut.
    """
    n = -(-len(batch.length) // rollouts) * rollouts
    whole = pad_rows(batch, n)
    fields = TrainBatch.__dataclass_fields__
    return [TrainBatch(*(getattr(whole, f)[i : i + rollouts] for f in fields)) for i in range(0, n, rollouts)]

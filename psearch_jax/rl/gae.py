"""Rewards of single trajectories to advantages of their sampled ids, by a critic's values (PPO, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-8


def token_rewards(
    totals: np.ndarray, mask: np.ndarray, old: np.ndarray, ref: np.ndarray, kl_coefficient: float
) -> np.ndarray:
    """The reward of every sampled id: what the trajectory earned at its last one, less a price for the KL at each.

    The price of an id is `kl_coefficient * (old - ref)` (arXiv 2203.02155 section 3.5).

    Args:
      totals: [N], of the trajectories.
      mask: [N, S], 1 where an id was sampled.
      old, ref: [N, S] log-probs by policy and reference.

    Returns:
      [N, S] float64; 0 where the mask is, and nothing for a trajectory without a sampled id.
    """
    out = np.where(mask > 0, -kl_coefficient * (old.astype(np.float64) - ref), 0.0)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1] > 0, axis=1)
    rows = np.flatnonzero(mask.any(axis=1))
    out[rows, last[rows]] += np.asarray(totals, np.float64)[rows]
    return out


def advantages(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimates (arXiv 1506.02438 eq. 16) and the returns that the critic is to learn.

    Only sampled ids are moves: whatever stands between two of them, a passage say, is part of the one transition from
    the first to the second, and its length discounts nothing. Behind the last one nothing is to come, for a trajectory
    that was cut as for one that ended.

    Args:
      rewards, values: [N, S]; read where the mask is 1. The value of an id is that of what stands before it.
      mask: [N, S].

    Returns:
      [N, S] float32 advantages, not whitened, and [N, S] float32 returns, the advantage plus the value; 0 where the
      mask is.
    """
    sampled = mask > 0
    order = np.argsort(~sampled, axis=1, kind="stable")  # of each row the sampled ids first, in their order
    there = np.take_along_axis(sampled, order, axis=1)
    r, v = (np.where(there, np.take_along_axis(x.astype(np.float64), order, axis=1), 0.0) for x in (rewards, values))
    found = np.zeros_like(r)
    following = value = np.zeros(len(r))  # advantage and value of the next sampled id
    for k in reversed(range(int(there.sum(axis=1).max(initial=0)))):
        following = np.where(there[:, k], r[:, k] + gamma * value - v[:, k] + gamma * gae_lambda * following, 0.0)
        found[:, k], value = following, v[:, k]
    out, returns = np.zeros_like(r), np.zeros_like(r)
    np.put_along_axis(out, order, found, axis=1)
    np.put_along_axis(returns, order, np.where(there, found + v, 0.0), axis=1)
    return out.astype(np.float32), returns.astype(np.float32)


def whitened(advantages: np.ndarray, mask: np.ndarray, tasks: Sequence[str]) -> np.ndarray:
    """Advantages with mean 0 and variance 1 over the sampled ids of each task.

    Where tasks pay unlike, all in one would teach what pays most, at the cost of what pays little; apart they weigh
    alike, as arXiv 1809.04474 has it of the values of several games. Of a task with one row nothing is left but how
    its ids differ.

    Args:
      advantages, mask: [N, S].
      tasks: N names, of the rows.

    Returns:
      [N, S] float32; 0 where the mask is.
    """
    out = np.zeros_like(advantages, np.float32)
    for task in np.unique(tasks):
        sampled = (mask > 0) & (np.asarray(tasks) == task)[:, None]
        own = advantages[sampled].astype(np.float64)
        if own.size:
            out[sampled] = (own - own.mean()) / np.sqrt(own.var() + EPSILON)
    return out


def explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """The share of the variance of the returns that the values tell: 1 all of it, 0 no more than a constant would."""
    told, came = (x[mask > 0].astype(np.float64) for x in (values, returns))
    spread = came.var() if came.size else 0.0
    return float(1 - (came - told).var() / spread) if spread > 0 else float("nan")

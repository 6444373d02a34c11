"""Per-token advantages of sampled tokens from rewards and a critic's values (PPO, arXiv 1707.06347)."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-8


def token_rewards(
    totals: np.ndarray, mask: np.ndarray, old: np.ndarray, ref: np.ndarray, kl_coefficient: float
) -> np.ndarray:
    """Reward per sampled token: the trajectory's total at its last one, minus a KL penalty at each.

    The penalty of a token is `kl_coefficient * (old - ref)` (arXiv 2203.02155 section 3.5).

    Args:
      totals: [N], the rewards of the trajectories.
      mask: [N, S], 1 where a token was sampled.
      old, ref: [N, S] log-probs of the old policy and the reference.

    Returns:
      [N, S] float64; 0 where the mask is 0. A trajectory without sampled tokens gets no reward.
    """
    out = np.where(mask > 0, -kl_coefficient * (old.astype(np.float64) - ref), 0.0)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1] > 0, axis=1)
    rows = np.flatnonzero(mask.any(axis=1))
    out[rows, last[rows]] += np.asarray(totals, np.float64)[rows]
    return out


def estimate_advantages(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (arXiv 1506.02438 eq. 16, undiscounted) and returns, as the critic's targets.

    Only sampled tokens are actions. Tokens between two of them, such as a passage, are part of the one transition from
    the first to the second. The value after the last sampled token is 0, even for a truncated trajectory.

    Args:
      rewards, values: [N, S]; used where the mask is 1. The value at a token is that of the prefix before it.
      mask: [N, S].

    Returns:
      [N, S] float32 advantages, not whitened, and [N, S] float32 returns (advantage + value); both 0 where the mask is
      0.
    """
    sampled = mask > 0
    order = np.argsort(~sampled, axis=1, kind="stable")  # per row, the sampled tokens first, in their order
    valid = np.take_along_axis(sampled, order, axis=1)
    r, v = (np.where(valid, np.take_along_axis(x.astype(np.float64), order, axis=1), 0.0) for x in (rewards, values))
    ordered = np.zeros_like(r)
    following = value = np.zeros(len(r))  # advantage and value at the next sampled token
    for k in reversed(range(int(valid.sum(axis=1).max(initial=0)))):
        following = np.where(valid[:, k], r[:, k] + value - v[:, k] + gae_lambda * following, 0.0)
        ordered[:, k], value = following, v[:, k]
    out, returns = np.zeros_like(r), np.zeros_like(r)
    np.put_along_axis(out, order, ordered, axis=1)
    np.put_along_axis(returns, order, np.where(valid, ordered + v, 0.0), axis=1)
    return out.astype(np.float32), returns.astype(np.float32)


def whiten(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Normalises advantages to mean 0 and variance 1 over the sampled tokens.

    Args:
      advantages, mask: [N, S].

    Returns:
      [N, S] float32; 0 where the mask is 0.
    """
    out, sampled = np.zeros_like(advantages, np.float32), mask > 0
    values = advantages[sampled].astype(np.float64)
    if values.size:
        out[sampled] = (values - values.mean()) / np.sqrt(values.var() + EPSILON)
    return out


def explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask; NaN if the returns are constant or there are none."""
    predicted, actual = (x[mask > 0].astype(np.float64) for x in (values, returns))
    variance = actual.var() if actual.size else 0.0
    return float(1 - (actual - predicted).var() / variance) if variance > 0 else float("nan")

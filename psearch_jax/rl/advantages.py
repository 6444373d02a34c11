"""Group-relative advantages (GRPO, arXiv 2402.03300 section 4.1)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

EPSILON = 1e-6
AdvantageMethod = Literal["std", "mean", "leave_one_out"]


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    method: AdvantageMethod = "std",
    valid: Sequence[bool] | None = None,
) -> np.ndarray:
    """Advantage of each rollout within its group.

    `std`: (r - mean) / (std + 1e-6), std with ddof 1; `mean`: r - mean (arXiv 2503.20783); `leave_one_out`: r minus
    the mean of the group's other rewards (RLOO, arXiv 2402.14740). Groups of one and groups of equal rewards get 0.

    Args:
      rewards: N scalars.
      groups: N keys, (source, id) of the question, so that equal ids in two data sets do not collide.
      valid: N; an invalid rollout gets 0 and does not count towards its group's baseline. Default: all are valid.

    Returns:
      [N] float32.
    """
    rewards = np.asarray(rewards, np.float64)
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        if valid is None or valid[i]:
            members.setdefault(group, []).append(i)
    out = np.zeros(len(rewards), np.float64)
    for rows in members.values():
        r = rewards[rows]
        if len(r) == 1 or np.ptp(r) < 1e-9:  # rewards that differ only by rounding carry no signal
            continue
        centred = r - r.mean()
        if method == "std":
            out[rows] = centred / (r.std(ddof=1) + EPSILON)
        elif method == "leave_one_out":
            out[rows] = centred * len(r) / (len(r) - 1)
        else:
            out[rows] = centred
    return out.astype(np.float32)


def carry_signal(advantages: np.ndarray, samples: int) -> np.ndarray:
    """[groups] bool, whether a group has a nonzero advantage: its rewards were not all equal.

    Args:
      advantages: [N], those of a group adjacent.
      samples: the size of a group.
    """
    return (advantages.reshape(-1, samples) != 0).any(axis=1)


def trained_rows(advantages: np.ndarray, samples: int, count: int) -> np.ndarray:
    """The rows of `count` groups, in their order: the first with a signal, then as needed the first without one.

    Args:
      advantages: [N], those of a group adjacent.
      samples: the size of a group.
    """
    chosen = np.sort(np.argsort(~carry_signal(advantages, samples), kind="stable")[:count])
    return (chosen[:, None] * samples + np.arange(samples)).ravel()

"""What happened in one batch of rollouts, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psearch_jax.metrics import mean
from psearch_jax.text.answers import exact_match, normalise
from psearch_jax.types import END_STATUSES, KINDS, RewardParts, Trajectory


def rollout_metrics(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[RewardParts],
    groups: Sequence[Any],
    advantages: np.ndarray,
    logprobs: np.ndarray,
) -> dict[str, float]:
    """What happened in one batch of rollouts: behaviour by kind, reward parts by (kind, split or whole), alarms.

    Args:
      logprobs: [N, S] by the trainer.
    """
    out: dict[str, float] = {}
    n = len(trajectories)
    parts = RewardParts.__dataclass_fields__
    right = [exact_match(t.answer, t.question.answers) for t in trajectories]
    for kind in KINDS:
        rows = [i for i in range(n) if trajectories[i].question.kind == kind]
        if not rows:
            continue
        out[f"em/{kind}"] = mean(right[i] for i in rows)
        out[f"decomposition/{kind}"] = mean(trajectories[i].decomposed for i in rows)
        out[f"searches/{kind}"] = mean(len(trajectories[i].executed) for i in rows)
        out[f"turns/{kind}"] = mean(trajectories[i].model_calls for i in rows)
        for name, split in (("split", True), ("whole", False)):
            some = [i for i in rows if trajectories[i].decomposed == split]
            out |= {f"reward/{kind}/{name}/{part}": mean(getattr(rewards[i], part) for i in some) for part in parts}
    out["valid_format"] = mean(t.well_formed for t in trajectories)
    for status in END_STATUSES:
        out[f"status/{status}"] = mean(t.status == status for t in trajectories)
    silent: dict[Any, bool] = {}
    for group, advantage in zip(groups, advantages, strict=True):
        silent[group] = silent.get(group, True) and advantage == 0
    out["groups_without_signal"] = mean(silent.values())
    out["ids_per_trajectory"] = mean(len(t.ids) for t in trajectories)
    correct = [i for i in range(n) if right[i] and trajectories[i].mask.any()]
    out["logprob_of_correct"] = mean(
        logprobs[i, : len(trajectories[i].mask)][trajectories[i].mask].mean() for i in correct
    )
    seen = [i for i in range(n) if _saw_answer(trajectories[i])]
    out["wrong_though_seen"] = mean(not right[i] for i in seen)
    return out


def _saw_answer(trajectory: Trajectory) -> bool:
    golds = [normalise(a) for a in trajectory.question.answers]
    texts = [normalise(p.title + " " + p.text) for t in trajectory.turns for found in t.passages for p in found]
    return any(g and f" {g} " in f" {text} " for g in golds for text in texts)

"""The metrics of a training step, from what the step produced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from psearch_jax.rl.advantages import carry_signal
from psearch_jax.rl.gae import explained_variance
from psearch_jax.runtime.metrics import WEIGHT, Ratio, mean
from psearch_jax.text.answers import exact_match
from psearch_jax.text.evidence import find_support
from psearch_jax.train.critic import CRITIC
from psearch_jax.train.rollouts import Rollouts
from psearch_jax.train.run import Run
from psearch_jax.types import END_STATUSES, KINDS, RewardParts, TrainBatch, Trajectory


def step_metrics(
    run: Run,
    step: int,
    rollouts: Rollouts,
    batch: TrainBatch,
    updates: Sequence[Mapping[str, float]],
    times: Mapping[str, float],
) -> dict[str, float]:
    """All metrics of a step. Scripted rollouts count in those of the updates and of the groups only.

    Args:
      batch: the rows that were learned from, with values and returns if there is a critic.
      updates: the metrics of each optimizer step.
      times: the seconds of each phase.
    """
    config, sampled = run.config, [i for i, t in enumerate(rollouts.trajectories) if not t.scripted]
    trajectories, rewards = [rollouts.trajectories[i] for i in sampled], [rollouts.rewards[i] for i in sampled]
    metrics = over_updates(updates)
    if run.critic is not None:
        metrics[f"{CRITIC}explained_variance"] = explained_variance(batch.values, batch.returns, batch.mask)
    if config.train.staleness:
        metrics |= staleness(trajectories, step)
    metrics |= rollout_metrics(trajectories, rewards, rollouts.advantages, config.rollout.samples)
    metrics |= {"reward": mean(parts.total for parts in rewards), "draws": len(rollouts.draws)}
    if len(sampled) < len(rollouts.trajectories):
        metrics["scripted"] = 1 - len(sampled) / len(rollouts.trajectories)
    metrics |= {f"{name}_s": value for name, value in times.items()}
    if run.recording is None:
        metrics |= rollouts.usage.metrics()
        if not config.train.staleness:
            metrics["sampled_tokens_per_s"] = sum(int(t.mask.sum()) for t in trajectories) / times["rollout"]
    return metrics


def rollout_metrics(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[RewardParts],
    advantages: np.ndarray,
    samples: int,
) -> dict[str, float]:
    """Behaviour by question kind, reward terms by (kind, split or not), format, end status and group signal.

    Args:
      trajectories, rewards: N of each.
      advantages: of complete groups, which may also have scripted rollouts; those of a group adjacent.
      samples: the size of a group.
    """
    out: dict[str, float] = {}
    n = len(trajectories)
    right = [exact_match(t.answer, t.question.answers) for t in trajectories]
    for kind in KINDS:
        rows = [i for i in range(n) if trajectories[i].question.kind == kind]
        if not rows:
            continue
        out[f"em/{kind}"] = mean(right[i] for i in rows)
        out[f"split/{kind}"] = mean(trajectories[i].decomposed for i in rows)
        out[f"searches/{kind}"] = mean(len(trajectories[i].executed) for i in rows)
        out[f"turns/{kind}"] = mean(trajectories[i].model_calls for i in rows)
        for name, split in (("split", True), ("not_split", False)):
            chosen = [i for i in rows if trajectories[i].decomposed == split]
            for term in rewards[rows[0]].terms:
                out[f"reward/{kind}/{name}/{term}"] = mean(rewards[i].terms[term] for i in chosen)
    counts = [len(t.executed) for t in trajectories]
    out |= {f"searched_{n}": mean(count == n for count in counts) for n in range(4)}
    out["searched_4_or_more"] = mean(count >= 4 for count in counts)
    out["valid_format"] = mean(t.well_formed for t in trajectories)
    for status in END_STATUSES:
        out[f"status/{status}"] = mean(t.status == status for t in trajectories)
    if samples > 1:
        out["groups_without_signal"] = mean(~carry_signal(advantages, samples))
    out["tokens_per_trajectory"] = mean(len(t.ids) for t in trajectories)
    correct = [i for i in range(n) if right[i] and trajectories[i].mask.any()]
    out["logprob_of_correct"] = mean(trajectories[i].logprobs[trajectories[i].mask].mean() for i in correct)
    seen = [i for i in range(n) if find_support(trajectories[i].turns, trajectories[i].question.answers)]
    out["wrong_though_seen"] = mean(not right[i] for i in seen)
    return out


def staleness(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """The age, in steps, of the weights that sampled the tokens of a step, and the share of continued rollouts."""
    ages = np.concatenate([step - token_versions(t)[t.mask] for t in trajectories])
    counts, tokens = np.bincount(ages, minlength=1).tolist(), len(ages)
    shares = {f"staleness/{age}": Ratio(count, tokens).value for age, count in enumerate(counts)}
    continued = mean(len(t.versions) > 1 for t in trajectories)
    return {"staleness": Ratio(int(ages.sum()), tokens).value, "continued": continued, **shares}


def token_versions(trajectory: Trajectory) -> np.ndarray:
    """[S] int64, the version of the weights that sampled each token; before the first sampled token the first one."""
    starts, versions = zip(*(trajectory.versions or ((0, 0),)), strict=True)
    return np.asarray(versions)[np.maximum(np.searchsorted(starts, np.arange(len(trajectory.ids)), "right") - 1, 0)]


def learns_policy(run: Run, step: int) -> bool:
    """Whether a step trains the policy, and not only the critic."""
    return run.critic is None or step >= run.config.critic.pretrain_steps


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of a step's updates: means by their counts, but sums or the worst update for failures."""

    def combine(name: str) -> float:
        tokens = (CRITIC if name.startswith(CRITIC) else "") + WEIGHT
        weights = [u.get(f"{name}/{WEIGHT}", u[tokens]) for u in updates]
        counted = [(u[name], weight) for u, weight in zip(updates, weights, strict=True) if weight]
        if not counted:
            return mean([u[name] for u in updates])
        return Ratio(sum(value * weight for value, weight in counted), sum(weights)).value

    metrics = {name: combine(name) for name in updates[0] if not name.endswith(WEIGHT)}
    if "importance" in metrics:
        # As a share of the tokens (Kish): (sum of weights)^2 / (number x sum of their squares).
        square = metrics.pop("importance_squared")
        metrics["effective_sample_size"] = metrics.pop("importance") ** 2 / square if square else math.nan
    for who in ("", CRITIC):
        if f"{who}loss" not in metrics:
            continue
        metrics[f"{who}skipped"] = sum(u[f"{who}skipped"] for u in updates)
        worst = max(updates, key=lambda u: u[f"{who}nonfinite_in_a_row"])  # noqa: B023  a finite update resets the count
        metrics |= {f"{who}{name}": worst[f"{who}{name}"] for name in ("nonfinite_in_a_row", "nonfinite_param")}
        metrics[f"{who}learning_rate"] = updates[-1][f"{who}learning_rate"]
    return metrics

"""One training step: rollouts, rewards, advantages, log-probs, one optimizer step per mini-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from psearch_jax.rl import gae
from psearch_jax.rl.batch import make_batch, mini_batches
from psearch_jax.runtime.metrics import mean
from psearch_jax.train.checkpointing.preemption import HostCopy, Interrupted
from psearch_jax.train.monitoring.alarms import probe
from psearch_jax.train.monitoring.figures import rollout_metrics, update_peak_share
from psearch_jax.train.rollouts import draw, learned_rows
from psearch_jax.train.run import Run
from psearch_jax.train.state import TrainState
from psearch_jax.types import Kind, Question, RewardParts, TrainBatch, Trajectory

CRITIC = "critic/"  # prefix of the critic's metrics


def train_step(
    run: Run, questions: Sequence[Question], step: int
) -> tuple[TrainState, dict[str, float], list[Trajectory], list[RewardParts]]:
    """One step of GRPO or PPO.

    Args:
      questions: those of this process.

    Returns:
      State, metrics, and the trajectories and rewards of all processes. Every process returns the same.
    """
    config = run.config
    times: dict[str, float] = {}
    rollouts = draw(run, questions, step, times)
    probe_metrics = {}
    if _is_probed(run, step):
        with run.phase("probe", times):
            probe_metrics = probe(run, questions, step, rollouts.trajectories)
    with run.phase("reward", times):
        rows = learned_rows(rollouts.advantages, config.rollout.samples, config.train.prompts)
        learned = [rollouts.trajectories[i] for i in rows]
        train_all = config.rollout.unfinished != "mask"
        batch = make_batch(learned, rollouts.advantages[rows], config.rollout.context_tokens, train_all)
    with run.phase("logprobs", times):
        kinds = [t.question.kind for t in learned]
        batch, metrics = _scored(run, batch, np.asarray(rollouts.totals)[rows], kinds)
    with run.phase("update", times):
        state, updates = _update(run, mini_batches(batch, config.learning.mini_batch_rollouts), step)
    sampled = sum(int(t.mask.sum()) for t in rollouts.trajectories)
    metrics = _over_updates(updates) | metrics | probe_metrics
    metrics |= rollout_metrics(rollouts.trajectories, rollouts.rewards, rollouts.advantages, config.rollout.samples)
    metrics |= {"reward": mean(rollouts.totals), "draws": rollouts.draws}
    metrics |= {f"{name}_s": value for name, value in times.items()}
    metrics |= rollouts.usage.metrics()
    metrics["sampled_tokens_per_s"] = sampled / times["rollout"]
    metrics["trained_tokens_per_s"] = float(batch.length.sum()) / (times["logprobs"] + times["update"])
    trained = _policy_learns(run, step), run.critic is not None
    share = update_peak_share(config, run.model, batch, times["update"], *trained)
    metrics |= {"update_peak_share": share} if share else {}
    return state, metrics, rollouts.trajectories, rollouts.rewards


def bad_in_a_row(metrics: Mapping[str, float]) -> int:
    """Consecutive updates that were not finite: the maximum over policy and critic."""
    return int(max(metrics.get(f"{who}bad_in_a_row", 0) for who in ("", CRITIC)))


def first_nonfinite_param(run: Run, metrics: Mapping[str, float]) -> str:
    """The first parameter whose gradient was not finite in the updates that produced `metrics`."""
    if run.critic is None or metrics.get("bad_in_a_row", 0) >= metrics[f"{CRITIC}bad_in_a_row"]:
        return run.learner.first_nonfinite_param(metrics)
    return CRITIC + run.critic.first_nonfinite_param({"bad_gradient": metrics[f"{CRITIC}bad_gradient"]})


def _policy_learns(run: Run, step: int) -> bool:
    return run.critic is None or step >= run.config.critic.pretrain_steps


def _is_probed(run: Run, step: int) -> bool:
    every = run.config.alarms.probe_every_steps
    return every > 0 and (step + 1) % every == 0 and run.collector.retriever is not None


def _scored(
    run: Run, batch: TrainBatch, totals: np.ndarray, kinds: Sequence[Kind]
) -> tuple[TrainBatch, dict[str, float]]:
    """Adds the log-probs that the loss needs and, with a critic, values, returns and advantages.

    Returns:
      The completed batch and the critic's metrics.
    """
    learning, look = run.config.learning, run.stop.watch()
    if run.learner.needs_score:
        batch = replace(batch, old_logprobs=run.learner.score(run.state.params, batch, look))
    if run.reference is not None:
        batch = replace(batch, ref_logprobs=run.learner.reference_score(run.reference, batch, look))
    if run.critic is None:
        return batch, {}
    values = run.critic.score(run.state.critic.params, batch, look)
    old = batch.sampler_logprobs if learning.old_logprobs == "sampler" else batch.old_logprobs
    kl_coefficient = learning.kl_coefficient if learning.kl_in == "reward" else 0.0
    rewards = gae.token_rewards(totals, batch.mask, old, batch.ref_logprobs, kl_coefficient)
    raw, returns = gae.advantages(rewards, values, batch.mask, learning.gamma, learning.gae_lambda)
    tasks = kinds if learning.whiten == "kind" else [""] * len(kinds)
    advantage = gae.whitened(raw, batch.mask, tasks)
    explained = gae.explained_variance(values, returns, batch.mask)
    batch = replace(batch, advantage=advantage, values=values, returns=returns)
    return batch, {f"{CRITIC}explained_variance": explained}


def _update(run: Run, pieces: Sequence[TrainBatch], step: int) -> tuple[TrainState, list[dict[str, float]]]:
    """Takes one optimizer step per mini-batch, the critic first. Returns the state and the metrics of each step.

    The first optimizer step donates the arrays of `run.state`. A stop request takes effect between micro-batches.
    `run.state` is then restored from its copy in host memory, or set to None if there is no copy.
    """
    state, metrics, look = run.state, [], run.stop.watch()
    policy = critic = None
    copy = HostCopy(state) if run.keeps_copy and (len(pieces) > 1 or run.critic) else None
    begun = False
    try:
        for piece in pieces:
            values: dict[str, float] = {}
            if run.critic is not None:
                critic, update_metrics = run.critic.update(state.critic, piece, look)
                state, begun = replace(state, critic=critic), True
                values |= {CRITIC + name: value for name, value in update_metrics.items()}
            if _policy_learns(run, step):
                policy, update_metrics = run.learner.update(replace(state, critic=None), piece, look)
                state, begun = replace(policy, critic=state.critic), True
                values |= update_metrics
            metrics.append(values)
    except Interrupted as stop:
        if begun:
            stop.__traceback__ = None  # free device memory first: its frames hold arrays too
            run.state = state = policy = critic = None
            run.state = copy.state() if copy else None
        raise
    return state, metrics


def _over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of a step's updates: the mean of each, but sums or the worst update for failures."""
    metrics = {name: mean([u[name] for u in updates]) for name in updates[0]}
    for who in ("", CRITIC):
        if f"{who}loss" not in metrics:
            continue
        metrics[f"{who}skipped"] = sum(u[f"{who}skipped"] for u in updates)
        worst = max(updates, key=lambda u: u[f"{who}bad_in_a_row"])  # noqa: B023  a finite update resets the count
        metrics |= {f"{who}{name}": worst[f"{who}{name}"] for name in ("bad_in_a_row", "bad_gradient")}
        metrics[f"{who}learning_rate"] = updates[-1][f"{who}learning_rate"]
    return metrics

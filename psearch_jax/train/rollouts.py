"""The rollouts of one step with their rewards and advantages, and the choice of those to train on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from psearch_jax.rl.advantages import carry_signal, group_advantages
from psearch_jax.rl.rewards import length_penalty
from psearch_jax.rollout.usage import Usage
from psearch_jax.runtime import processes, progress
from psearch_jax.train.run import Run
from psearch_jax.types import Question, RewardParts, Trajectory


@dataclass(frozen=True)
class Rollouts:
    """All rollouts of a step, the same in every process. The rollouts of a group are adjacent."""

    trajectories: list[Trajectory]
    rewards: list[RewardParts]
    totals: list[float]  # per rollout: reward minus length penalty
    advantages: np.ndarray  # [N] float32
    usage: Usage
    draws: int = 1


def draw(run: Run, questions: Sequence[Question], step: int, times: dict[str, float]) -> Rollouts:
    """Collects rollouts of a step's questions, and of more questions while too few groups carry a signal.

    A group whose rewards are all equal teaches nothing. Up to `train.dynamic_sampling_rounds` more batches are taken
    from the loader, until `train.prompts` groups carry a signal (dynamic sampling, arXiv 2503.14476 section 3.2).

    Args:
      questions: those of this process.
      times: the seconds of the phases rollout and reward are added to it.

    Raises:
      Interrupted, RetrievalError: as `Collector.collect`.
    """
    config = run.config
    penalty, context = config.rollout.unfinished == "penalise", config.rollout.context_tokens
    trajectories: list[Trajectory] = []
    rewards: list[RewardParts] = []
    totals: list[float] = []
    usage = Usage()

    def on_progress(done: int, _: int) -> None:
        run.stop.check()
        progress.reach(done)

    with run.phase("rollout", times):
        sampling = run.learner.sampling_copy(run.state.params)
    for draws in range(1, config.train.dynamic_sampling_rounds + 2):
        count = len(questions) * config.rollout.samples
        with run.phase("rollout", times), progress.step("rollouts", count, patient=True):
            own = run.collector.collect(
                sampling,
                questions,
                config.rollout.samples,
                seed=config.seed,
                step=step,
                temperature=config.rollout.temperature,
                progress=on_progress,
            )
            usage += run.collector.usage
            # From here on every process holds all rollouts and computes the same.
            collected = processes.in_order(own, config.rollout.samples)
            # A batch from the next epoch may repeat a question of this step, which would give the same rollouts.
            seen = set(map(_group, trajectories))
            fresh = [t for t in collected if _group(t) not in seen]
        with run.phase("reward", times):
            trajectories += fresh
            parts = [run.reward(t) for t in fresh]
            rewards += parts
            totals += [
                r.total - length_penalty(t, config.reward, penalty, context) for r, t in zip(parts, fresh, strict=True)
            ]
            groups = list(map(_group, trajectories))
            valid = [t.status != "not_finite" for t in trajectories]
            advantages = group_advantages(totals, groups, config.learning.advantage, valid)
        enough = carry_signal(advantages, config.rollout.samples).sum() >= config.train.prompts
        if enough or draws > config.train.dynamic_sampling_rounds:
            break
        questions = next(run.loader)
    return Rollouts(trajectories, rewards, totals, advantages, usage, draws)


def learned_rows(advantages: np.ndarray, samples: int, count: int) -> np.ndarray:
    """The rows of `count` groups, in their order: the first with a signal, then as needed the first without one.

    Args:
      advantages: [N], those of a group adjacent.
      samples: the size of a group.
    """
    chosen = np.sort(np.argsort(~carry_signal(advantages, samples), kind="stable")[:count])
    return (chosen[:, None] * samples + np.arange(samples)).ravel()


def _group(trajectory: Trajectory) -> Hashable:
    return trajectory.question.source, trajectory.question.id

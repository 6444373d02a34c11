"""The stages rollout, reward and advantage of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from psearch_jax.config import Config
from psearch_jax.rl.advantages import carry_signal, group_advantages
from psearch_jax.rollout.rollouts import Usage
from psearch_jax.runtime import processes, progress
from psearch_jax.train.replay import Recording
from psearch_jax.train.run import Run
from psearch_jax.types import Question, RewardParts, Trajectory


@dataclass
class Rollouts:
    """All rollouts of a step, the same in every process. The rollouts of a group are adjacent."""

    trajectories: list[Trajectory] = field(default_factory=list)
    rewards: list[RewardParts] = field(default_factory=list)
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [N] float32
    usage: Usage = field(default_factory=Usage)
    draws: list[list[Trajectory]] = field(default_factory=list)  # by batch of questions


def collect_rollouts(run: Run, questions: Sequence[Question], step: int, times: dict[str, float]) -> Rollouts:
    """Samples and rewards a step's rollouts, and those of more questions while too few groups carry a signal.

    A group whose rewards are all equal teaches nothing. Up to `train.dynamic_sampling_rounds` more batches are taken
    from the loader, until `train.prompts` groups carry a signal (dynamic sampling, arXiv 2503.14476 section 3.2).

    Args:
      questions: those of this process.
      times: the seconds of the phases rollout and reward are added to it.

    Raises:
      Interrupted, RetrievalError: as `RolloutStream.collect`.
    """
    if run.recording is not None:
        return _replay(run, run.recording, questions, step, times)
    config, rollouts = run.config, Rollouts()
    for further in range(config.train.dynamic_sampling_rounds + 1):
        if further:
            questions = next(run.loader)
        with run.phase("rollout", times):
            fresh = _sample(run, questions, step, rollouts)
        with run.phase("reward", times):
            _add(run, rollouts, fresh)
        if carry_signal(rollouts.advantages, config.rollout.samples).sum() >= config.train.prompts:
            break
    return rollouts


def _add(run: Run, rollouts: Rollouts, fresh: list[Trajectory]) -> None:
    """Adds a draw with its rewards, and computes the advantages of all draws."""
    rollouts.draws.append(fresh)
    rollouts.trajectories += fresh
    rollouts.rewards += run.reward(fresh)
    rollouts.advantages = compute_advantages(rollouts.trajectories, rollouts.rewards, run.config)


def _sample(run: Run, questions: Sequence[Question], step: int, rollouts: Rollouts) -> list[Trajectory]:
    """Starts the rollouts of all processes' questions; returns the batch that was started `train.staleness` calls ago.

    Without staleness these are the rollouts of `questions`. Groups that the step already has are left out: a batch
    from the next epoch may repeat a question, which would give the same rollouts. In the first `train.scripted_steps`
    steps, the last rollout of a group is replaced by the transcript of its question, if there is one.
    """
    config, samples = run.config, run.config.rollout.samples
    while len(run.stream) < config.train.staleness:  # the first step of a run
        run.stream.add(questions, step + len(run.stream))
        questions = next(run.loader)
    run.stream.add(questions, step + config.train.staleness)

    def on_progress(done: int, _: int) -> None:
        run.stop.check()
        progress.reach(done)

    with progress.step("rollouts", len(questions) * samples, patient=True):
        own = run.stream.collect(run.sampling_weights, step, config.rollout.temperature, on_progress)
        collected = processes.in_order(own, samples)  # from here on every process computes the same
    rollouts.usage += run.stream.spent()
    known = {t.question.identity for t in rollouts.trajectories}
    scripted = run.scripted if step < config.train.scripted_steps else {}
    return [
        scripted.get(t.question.identity, t) if t.sample == samples - 1 else t
        for t in collected
        if t.question.identity not in known
    ]


def _replay(
    run: Run, recording: Recording, questions: Sequence[Question], step: int, times: dict[str, float]
) -> Rollouts:
    """The recorded rollouts of a step, whose questions are those that this run would ask."""
    rollouts = Rollouts()
    with run.phase("rollout", times):
        draws = processes.all_or_none(lambda: recording.load(step, run.config.rollout))
        asked = [*questions, *(question for _ in draws[1:] for question in next(run.loader))]
        processes.all_or_none(lambda: recording.check_questions(step, draws, asked))
    with run.phase("reward", times):
        for draw in draws:
            _add(run, rollouts, draw)
    return rollouts


def compute_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[RewardParts], config: Config
) -> np.ndarray:
    """[N] float32, relative to each rollout's group; 0 for those that are not learned from."""
    totals, groups = [parts.total for parts in rewards], [t.question.identity for t in trajectories]
    valid = [t.status != "not_finite" for t in trajectories]
    return group_advantages(totals, groups, config.learning.advantage, valid)

"""The first stages of a training step: rollout, reward, advantage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import numpy as np

from psearch_jax.config import Config
from psearch_jax.rl.advantages import carry_signal, group_advantages
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.usage import Usage
from psearch_jax.runtime import processes, progress
from psearch_jax.train.replay import Recording
from psearch_jax.train.run import Run
from psearch_jax.types import Question, RewardParts, Trajectory
from retrieval.protocol import in_background


@dataclass
class Rollouts:
    """All rollouts of a step, the same in every process. The rollouts of a group are adjacent."""

    trajectories: list[Trajectory] = field(default_factory=list)
    rewards: list[RewardParts] = field(default_factory=list)
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [N] float32
    usage: Usage = field(default_factory=Usage)
    draws: list[list[Trajectory]] = field(default_factory=list)  # by batch of questions


def rollouts_of_step(run: Run, questions: Sequence[Question], step: int, times: dict[str, float]) -> Rollouts:
    """Collects rollouts of a step's questions, and of more questions while too few groups carry a signal.

    A group whose rewards are all equal teaches nothing. Up to `train.dynamic_sampling_rounds` more batches are taken
    from the loader, until `train.prompts` groups carry a signal (dynamic sampling, arXiv 2503.14476 section 3.2).

    Args:
      questions: those of this process.
      times: the seconds of the phases rollout and reward are added to it.

    Raises:
      Interrupted, RetrievalError: as `Collector.collect`.
    """
    if run.recording is not None:
        return _recorded_rollouts(run, run.recording, questions, step, times)
    config, rollouts = run.config, Rollouts()

    @functools.cache
    def weights() -> SamplingWeights:
        return _sampling_weights(run, times)

    while True:
        with run.phase("rollout", times):
            collected = _rollout(run, weights, questions, step)
            rollouts.usage += run.stream.spent()
            # A batch from the next epoch may repeat a question of this step, which would give the same rollouts.
            seen = set(map(_group, rollouts.trajectories))
            fresh = [t for t in collected if _group(t) not in seen]
            rollouts.draws.append(fresh)
        with run.phase("reward", times):
            _reward(run, rollouts, fresh)
            rollouts.advantages = compute_advantages(rollouts.trajectories, rollouts.rewards, config)
        enough = carry_signal(rollouts.advantages, config.rollout.samples).sum() >= config.train.prompts
        if enough or len(rollouts.draws) > config.train.dynamic_sampling_rounds:
            return rollouts
        questions = next(run.loader)


def _sampling_weights(run: Run, times: dict[str, float]) -> SamplingWeights:
    if not run.config.mesh.rollout_devices:
        return run.sampling_weights()
    with run.phase("transfer", times):
        return jax.block_until_ready(run.sampling_weights())


@contextmanager
def sampling_ahead(run: Run, step: int, times: dict[str, float]) -> Iterator[None]:
    """Completes the next step's rollouts while the block updates the policy (`mesh.rollout_devices`, with staleness).

    They are sampled by the weights before the update. An error or a stop request ends both. On the CPUs of several
    processes they are completed before the block: a CPU client runs programs with collectives in the order in which
    they were started, and two threads would start them in another order in each process, which deadlocks.

    Args:
      times: the seconds of the phases sampling_ahead, sampling_wait (the part of the step in which no update runs) and
        transfer (a part of sampling_wait) are added to it.
    """
    if not (run.config.mesh.rollout_devices and run.config.train.staleness) or run.recording is not None:
        yield
        return
    with run.phase("sampling_wait", times):
        weights = _sampling_weights(run, times)
    temperature, sampler_mesh = run.config.rollout.temperature, run.collector.sampler.mesh

    def sample() -> None:
        with run.phase("sampling_ahead", times), processes.exchanging_on(sampler_mesh):
            run.stream.run(weights, step, temperature, lambda *_: run.stop.check())

    if jax.process_count() > 1 and sampler_mesh.devices.flat[0].platform == "cpu":
        with run.phase("sampling_wait", times):
            sample()
        yield
        return
    future = in_background(sample)
    try:
        yield
    except BaseException:
        future.exception()  # wait: the sampler uses the run's devices
        raise
    with run.phase("sampling_wait", times):
        future.result()


def _recorded_rollouts(
    run: Run, recording: Recording, questions: Sequence[Question], step: int, times: dict[str, float]
) -> Rollouts:
    """All recorded rollouts of a step; the loader advances as it did when they were sampled."""
    rollouts = Rollouts()
    with run.phase("rollout", times):
        rollouts.draws = processes.all_or_none(lambda: recording.draws(step, run.config.rollout))
    for n, draw in enumerate(rollouts.draws, 1):
        asked, known = questions if n == 1 else next(run.loader), rollouts.draws[:n]
        processes.all_or_none(functools.partial(recording.check_questions, step, known, asked))
        with run.phase("reward", times):
            _reward(run, rollouts, draw)
    rollouts.advantages = compute_advantages(rollouts.trajectories, rollouts.rewards, run.config)
    return rollouts


def _rollout(
    run: Run, weights: Callable[[], SamplingWeights], questions: Sequence[Question], step: int
) -> list[Trajectory]:
    """Starts the rollouts of all processes' questions; returns the batch that was started `train.staleness` calls ago.

    Without staleness these are the rollouts of `questions`.
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
        if not run.stream.ready:
            run.stream.run(weights(), step, config.rollout.temperature, on_progress)
        own = run.stream.take()
        return processes.in_order(own, samples)  # from here on every process computes the same


def _reward(run: Run, rollouts: Rollouts, fresh: Sequence[Trajectory]) -> None:
    """Adds trajectories and their rewards to the step's rollouts."""
    rollouts.trajectories += fresh
    rollouts.rewards += run.reward(fresh)


def compute_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[RewardParts], config: Config
) -> np.ndarray:
    """[N] float32, relative to each rollout's group; 0 for those that are not learned from."""
    totals, groups = [parts.total for parts in rewards], [t.question.identity for t in trajectories]
    valid = [t.status != "not_finite" for t in trajectories]
    advantages = group_advantages(totals, groups, config.learning.advantage, valid)
    if config.rollout.unfinished == "mask":  # they count towards the baseline, but carry no signal
        advantages *= [t.status == "answered" for t in trajectories]
    return advantages


def _group(trajectory: Trajectory) -> Hashable:
    return trajectory.question.source, trajectory.question.id

"""Rollouts of several batches of questions at once, collected batch by batch in the order in which they were added.

With batches ahead, the slots stay full while the last rollouts of a batch are decoded: rollouts of the next batches
take the free ones. Between two calls of `collect`, unfinished rollouts are suspended to the host (scheduler.py); the
next call continues them with newer weights. Batches are never reordered, so short rollouts are not learned from before
long ones, and a token is at most `train.staleness` calls older than the batch that it is collected with.

Which rollouts are suspended where depends only on decode steps and yields, not on time: equal seeds give equal runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from psearch_jax.rollout.rollouts import Parts, Progress, Rollout, Usage
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.rollout.scheduler import RolloutScheduler
from psearch_jax.rollout.search import BatchedSearch, SearchPolicy
from psearch_jax.runtime import processes
from psearch_jax.types import Question, Trajectory


@dataclass(frozen=True)
class InFlight:
    """All rollouts of a stream between two calls of `collect`, of one process."""

    added: int = 0  # number of rollouts ever added
    batches: tuple[range, ...] = ()  # the orders of the rollouts of each batch
    waiting: tuple[Rollout, ...] = ()
    suspended: tuple[Rollout, ...] = ()
    results: dict[int, Trajectory] = field(default_factory=dict)


class RolloutStream:
    """Keeps rollouts in flight over several calls of `collect`.

    Args:
      parts: components and settings.
      samples: R, rollouts per question.
      seed: part of every rollout's random key.
    """

    def __init__(self, parts: Parts, samples: int, seed: int):
        self._parts, self._samples, self._seed = parts, samples, seed
        self.restore(InFlight())

    def __len__(self) -> int:
        """Number of batches that were added and not collected yet."""
        return len(self._batches)

    def add(self, questions: Sequence[Question], step: int) -> None:
        """Adds a batch: this process's questions. All processes must call this.

        Args:
          step: part of the random key of these rollouts.
        """
        prompts: list[list[int]] = []
        processes.allgather(
            lambda: prompts.extend(map(self._parts.render, questions))
        )  # an error in one is raised in all
        first = self._scheduler.added
        self._scheduler.add(questions, prompts, step)
        self._batches.append(range(first, self._scheduler.added))

    def collect(
        self,
        weights: Callable[[], SamplingWeights],
        version: int,
        temperature: float,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Rolls out until the oldest batch is complete in every process, and takes it. All processes must call this.

        Args:
          weights: makes those of the policy; not called if the batch is already complete.
          version: of these weights, recorded with the tokens that they sample.
          progress: called with the numbers of completed and of all rollouts of this batch.

        Returns:
          The trajectories of the batch, all samples of a question together, in the order of its questions.

        Raises:
          RetrievalError, or what `progress` raises: in every process if it is raised in one. The stream cannot be used
            after that, except by `restore`.
        """
        if not self._is_complete():
            self._run(weights(), version, temperature, progress)
        return [self._scheduler.results.pop(order) for order in self._batches.popleft()]

    def _is_complete(self) -> bool:
        batch, results = self._batches[0], self._scheduler.results
        return all(processes.allgather(lambda: all(order in results for order in batch)))

    def _run(self, weights: SamplingWeights, version: int, temperature: float, progress: Progress | None) -> None:
        scheduler, batch = self._scheduler, self._batches[0]
        scheduler.resume(weights, version, self._suspended)

        def report() -> None:
            if progress:
                progress(sum(order in scheduler.results for order in batch), len(batch))

        # Without other batches, `refill` ends the loop and reports the end: its exchange between processes suffices.
        is_last = len(self._batches) == 1
        while (is_last or not self._is_complete()) and scheduler.refill(report):
            scheduler.decode(temperature)
            scheduler.advance_stopped_rows()
        if not is_last:
            processes.allgather(report)
        self._suspended = scheduler.suspend()

    def spent(self) -> Usage:
        """The cost since the last call."""
        spent, self._scheduler.usage = self._scheduler.usage, Usage(len(self._scheduler.local_slots))
        return spent

    def in_flight(self) -> InFlight:
        """The rollouts that a later run continues with `restore`."""
        scheduler = self._scheduler
        waiting, results = tuple(scheduler.waiting), dict(scheduler.results)
        return InFlight(scheduler.added, tuple(self._batches), waiting, tuple(self._suspended), results)

    def restore(self, saved: InFlight) -> None:
        """Continues from the rollouts of `in_flight`, also of a stream that failed in `collect`."""
        self._batches, self._suspended = deque(saved.batches), list(saved.suspended)
        self._scheduler = RolloutScheduler(
            self._parts,
            search_policy(self._parts),
            samples=self._samples,
            seed=self._seed,
            added=saved.added,
            waiting=saved.waiting,
            results=saved.results,
        )


def search_policy(parts: Parts) -> SearchPolicy:
    """A new search policy, by `rollout.overlap_search`."""
    return BatchedSearch(parts.toolbox(), parts.rollout.overlap_search)

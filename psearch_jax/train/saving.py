"""Saves the state of a run, and resumes the run from its newest checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from psearch_jax.config import LearningSection, best_metric
from psearch_jax.rollout.stream import InFlight
from psearch_jax.runtime import processes
from psearch_jax.runtime.metrics import MetricsWriter
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.best import Best
from psearch_jax.train.checkpointing.checkpoint import Checkpoints, model_record
from psearch_jax.train.checkpointing.in_flight import gather_in_flight, restore_in_flight
from psearch_jax.train.checkpointing.preemption import Interrupted, describe_saved
from psearch_jax.train.critic import critic_learning
from psearch_jax.train.run import Run
from psearch_jax.train.state import TrainState, policy_updates, schedule, updates_per_step, with_schedule
from psearch_jax.types import UserError
from retrieval.protocol import RetrievalError

log = logging.getLogger("psearch_jax")
CHECKPOINT_EVERY_S = 20 * 60.0  # a step that ends this long after the last checkpoint is saved
# Fields, or prefixes of fields, that rollouts in flight depend on: under other values they would be continued wrongly.
_OF_ROLLOUTS = ("data.", "method", "model.tokenizer", "retrieval.", "rollout.", "seed")
_OF_ROLLOUTS += ("train.prompts", "train.staleness")
EVALUATION_DUE = "evaluation_due"  # in a checkpoint's loop


class Saver:
    """Saves the state: regularly, and where validation finds the best policy so far."""

    def __init__(self, run: Run, checkpoints: Checkpoints, writer: MetricsWriter, best: Best | None):
        self._run, self.checkpoints, self.writer, self.best = run, checkpoints, writer, best
        self._record = {"model": model_record(run.model), "tokenizer": run.tokenizer_path, "settings": run.settings}
        self._record |= {"lora": run.lora} if run.lora else {}
        self._saved = time.monotonic()

    def is_late(self) -> bool:
        """Whether the last checkpoint is older than `CHECKPOINT_EVERY_S`."""
        return time.monotonic() - self._saved >= CHECKPOINT_EVERY_S

    def save(self, step: int, loader: dict[str, Any], rollouts: InFlight, evaluation_due: bool = False) -> None:
        """Saves the state after `step` steps, unless it is saved already.

        Args:
          loader: the position at which a resumed run's questions start.
          rollouts: those in flight at that position.
          evaluation_due: the evaluation after this step did not complete; a resumed run starts with it.
        """
        if step == (self.checkpoints.latest() or 0):
            return
        loop = {**self._record, "loader": loader, **({EVALUATION_DUE: True} if evaluation_due else {})}
        with self._run.phase("checkpoint"):
            processes.allgather(self.writer.flush)
            if self._run.config.train.staleness:
                loop["in_flight"] = gather_in_flight(rollouts, self._run.config.rollout.samples)
            self.checkpoints.save(step, self._run.state, loop)
        self._saved = time.monotonic()

    def offer(self, step: int, figures: Mapping[str, Mapping[str, float]]) -> None:
        """Saves the parameters if their validation figures are the best so far."""
        metric = self._run.config.eval.best_metric
        kind, name = best_metric(metric)
        with self._run.phase("checkpoint"):
            if self.best and self.best.offer(step, figures[kind][name], self._run.state.params, self._record):
                log.info("step %d has the best %s so far: %.4f", step, metric, figures[kind][name])

    def end(self, stop: Interrupted | RetrievalError) -> NoReturn:
        """Raises the error that ended the run, once everything is on disk, and reports what is saved."""
        self.checkpoints.wait()
        message = describe_saved(self.checkpoints.latest())
        if isinstance(stop, Interrupted):
            raise Interrupted(message) from None
        log.error("lost the retriever; %s", message)
        raise stop


@dataclass(frozen=True)
class Start:
    """Where a run starts or resumes.

    Attributes:
      step: the number of completed steps.
      changes: the names of the settings that changed since they were completed.
      evaluation_due: the evaluation after the last of them did not complete.
    """

    step: int = 0
    changes: frozenset[str] = frozenset()
    evaluation_due: bool = False


def resume(run: Run, checkpoints: Checkpoints, workdir: Path, allow_changes: bool) -> Start:
    """Restores the newest complete checkpoint and the loader's position into the run.

    Raises:
      UserError: settings that affect the results changed, and `allow_changes` is false; or the algorithm changed.
    """
    changes: dict[str, str] = {}
    rollouts: InFlight | None = None

    def accept(loop: Mapping[str, Any]) -> None:
        nonlocal rollouts
        changes.update(settings.check_changes(loop, run.settings, workdir, allow_changes))
        kept = "in_flight" in loop and not any(name.startswith(_OF_ROLLOUTS) for name in changes)
        rollouts = restore_in_flight(loop["in_flight"], run.config.rollout.samples) if kept else None

    run.initial_state = None  # frees the initial weights before the checkpoint is loaded
    run.state, loop = checkpoints.restore(run.abstract, accept)
    step, config = int(loop["step"]), run.config
    log.info("resuming after step %d", step)
    warmup_changed = "learning.warmup_ratio" in changes
    run.state = _with_schedule(run.state, config.learning, policy_updates(config), warmup_changed)
    if run.state.critic is not None:
        updates = updates_per_step(config) * config.train.steps
        critic = _with_schedule(run.state.critic, critic_learning(config), updates, "critic.warmup_ratio" in changes)
        run.state = replace(run.state, critic=critic)
    try:
        run.loader.restore(loop["loader"])
    except UserError as error:
        if not changes:
            raise
        log.warning("the questions start from the beginning (%s)", error)
    if rollouts is not None:
        run.stream.restore(rollouts)
    elif "in_flight" in loop:
        log.warning("the rollouts in flight are dropped, because they depend on settings that changed")
    return Start(step, frozenset(changes), bool(loop.get(EVALUATION_DUE)))


def _with_schedule(state: TrainState, learning: LearningSection, total: int, warmup_changed: bool) -> TrainState:
    """The state with the schedule of the present config: a longer run decays later and keeps its warm-up."""
    updates = schedule(learning, total)
    if not warmup_changed:
        del updates["warmup"]
    return with_schedule(state, updates)

"""The best parameters of a run by a validation metric: WORKDIR/best/STEP, in addition to the newest checkpoints.

The directory holds one checkpoint: parameters without optimizer state. Its `loop` holds what every checkpoint records,
and why it was kept: `{"best": {"metric", "value", "questions"}}`. A new one is renamed into place once complete, and
only then is the previous one removed, so a run that dies at any moment leaves a readable checkpoint. No run resumes
from it, and the retention policy of checkpoints/ does not apply to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx

from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import absolute, locate
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.checkpoint import (
    Damaged,
    check_room,
    find_checkpoints,
    read_loop,
    set_aside,
    writing,
)
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")
DIRECTORY = "best"


class Best:
    """The best parameters of one run directory. Saving is asynchronous.

    Args:
      workdir: the run directory.
      metric: the name of the metric; higher is better.
      questions: a digest of the validation questions.
      now: the settings of the run. If metric, questions or a setting that affects evaluations changed, the first new
        measurement replaces the kept checkpoint.
      until: rename a kept checkpoint of a later step to `STEP.earlier`: it is of a run that was restarted or had other
        settings. A damaged one is renamed to `STEP.unreadable`, with a warning.
    """

    def __init__(
        self,
        workdir: str | Path,
        metric: str,
        questions: str = "",
        now: settings.Record | None = None,
        until: int | None = None,
    ):
        self._directory = absolute(workdir) / DIRECTORY
        self._measure = {"metric": metric, "questions": questions}
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=1,
                create=True,
                cleanup_tmp_directories=True,
                multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=DIRECTORY),
            ),
        )
        self._record, self._comparable = None, True
        step = self._manager.latest_step()
        if step is not None and until is not None and step > until:
            set_aside(self._manager, [step], "earlier")
        elif step is not None and (loop := self._read(step)) is not None:
            self._record, now = {"step": step, **loop["best"]}, now or {}
            changes = settings.differences(loop.get("settings", {}), now)
            self._comparable = not settings.affect_evaluation(changes, now)

    def _read(self, step: int) -> dict[str, Any] | None:
        """The `loop` of the kept checkpoint; None if it is damaged, and is then renamed."""

        def read() -> dict[str, Any]:
            loop = read_loop(self._directory / str(step))
            best = loop.get("best")
            if not isinstance(best, dict) or not {"metric", "value"} <= best.keys():
                raise Damaged(f"{self._directory / str(step)}: loop does not say why it was kept")
            return loop

        try:
            return processes.broadcast(read)
        except Damaged as error:
            log.warning("%s; the next evaluation starts a new best", error)
            set_aside(self._manager, [step])
            return None

    @property
    def record(self) -> dict[str, Any] | None:
        """`step`, `metric`, `questions` and `value` of the kept checkpoint; None if there is none."""
        return self._record

    def offer(self, step: int, value: float, params: nnx.State, loop: Mapping[str, Any]) -> bool:
        """Keeps the parameters after `step` completed steps if their value is higher than the kept one.

        All processes must call this with the same arguments.

        Args:
          loop: what every checkpoint records, JSON-ready.

        Raises:
          UserError: the checkpoint cannot be written.
        """
        known = self._record
        rival = known and self._comparable and all(known.get(k) == v for k, v in self._measure.items())
        if known and (step <= known["step"] or (rival and value <= known["value"])):
            return False  # also when a resumed run repeats steps up to the kept one
        best = {**self._measure, "value": value}
        self._record, self._comparable = {"step": step, **best}, True
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(nnx.to_pure_dict(params)),
            loop=ocp.args.JsonSave({**loop, "step": step, "best": best}),
        )
        with writing(self._directory):
            check_room(self._directory, params)
            self._manager.save(step, args=arguments, force=True)
        return True

    def wait(self) -> None:
        """Blocks until the kept checkpoint is on disk."""
        with writing(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        with writing(self._directory):
            self._manager.close()


def find_best(path: str | Path) -> Path:
    """The best checkpoint of a run directory.

    Raises:
      UserError: there is none.
    """
    directory = locate(path) / DIRECTORY
    try:
        return find_checkpoints(directory)[0]
    except UserError:
        raise UserError(
            f"--best: {directory} holds no checkpoint, accepted: the directory of a run with validation questions and "
            "config.eval.every_steps above 0"
        ) from None

"""The best parameters of a run by a validation metric: WORKDIR/best/STEP, in addition to the newest checkpoints.

The directory holds one checkpoint: parameters without optimizer state. Its `loop` holds what every checkpoint records,
and why it was kept: `{"best": {"metric", "value", "questions"}}`. Orbax removes the previous one once a new one is
complete, so a run that dies at any moment leaves a readable checkpoint. No run resumes from it. (Orbax's own `best_fn`
would write all parameters at every evaluation, and compare values of different settings.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import absolute, locate
from psearch_jax.train.checkpointing import checkpoint, settings
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")
DIRECTORY = "best"


class Best(checkpoint.Saving):
    """The best parameters of one run directory. Saving is asynchronous.

    A kept checkpoint with which new values cannot be compared is renamed to `STEP.earlier`: of another metric, other
    questions, other settings that affect evaluations, or a later step than `until`, of a run that was restarted. A
    unreadable one is renamed to `STEP.unreadable`, with a warning.

    Args:
      workdir: the run directory.
      metric: the name of the metric; higher is better.
      questions: a digest of the validation questions.
      now: the settings of the run.
    """

    def __init__(
        self,
        workdir: str | Path,
        metric: str,
        questions: str = "",
        now: settings.Record | None = None,
        until: int | None = None,
    ):
        super().__init__(absolute(workdir) / DIRECTORY, max_to_keep=1)
        self._measure, self.record = {"metric": metric, "questions": questions}, None
        step = self.latest()
        if step is None:
            return
        try:
            loop = processes.broadcast(lambda: _read(self.directory / str(step)))
        except checkpoint.Unreadable as error:
            log.warning("%s; the next evaluation starts a new best", error)
            self.rename([step])
            return
        record, changes = {"step": step, **loop["best"]}, settings.differences(loop.get("settings", {}), now or {})
        is_comparable = all(record.get(key) == value for key, value in self._measure.items())
        is_comparable = is_comparable and not settings.affect_evaluation(changes, now or {})
        if is_comparable and (until is None or step <= until):
            self.record = record
        else:
            self.rename([step], "earlier")

    def offer(self, step: int, value: float, params: nnx.State, loop: Mapping[str, Any]) -> bool:
        """Keeps the parameters after `step` completed steps if their value is higher than the kept one.

        All processes must call this with the same arguments.

        Args:
          loop: what every checkpoint records, JSON-ready.

        Raises:
          UserError: the checkpoint cannot be written.
        """
        if self.record and (step <= self.record["step"] or value <= self.record["value"]):
            return False  # also when a resumed run repeats steps up to the kept one
        best = {**self._measure, "value": value}
        self.write(step, {**loop, "step": step, "best": best}, params=nnx.to_pure_dict(params))
        self.record = {"step": step, **best}
        return True


def _read(path: Path) -> dict[str, Any]:
    loop = checkpoint.read_loop(path)
    best = loop.get("best")
    if not isinstance(best, dict) or not {"metric", "value"} <= best.keys():
        raise checkpoint.Unreadable(f"{path}: loop does not say why it was kept")
    return loop


def find_best(path: str | Path) -> Path:
    """The best checkpoint of a run directory.

    Raises:
      UserError: there is none.
    """
    directory = locate(path) / DIRECTORY
    try:
        return checkpoint.find_checkpoint(directory)
    except UserError:
        raise UserError(
            f"--best: {directory} holds no checkpoint, accepted: the directory of a run with validation questions and "
            "config.eval.every_steps above 0"
        ) from None

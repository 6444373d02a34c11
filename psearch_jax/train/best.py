"""The best parameters of a run by a validation figure: WORKDIR/best/STEP, kept beside the newest checkpoints.

No file points to them. The one checkpoint there holds its parameters, without an optimizer, and in its `loop`, beside
what every checkpoint says, why it is there: `{"best": {"metric", "value", "questions"}}`. It is renamed into place
when it is whole, and only then the one before is removed: whatever ends the run, what is there can be read and is what
it says. Nothing resumes from it, and the retention of checkpoints/ does not see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx

from psearch_jax import processes
from psearch_jax.paths import absolute, locate
from psearch_jax.train.checkpoint import check_room, find_checkpoints, read_loop, writing
from psearch_jax.types import UserError

DIRECTORY = "best"


class Best:
    """The best parameters of one run directory; saving goes on in the background.

    Args:
      workdir: of the run.
      metric: the name of the figure, where higher is better.
      questions: a digest of those that it is measured with. With another figure, or of other questions, what is
        measured first takes the place of what is there.
      until: forget what was kept behind a later step: this run has not come to it, or goes on with other settings.
    """

    def __init__(self, workdir: str | Path, metric: str, questions: str = "", until: int | None = None):
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
        step = self._manager.latest_step()
        if step is not None and until is not None and step > until:
            with writing(self._directory):
                self._manager.delete(step)
            step = None
        self._record = None
        if step is not None:
            loop = processes.agreed(lambda: read_loop(self._directory / str(step)))
            self._record = {"step": step, **loop["best"]}

    @property
    def record(self) -> dict[str, Any] | None:
        """`step`, `metric`, `questions` and `value` of what is kept; None before there is something."""
        return self._record

    def offer(self, step: int, value: float, params: nnx.State, loop: Mapping[str, Any]) -> bool:
        """Keeps the parameters behind `step` completed steps if their value is higher than that of those kept.

        Args:
          loop: what every checkpoint says, JSON-ready. All processes call this with the same arguments.

        Raises:
          UserError: it cannot be written.
        """
        known = self._record
        rival = known and all(known[name] == wanted for name, wanted in self._measure.items())
        if known and (step <= known["step"] or (rival and value <= known["value"])):
            return False  # not later: a run that was killed comes to this step again, and finds what it had found
        best = {**self._measure, "value": value}
        self._record = {"step": step, **best}
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(nnx.to_pure_dict(params)),
            loop=ocp.args.JsonSave({**loop, "step": step, "best": best}),
        )
        with writing(self._directory):
            check_room(self._directory, params)
            self._manager.save(step, args=arguments, force=True)
        return True

    def wait(self) -> None:
        """Returns when what was kept is on disk."""
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

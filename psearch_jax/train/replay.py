"""Recorded rollouts: with `train.record_rollouts` a run writes them; with `train.replay` another run learns from them.

RUN/rollouts/000012.json.z holds all that learning needs of step 12: trajectories of every draw, with tokens,
mask, log-probs, turns and question. So a replay needs neither sampler nor retriever. With the settings of the recorded
run it repeats the updates of that run to the bit. With other settings it compares rewards, objectives or optimizers on
the same rollouts; the further its policy moves away from the recorded run's, the more off-policy they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from psearch_jax.config import RolloutSection
from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import locate, write_atomically
from psearch_jax.train.serialise import deserialise, serialise
from psearch_jax.types import Question, Trajectory, UserError

FOLDER = "rollouts"


def record(workdir: Path, step: int, draws: Sequence[Sequence[Trajectory]]) -> None:
    """Writes the rollouts of a step, from the first process.

    Args:
      draws: the trajectories of each batch of questions that the step drew.
    """
    if processes.first():
        (workdir / FOLDER).mkdir(exist_ok=True)
        write_atomically(_file(workdir, step), serialise(draws))


def remove_from(workdir: Path, step: int) -> None:
    """Removes the recorded rollouts of the steps from `step` on, which a resumed run repeats."""
    for file in (workdir / FOLDER).glob("*.json.z"):
        if file.name >= _file(workdir, step).name:
            file.unlink()


class Recording:
    """The recorded rollouts of a run.

    Args:
      run: its directory.

    Raises:
      UserError: it holds no recorded rollouts.
    """

    def __init__(self, run: str):
        self._run = locate(run)
        if not any((self._run / FOLDER).glob("*.json.z")):
            raise UserError(
                f"config.train.replay={run}: has no recorded rollouts, accepted: the directory of a run with "
                "train.record_rollouts=true"
            )

    def check_steps(self, first: int, end: int) -> None:
        """Raises `UserError` if one of the steps first .. end - 1 was not recorded."""
        for step in range(first, end):
            if not _file(self._run, step).is_file():
                raise UserError(
                    f"{_file(self._run, step)}: not found; accepted for config.train.steps: at most {step}, the "
                    "number of recorded steps"
                )

    def load(self, step: int, rollout: RolloutSection) -> list[list[Trajectory]]:
        """The trajectories of each draw of a step.

        Args:
          rollout: of the replay; its `samples` and `context_tokens` must suit the recorded rollouts.

        Raises:
          UserError: the file does not exist or cannot be read, or the rollouts have other groups or do not fit.
        """
        file = _file(self._run, step)
        try:
            draws = deserialise(list[list[Trajectory]], file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({error}), accepted: a file of recorded rollouts") from None
        trajectories = [t for draw in draws for t in draw]
        sizes = set(Counter(t.question.identity for t in trajectories).values())
        longest = max((len(t.ids) for t in trajectories), default=0)
        if sizes - {rollout.samples}:
            raise UserError(
                f"config.rollout.samples: found {rollout.samples}, accepted: {max(sizes)}, as recorded in {file}"
            )
        if longest > rollout.context_tokens:
            raise UserError(
                f"config.rollout.context_tokens: found {rollout.context_tokens}, accepted: at least {longest}, the "
                f"longest rollout in {file}"
            )
        return draws

    def check_questions(self, step: int, draws: Sequence[Sequence[Trajectory]], questions: Sequence[Question]) -> None:
        """Raises `UserError` if a question that this process would have asked is not among a step's draws."""
        recorded = {t.question.identity for draw in draws for t in draw}
        for question in questions:
            if question.identity not in recorded:
                raise UserError(
                    f"{_file(self._run, step)}: found no rollouts of question {question.id!r} of "
                    f"{question.source!r}; accepted: a replay with the seed, the questions and train.prompts of the "
                    "recorded run"
                )


def _file(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:06d}.json.z"

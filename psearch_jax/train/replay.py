"""Recorded rollouts: with `train.record_rollouts` a run writes them; with `train.replay` another run learns from them.

RUN/rollouts/000012.npz holds everything that learning reads of step 12: all trajectories of every draw, with tokens,
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
from psearch_jax.train.rollout_files import describe, pack, parse_trajectory, unpack
from psearch_jax.types import Question, Trajectory, UserError

FOLDER = "rollouts"


def write(workdir: Path, step: int, draws: Sequence[Sequence[Trajectory]]) -> None:
    """Writes the rollouts of a step, from the first process.

    Args:
      draws: the trajectories of each batch of questions that the step drew.
    """
    if not processes.first():
        return
    rows = [
        ({**describe(t), "draw": number}, (t.ids, t.mask, t.logprobs))
        for number, draw in enumerate(draws)
        for t in draw
    ]
    (workdir / FOLDER).mkdir(exist_ok=True)
    write_atomically(_file(workdir, step), pack(rows, draws=len(draws)))


class Recording:
    """The recorded rollouts of a run.

    Args:
      run: its directory.

    Raises:
      UserError: it holds no recorded rollouts.
    """

    def __init__(self, run: str):
        self._run = locate(run)
        self._step, self._draws = -1, list[list[Trajectory]]()  # the last ones that were read
        if not any((self._run / FOLDER).glob("*.npz")):
            raise UserError(
                f"config.train.replay={run}: has no recorded rollouts, accepted: the directory of a run with "
                "train.record_rollouts=true"
            )

    def check(self, first: int, end: int) -> None:
        """Raises `UserError` if one of the steps first .. end - 1 was not recorded."""
        for step in range(first, end):
            if not _file(self._run, step).is_file():
                raise UserError(
                    f"{_file(self._run, step)}: not found; accepted for config.train.steps: at most {step}, the "
                    "number of recorded steps"
                )

    def draws(self, step: int, rollout: RolloutSection) -> list[list[Trajectory]]:
        """The trajectories of each draw of a step.

        Args:
          rollout: of the replay; its `samples` and `context_tokens` must suit the recorded rollouts.

        Raises:
          UserError: the file does not exist or cannot be read, or the rollouts have other groups or do not fit.
        """
        if step == self._step:
            return self._draws
        file = _file(self._run, step)
        try:
            rows, facts = unpack(file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({error}), accepted: a file of recorded rollouts") from None
        draws: list[list[Trajectory]] = [[] for _ in range(facts["draws"])]
        for row, arrays in rows:
            draws[row["draw"]].append(parse_trajectory(row, arrays))
        trajectories = [t for draw in draws for t in draw]
        sizes = set(Counter((t.question.source, t.question.id) for t in trajectories).values())
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
        self._step, self._draws = step, draws
        return draws

    def check_questions(self, step: int, draws: Sequence[Sequence[Trajectory]], questions: Sequence[Question]) -> None:
        """Raises `UserError` if a question that this process would have asked is not among a step's draws so far."""
        recorded = {(t.question.source, t.question.id) for draw in draws for t in draw}
        lacking = next((q for q in questions if (q.source, q.id) not in recorded), None)
        if lacking is not None:
            raise UserError(
                f"{_file(self._run, step)}: found no rollouts of question {lacking.id!r} of {lacking.source!r}; "
                "accepted: a replay with the seed, the questions and train.prompts of the recorded run"
            )


def _file(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:06d}.npz"

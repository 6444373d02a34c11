"""The order in which a run sees its questions: shuffled per epoch, split over processes, saved and resumed (Grain)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from psearch_jax.types import Question, UserError, digest


class QuestionLoader:
    """An iterator over batches of different questions, in an order that depends only on the seed.

    Every epoch is a new shuffle of all questions, without the remainder that does not fill a step. Process p of P
    takes every P-th question from the p-th on, so the questions of a step depend only on `batch * process_count`.

    Args:
      questions: the same in every process. Their `fingerprint`, if they have one, saves reading all of them.
      batch: questions per step for this process.
      seed: of the shuffles.
      epochs: number of passes over the questions; None: endless.
      process_index, process_count: select this process's part of the data.

    Raises:
      UserError: there are fewer questions than one step of all processes needs.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        batch: int,
        seed: int,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        step = batch * process_count
        if batch < 1 or len(questions) < step:
            raise UserError(f"data: {len(questions)} questions found, accepted: at least those of one step, {step}")
        used = len(questions) // step * step
        # Truncate to full steps before repeating: a batch across two epochs could contain a question twice.
        batches = (
            grain.MapDataset.source(questions)
            .seed(seed)
            .shuffle()[:used][process_index::process_count]
            .batch(batch, drop_remainder=True, batch_fn=list)
            .repeat(epochs)
        )
        # No prefetch threads: a question is read in microseconds.
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))
        self._fingerprint = {
            "data": getattr(questions, "fingerprint", None) or digest(questions),
            "seed": seed,
            "questions_per_step": step,  # over all processes, whose number may change on resume
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the questions' contents, in order."""
        return self._fingerprint["data"]

    def __iter__(self) -> Iterator[list[Question]]:
        return self

    def __next__(self) -> list[Question]:
        """The next `batch` questions."""
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """JSON-serialisable: the position after the last batch that was returned, and the data's fingerprint."""
        return {"grain": self._iterator.get_state(), "fingerprint": dict(self._fingerprint)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resumes after the batch after which `state` was taken.

        Grain accepts a position in other data without an error, so the fingerprints are compared first.

        Raises:
          UserError: the state is of other questions, or of another seed or number of questions per step.
        """
        saved = state.get("fingerprint")
        if not isinstance(saved, Mapping) or "grain" not in state:
            raise UserError("data: the saved loader state is not one, accepted: fields grain and fingerprint")
        for name, ours in self._fingerprint.items():
            if saved.get(name) != ours:
                before = "other questions or another order of them" if name == "data" else f"{name}={saved.get(name)}"
                raise UserError(
                    f"data: the saved position was made with {before}, found {name}={ours}; accepted: the same {name}"
                )
        self._iterator.set_state(state["grain"])

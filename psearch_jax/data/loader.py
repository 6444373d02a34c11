"""The order in which a run sees its questions: shuffled per epoch, split over processes, saved and resumed (Grain)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from psearch_jax.types import Question, UserError, digest


class QuestionLoader:
    """An iterator over batches of different questions, `next(loader)`, in an order that depends on the seed alone.

    Every epoch is one shuffle of all questions; process p of P reads every P-th of them from the p-th on, so the
    batches of all processes together are the same questions for any P that leaves `batch * process_count` as it is.
    What does not fill a batch of every process is dropped: other questions in every epoch, as each is shuffled anew.

    Args:
      questions: the same list in every process.
      batch: questions that this process gets per step.
      seed: of the shuffles.
      epochs: how often the questions are gone through; None: without end.
      process_index, process_count: which part of the data is this process's.
      fingerprint: of sources and ids in order, where it is known; by default it is taken from the questions.

    Raises:
      UserError: there are fewer questions than one step of all processes takes.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        batch: int,
        seed: int,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        fingerprint: str | None = None,
    ):
        step = batch * process_count
        if batch < 1 or len(questions) < step:
            raise UserError(f"data: {len(questions)} questions found, accepted: at least those of one step, {step}")
        used = len(questions) // step * step
        # Cut to whole steps before anything repeats: a batch that crossed two epochs could hold a question twice.
        batches = (
            grain.MapDataset.source(questions)
            .seed(seed)
            .shuffle()[:used][process_index::process_count]
            .batch(batch, drop_remainder=True, batch_fn=list)
            .repeat(epochs)
        )
        # The questions are in memory: there is nothing to read ahead.
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))
        self._fingerprint = {
            "data": fingerprint or digest(questions),
            "seed": seed,
            "questions_per_step": step,  # of all processes: their number may be another after a resume
        }

    @property
    def fingerprint(self) -> str:
        """Of sources and ids of the questions, in order."""
        return self._fingerprint["data"]

    def __iter__(self) -> Iterator[list[Question]]:
        return self

    def __next__(self) -> list[Question]:
        """The next `batch` questions."""
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """JSON-ready: the position behind the last batch that was returned, and what it is a position in."""
        return {"grain": self._iterator.get_state(), "fingerprint": dict(self._fingerprint)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the batch after which `state` was taken.

        Grain itself takes a position in other data for its own, so the fingerprints are compared first.

        Raises:
          UserError: the state was made from other questions, or with another seed or number of questions per step.
        """
        saved = state.get("fingerprint")
        if not isinstance(saved, Mapping) or "grain" not in state:
            raise UserError("data: the saved loader state is not one, accepted: fields grain and fingerprint")
        for name, ours in self._fingerprint.items():
            if saved.get(name) != ours:
                what = "other questions or another order of them" if name == "data" else f"{name}={saved.get(name)}"
                now = f"{name} {ours[:12]}" if name == "data" else f"{name}={ours}"
                raise UserError(
                    f"data: the saved position was made with {what}, found {now}; accepted: the same {name} as before"
                )
        self._iterator.set_state(state["grain"])

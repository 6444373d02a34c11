"""Questions kept out of training: a share of a set, and a small selection for validation.

The decision depends only on a hash of a question's (source, id), not on the set's order or other contents, nor on a
seed. A question that one share holds out, every larger share holds out too.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from psearch_jax.types import KINDS, Question, UserError


def place(question: Question) -> float:
    """A hash of a question's source and id in [0, 1); questions below `share` are held out."""
    return int.from_bytes(hashlib.sha256(b"validation" + question.identity).digest()[:7]) / 2**56


class Selection(Sequence[Question]):
    """A subset of a lazily read sequence of questions.

    Args:
      places: the indices of the subset.
      fingerprint: for `QuestionLoader`.
    """

    def __init__(self, questions: Sequence[Question], places: Sequence[int], fingerprint: str):
        self._questions, self._places, self.fingerprint = questions, places, fingerprint

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return self._questions[self._places[place]]


def without_held_out(questions: Sequence[Question], share: float) -> Sequence[Question]:
    """The questions that `hold_out` leaves for training; with `share` 0 all of them, without reading any."""
    if not share:
        return questions
    return _selected(questions, [i for i, question in enumerate(questions) if place(question) >= share], share)


def hold_out(questions: Sequence[Question], share: float) -> tuple[Sequence[Question], list[Question]]:
    """(training questions, held-out questions). Reads every question once.

    Raises:
      UserError: nothing is held out, or nothing is left.
    """
    kept, held = [], []
    for i, question in enumerate(questions):
        if place(question) < share:
            held.append(question)
        else:
            kept.append(i)
    if not held or not kept:
        raise UserError(
            f"config.data.validation_share: {share} of {len(questions)} questions holds out {len(held)} and leaves "
            f"{len(kept)}, accepted: a share that does both"
        )
    return _selected(questions, kept, share), held


def _selected(questions: Sequence[Question], places: Sequence[int], share: float) -> Sequence[Question]:
    if isinstance(questions, list):
        return [questions[i] for i in places]
    return Selection(questions, places, f"{getattr(questions, 'fingerprint', '')} without {share}")


def pick(questions: Iterable[Question], per_kind: int) -> list[Question]:
    """At most `per_kind` questions of every kind, ordered by kind; the choice does not depend on the input order."""
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[question.kind].append(question)
    return [q for kind in KINDS for q in sorted(groups[kind], key=place)[:per_kind]]

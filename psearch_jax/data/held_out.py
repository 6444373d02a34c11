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


def hash_question(question: Question) -> float:
    """A hash of a question's source and id in [0, 1); questions below `share` are held out."""
    return int.from_bytes(hashlib.sha256(b"validation" + question.identity).digest()[:7]) / 2**56


class Selection(Sequence[Question]):
    """Some rows of a lazily read sequence of questions; `fingerprint` is for `QuestionLoader`."""

    def __init__(self, questions: Sequence[Question], rows: Sequence[int], fingerprint: str):
        self._questions, self._rows, self.fingerprint = questions, rows, fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._questions[row] for row in self._rows[index]]
        return self._questions[self._rows[index]]


def hold_out(questions: Sequence[Question], share: float) -> tuple[Sequence[Question], list[Question]]:
    """(training questions, held-out questions). Reads every question once.

    Raises:
      UserError: nothing is held out, or nothing is left.
    """
    kept, held = _divide(questions, share)
    if not held or not kept:
        raise UserError(
            f"config.data.validation_share: {share} of {len(questions)} questions holds out {len(held)} and leaves "
            f"{len(kept)}, accepted: a share that does both"
        )
    return kept, held


def without_held_out(questions: Sequence[Question], share: float) -> Sequence[Question]:
    """The questions that `hold_out` leaves for training; with `share` 0 all of them, without reading any."""
    return _divide(questions, share)[0] if share else questions


def _divide(questions: Sequence[Question], share: float) -> tuple[Sequence[Question], list[Question]]:
    kept, held = [], []
    for i, question in enumerate(questions):
        if hash_question(question) < share:
            held.append(question)
        else:
            kept.append(i)
    if isinstance(questions, list):
        return [questions[i] for i in kept], held
    return Selection(questions, kept, f"{getattr(questions, 'fingerprint', '')} without {share}"), held


def pick(questions: Iterable[Question], per_kind: int) -> list[Question]:
    """At most `per_kind` questions of every kind, ordered by kind; the choice does not depend on the input order."""
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[question.kind].append(question)
    return [q for kind in KINDS for q in sorted(groups[kind], key=hash_question)[:per_kind]]

"""Makes questions from evidence triples [entity, relation, value], as in the rows of 2WikiMultiHopQA.

Comparisons of independent facts (parallel), bridges of two and three hops (sequential), bridges that end in a
comparison (mixed) and single facts. Most sequential questions have a parallel twin with the same opening and
connectives; some of these twins also need facts of the same relations (minimal pairs).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.data.evidence.drawer import Draft, Drawer
from psearch_jax.data.evidence.facts import Evidence, Triple, key
from psearch_jax.data.evidence.forms import FORMS, draw, draw_pair
from psearch_jax.data.evidence.wordings import framed
from psearch_jax.data.sources import loads
from psearch_jax.runtime.paths import locate
from psearch_jax.text.answers import normalise
from psearch_jax.types import Kind, Question, UserError
from retrieval.protocol import Passage

log = logging.getLogger("psearch_jax")
PREFIX = "triples:"
SHARES: dict[Kind, float] = {"parallel": 0.4, "sequential": 0.35, "mixed": 0.15, "single": 0.1}
PAIRED = 0.12  # share of all questions that are the parallel (or sequential) member of a minimal pair
TWINS = 0.2  # share of all questions that are the parallel (or sequential) member of another twin
PLAIN_WEIGHT = 6  # weight of a question without a frame, relative to each frame
MOST_OF_THE_SAME = 3  # at most this number of questions of one form about the same facts
_ACCEPTED = 'rows with metadata.evidences, or ["entity", "relation", "value"], or an object with these three fields'


@dataclass(frozen=True)
class TripleOptions:
    """Options of launch/prepare_data.py for triple sources."""

    count: int = 2000
    seed: int = 0
    corpus: Sequence[Passage] | None = field(default=None, repr=False)


def read_triples(path: str | Path, skipped: list[str] | None = None) -> list[Triple]:
    """The distinct triples of a jsonl file, in order.

    Args:
      path: lines of question rows with `metadata.evidences`, or of bare triples.
      skipped: receives one line per bad row; without it the first bad row is an error.

    Raises:
      UserError: the file is missing, has a malformed line (named by its number), or has no triples.
    """
    path = locate(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file, accepted: jsonl of {_ACCEPTED}")
    triples: dict[Triple, None] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                triples.update(dict.fromkeys(_triples_of(line, f"{path}:{number}")))
            except UserError as error:
                if skipped is None:
                    raise
                skipped.append(str(error))
    if not triples:
        raise UserError(f"{path}: no triples found, accepted: {_ACCEPTED}")
    return list(triples)


def _triples_of(line: bytes, where: str) -> Iterator[Triple]:
    try:
        row = loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON in UTF-8 ({error}), accepted: {_ACCEPTED}") from None
    if not isinstance(row, dict) or "entity" in row:
        yield _triple(row, where)
        return
    metadata = row.get("metadata")
    evidences = metadata.get("evidences") if isinstance(metadata, dict) else None
    if not isinstance(evidences, list):
        raise UserError(f"{where}: field metadata.evidences: {_shown(evidences)} found, accepted: {_ACCEPTED}")
    for evidence in evidences:
        yield _triple(evidence, where)


def _triple(row: Any, where: str) -> Triple:
    parts = [row.get(name) for name in ("entity", "relation", "value")] if isinstance(row, dict) else row
    if not isinstance(parts, list) or len(parts) != 3 or not all(isinstance(p, str) for p in parts):
        raise UserError(f"{where}: {_shown(row)} found, accepted: {_ACCEPTED}")
    # Quotation marks at the ends are remnants of titles cut out of a text.
    entity, relation, value = (" ".join(part.split()).strip('" ') for part in parts)
    if not (entity and relation and value):
        raise UserError(f"{where}: {_shown(row)} found with a blank part, accepted: {_ACCEPTED}")
    return Triple(entity, relation, value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def dependency_rounds(triples: Sequence[Triple]) -> tuple[tuple[Triple, ...], ...]:
    """The triples in the fewest rounds: a triple whose entity is another's value is in a later round than that one.

    Names are compared without case and repeated white space. Triples in a dependency cycle (a spouse's spouse) have no
    order: they share a round, after everything else that they need, and with what depends on them.
    """
    left, rounds = list(dict.fromkeys(triples)), []
    while left:
        free = [t for t in left if not any(o is not t and key(o.value) == key(t.entity) for o in left)]
        free = free or left  # a cycle
        rounds.append(tuple(free))
        left = [t for t in left if t not in free]
    return tuple(rounds)


def make_questions(
    triples: Iterable[Triple], *, seed: int, count: int, corpus: Sequence[Passage] | None, source: str
) -> list[Question]:
    """Questions about the triples, with distinct texts; equal arguments give equal questions.

    `metadata` has `form`, `rounds` (lists of [relation, entity, value], each depending on the previous one), `options`
    (the candidate answers that the question names), `wording` (the id of the template), and `pair` in both members of
    a minimal pair. Logs the number of triples left out, by reason.

    Args:
      count: number of questions; fewer, with a warning, if the triples do not give that many.
      corpus: passages that must state every fact; None: facts are not checked.

    Raises:
      UserError: no question can be made.
    """
    evidence = Evidence(triples, corpus)
    for reason, left_out in evidence.left_out.most_common():
        log.info("%s: %d triples left out: %s", source, left_out, reason)
    questions = _Maker(evidence, seed, source).make(count)
    if not questions:
        raise UserError(f"{source}: no question can be made of {len(evidence.facts)} usable triples")
    if len(questions) < count:
        log.warning("%s: %d questions asked for, %d made", source, count, len(questions))
    return questions


def iter_triple_questions(
    location: str, source: str, options: TripleOptions, skipped: list[str] | None, seen: dict[tuple[str, str], str]
) -> Iterator[Question]:
    """The questions of `triples:FILE`; an id that another source already has is an error."""
    path = location.removeprefix(PREFIX)
    triples = read_triples(path, skipped)
    for question in make_questions(
        triples, seed=options.seed, count=options.count, corpus=options.corpus, source=source
    ):
        identity = (question.source, question.id)
        if identity in seen:
            raise UserError(f"{location}: id {question.id!r} was already used in {seen[identity]}")
        seen[identity] = location
        yield question


def signature(text: str) -> tuple[str, ...]:
    """Surface features of a question: its first two words (a name is `*`), and its connectives."""
    opening = [word if i == 0 or word.islower() or word == "I" else "*" for i, word in enumerate(text.split()[:2])]
    return (*opening, *(word for word in ("or", "and", "both", "either") if re.search(rf"\b{word}\b", text)))


class _Maker:
    def __init__(self, evidence: Evidence, seed: int, source: str):
        self.drawer = Drawer(evidence, np.random.default_rng([seed, 0x7249]))
        self.source = source
        self.made: dict[str, Question] = {}  # by normalised text
        self.uses: Counter[tuple] = Counter()

    def make(self, count: int) -> list[Question]:
        paired, twins = round(PAIRED * count), round(TWINS * count)
        self._repeat(paired, lambda: self._twins(draw_pair(self.drawer), pair=True))
        self._repeat(twins, self._twin_drafts)
        for kind, share in SHARES.items():
            wanted = round(share * count)
            self._repeat(wanted - sum(q.kind == kind for q in self.made.values()), lambda k=kind: self._free(k))
        self._repeat(count - len(self.made), lambda: self._free("parallel"))
        questions = list(self.made.values())[: max(count, 0)]
        return [questions[int(i)] for i in self.drawer.rng.permutation(len(questions))]

    def _repeat(self, wanted: int, attempt: Any) -> None:
        """Repeats until `wanted` attempts succeeded, at most 12 * `wanted` + 40 times."""
        succeeded = 0
        for _ in range(12 * max(wanted, 0) + 40):
            if succeeded >= wanted:
                return
            succeeded += bool(attempt())

    def _form(self, kind: Kind) -> str:
        forms = [name for name, form in FORMS.items() if form.kind == kind]
        shares = np.asarray([FORMS[name].share for name in forms])
        return forms[int(self.drawer.rng.choice(len(forms), p=shares / shares.sum()))]

    def _wordings(self, draft: Draft) -> list[tuple[str, str]]:
        """(wording id, text) of every wording of a draft that is not used yet."""
        if self.uses[self._facts(draft)] >= MOST_OF_THE_SAME:
            return []
        return [(name, text) for core in draft.cores for name, text in framed(core) if self._is_new(text)]

    def _is_new(self, text: str) -> bool:
        return normalise(text) not in self.made

    @staticmethod
    def _facts(draft: Draft) -> tuple:
        return draft.form, tuple(sorted({tuple(fact.lookup) for facts in draft.rounds for fact in facts}))

    def _pick(self, wordings: Sequence[tuple[str, str]]) -> tuple[str, str]:
        weights = np.asarray([PLAIN_WEIGHT if name.endswith(".plain") else 1.0 for name, _ in wordings])
        return wordings[int(self.drawer.rng.choice(len(wordings), p=weights / weights.sum()))]

    def _free(self, kind: Kind) -> bool:
        draft = draw(self.drawer, self._form(kind))
        wordings = self._wordings(draft) if draft else []
        if wordings:
            self._add(draft, self._pick(wordings))
        return bool(wordings)

    def _twin_drafts(self) -> bool:
        sequential = draw(self.drawer, self._form("sequential"))
        parallel = draw(self.drawer, self._form("parallel"))
        return bool(sequential and parallel) and self._twins((sequential, parallel), pair=False)

    def _twins(self, drafts: tuple[Draft, Draft] | None, pair: bool) -> bool:
        """Adds two drafts in wordings with the same signature, if there are any."""
        if drafts is None:
            return False
        first, second = (self._wordings(draft) for draft in drafts)
        wanted = {signature(text) for _, text in second}
        first = [wording for wording in first if signature(wording[1]) in wanted]
        if not first:
            return False
        one = self._pick(first)
        other = self._pick([wording for wording in second if signature(wording[1]) == signature(one[1])])
        name = hashlib.sha256(f"{one[1]}\n{other[1]}".encode()).hexdigest()[:12] if pair else None
        for draft, wording in zip(drafts, (one, other), strict=True):
            self._add(draft, wording, name)
        return True

    def _add(self, draft: Draft, wording: tuple[str, str], pair: str | None = None) -> None:
        name, text = wording
        metadata: dict[str, Any] = {
            "form": draft.form,
            "rounds": [[fact.lookup for fact in facts] for facts in draft.rounds],
            "options": draft.options,
            "wording": name,
        }
        if pair:
            metadata["pair"] = pair
        identifier = f"{draft.form}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        kind = FORMS[draft.form].kind
        self.made[normalise(text)] = Question(self.source, identifier, text, draft.answers, kind, metadata)
        self.uses[self._facts(draft)] += 1

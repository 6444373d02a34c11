"""Scripted transcripts over real passages: a cold start that teaches the grammar but not the strategy.

Whether the facts of a question are searched at once or step by step is decided by `Alternation`, in the same shares
for every kind; then the retrieved facts are stated. The first thought lists the entities and relations of the question
in the same form for every kind. A question is used only if the observations, which may be cut, state every fact, with
the first search split and without: otherwise some kinds would be split more often among the questions that are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from psearch_jax.data.transcripts import TranscriptTurn
from psearch_jax.data.triples import Rounds, Triple, is_stated, rounds_of
from psearch_jax.text.answers import normalise
from psearch_jax.text.tags import MAX_SUB_QUERIES, SEPARATOR, split_sub_queries
from psearch_jax.types import KINDS, Question
from retrieval.protocol import Passage

_SEPARATOR = f" {SEPARATOR} "


@dataclass(frozen=True)
class TranscriptWriter:
    """Writes transcripts over the passages of a retriever, within the budgets of a rollout.

    Attributes:
      search: queries -> a ranking for each.
      observe: queries and their rankings -> the text that a rollout shows of them.
    """

    search: Callable[[Sequence[str]], Sequence[Sequence[Passage]]]
    observe: Callable[[Sequence[str], Sequence[Sequence[Passage]]], str]
    search_turns: int = 3
    max_sub_queries: int = MAX_SUB_QUERIES

    def write(self, question: Question, splits: Collection[bool]) -> dict[bool, list[TranscriptTurn]]:
        """The turns for each of `splits`: with the first search split, or not. {} if one of them is impossible.

        It is if the question has no triples, if it needs more than `search_turns` searches, or if a fact that it
        relies on is not stated in the observation of its search. So with both in `splits`, whether a question is kept
        does not depend on the choice, and the choice reveals nothing about the kind.
        """
        rounds = rounds_of(question)
        written = {split: self._write_turns(question, rounds, split) if rounds else None for split in splits}
        return {split: turns for split, turns in written.items() if turns} if all(written.values()) else {}

    def _write_turns(self, question: Question, rounds: Rounds, split: bool) -> list[TranscriptTurn] | None:
        searches = plan_searches(rounds, split, self.max_sub_queries > 1)
        if len(searches) > self.search_turns:
            return None
        thought, turns = first_thought(rounds), []
        for wanted, facts in searches:
            queries = split_sub_queries(_SEPARATOR.join(wanted), self.max_sub_queries)  # as a rollout, equal ones once
            if not queries or (split and not turns and len(queries) == 1):
                return None
            rankings = tuple(map(tuple, self.search(queries)))
            passages = [normalise(f"{p.title} {p.text}") for ranking in rankings for p in ranking]
            shown = [normalise(self.observe(queries, rankings))]
            # Also in a passage: the observation repeats the queries.
            if not all(is_stated(fact, passages) and is_stated(fact, shown) for fact in facts):
                return None
            text = f"<think>{thought}</think>\n<search>{_SEPARATOR.join(queries)}</search>"
            turns.append(TranscriptTurn(text, queries, rankings))
            thought = " ".join(f"{fact.entity}: {fact.relation} {fact.value}." for fact in facts)
        answer = question.answers[0]
        last = f"<think>{thought} So the answer is {answer}.</think>\n<answer>{answer}</answer>"
        return [*turns, TranscriptTurn(last)]


def first_thought(rounds: Rounds) -> str:
    """The entities and relations of the question, in a form that does not depend on its dependency structure."""
    named = dict.fromkeys(triple.entity for triple in rounds[0])
    asked = dict.fromkeys(triple.relation for r in rounds for triple in r)
    return f"Named: {', '.join(named)}. Asked: {', '.join(asked)}."


def plan_searches(rounds: Rounds, split: bool, several: bool) -> list[tuple[list[str], list[Triple]]]:
    """(sub-queries, the facts that they should retrieve) of every search.

    A split first search covers everything that can be worded. A single known fact is joined by a query for the next
    fact through its path of relations, whose results the transcript does not rely on. Without `several`, every search
    has one sub-query.
    """
    first, *later = rounds
    at_once = several and (split or len(first) > 1)  # the later rounds
    searches = []
    for r, together in ((first, split), *((r, at_once) for r in later)):
        groups = [list(r)] if together else [[triple] for triple in r]
        searches += [([f"{t.entity} {t.relation}" for t in facts], facts) for facts in groups]
    queries, facts = searches[0]
    if split and len(queries) == 1:  # no second independent fact: the next fact by its path, or only the entity
        queries.append(f"{queries[0]} {later[0][0].relation}" if later else facts[0].entity)
    return searches


class Alternation:
    """Decides which questions are split: of the first n of any kind, `share` x n to within one question."""

    def __init__(self, share: float, rng: np.random.Generator):
        self.share = share
        # The decisions that can come: both, unless the share is 0 or 1.
        self.possible = [split for split in (False, True) if share != 1 - split]
        self._start = dict(zip(KINDS, rng.random(len(KINDS)).tolist(), strict=True))
        self._decided: Counter[str] = Counter()

    def next(self, kind: str) -> bool:
        """Whether the next question of this kind is split."""
        done, start = self._decided[kind], self._start[kind]
        self._decided[kind] += 1
        return int((done + 1) * self.share + start) > int(done * self.share + start)


def transcript_row(question: Question, turns: Sequence[TranscriptTurn]) -> dict:
    """A transcript in the format of transcripts.py, JSON-serialisable."""
    rows = []
    for turn in turns:
        rankings = [[{"title": p.title, "text": p.text} for p in ranking] for ranking in turn.passages]
        rows.append({"text": turn.text} | ({"passages": rankings} if turn.queries else {}))
    asked = {"source": question.source, "id": question.id, "kind": question.kind, "question": question.text}
    return {**asked, "golden_answers": list(question.answers), "turns": rows}

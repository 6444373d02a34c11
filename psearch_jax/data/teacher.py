"""Scripted transcripts over real passages: a cold start that teaches the grammar but not the strategy.

A question's evidence triples list the facts to look up. Whether to search for them at once or step by step is decided
by `Alternation`, in the same shares for every kind; then the retrieved facts are stated. The first thought lists the
entities and relations of the question in the same form for every kind, so it does not reveal whether one fact depends
on another. A question is used only if the observations, which may be cut, state every fact that its transcript relies
on, with the first search split and without: otherwise some kinds would be split more often among those that are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from psearch_jax.data.evidence.facts import parse_date
from psearch_jax.data.evidence.triples import Triple, dependency_rounds
from psearch_jax.data.transcripts import TranscriptTurn
from psearch_jax.text.answers import contains_words, normalise
from psearch_jax.text.tags import MAX_SUB_QUERIES, SEPARATOR, split_sub_queries
from psearch_jax.types import KINDS, Question
from retrieval.protocol import Passage

Search = Callable[[Sequence[str]], Sequence[Sequence[Passage]]]  # queries -> a ranking for each
# Queries and their rankings -> the text that a rollout shows of them.
Observe = Callable[[Sequence[str], Sequence[Sequence[Passage]]], str]
Rounds = tuple[tuple[Triple, ...], ...]
_SEPARATOR = f" {SEPARATOR} "


def rounds_of(question: Question) -> Rounds:
    """The triples that a question needs, by rounds; empty if its metadata has neither `rounds` nor `evidences`.

    Evidences that are not all triples of strings count as none: other data sets use the name for something else.
    """
    metadata = question.metadata
    if "rounds" in metadata:  # only questions that this project made have them (data/sources.py)
        return tuple(
            tuple(Triple(entity, relation, value) for relation, entity, value in r) for r in metadata["rounds"]
        )
    evidences = metadata.get("evidences", [])
    if not all(_is_triple(evidence) for evidence in evidences):
        return ()
    return dependency_rounds([Triple(*evidence) for evidence in evidences])


def _is_triple(evidence: object) -> bool:
    return isinstance(evidence, Sequence) and len(evidence) == 3 and all(isinstance(part, str) for part in evidence)


def transcripts(
    question: Question,
    splits: Collection[bool],
    search: Search,
    observe: Observe,
    search_turns: int = 3,
    max_sub_queries: int = MAX_SUB_QUERIES,
) -> dict[bool, list[TranscriptTurn]]:
    """The turns of one question for each of `splits`: with the first search split, or not. {} if one is impossible.

    It is if the question has no triples, if it needs more than `search_turns` searches, or if a fact that it relies on
    is not stated in the observation of its search. So with both in `splits`, whether a question is kept does not
    depend on the choice, and the choice reveals nothing about the kind.
    """
    rounds, written = rounds_of(question), {}
    for split in splits:
        turns = _turns(question, rounds, split, search, observe, search_turns, max_sub_queries) if rounds else None
        if turns is None:
            return {}
        written[split] = turns
    return written


def _turns(
    question: Question,
    rounds: Rounds,
    split: bool,
    search: Search,
    observe: Observe,
    search_turns: int,
    max_sub_queries: int,
) -> list[TranscriptTurn] | None:
    """The turns with the first search split, or not; None as {} in `transcripts`."""
    searches = _searches(rounds, split, max_sub_queries > 1)
    if len(searches) > search_turns:
        return None
    thought, turns = first_thought(rounds), []
    for wanted, facts in searches:
        # As a rollout's: of equal ones only one is kept.
        queries = split_sub_queries(_SEPARATOR.join(wanted), max_sub_queries)
        if not queries or (split and not turns and len(queries) == 1):
            return None
        rankings = tuple(map(tuple, search(queries)))
        texts = [f"{passage.title} {passage.text}" for ranking in rankings for passage in ranking]
        shown = [observe(queries, rankings)]
        # Also in a passage: the observation repeats the queries.
        if not all(_stated(fact, texts) and _stated(fact, shown) for fact in facts):
            return None
        text = f"<think>{thought}</think>\n<search>{_SEPARATOR.join(queries)}</search>"
        turns.append(TranscriptTurn(text, queries, rankings))
        thought = " ".join(f"{fact.entity}: {fact.relation} {fact.value}." for fact in facts)
    answer = question.answers[0]
    last = f"<think>{thought} So the answer is {answer}.</think>\n<answer>{answer}</answer>"
    return [*turns, TranscriptTurn(last)]


class Alternation:
    """Decides which questions are split: of the first n of any kind, `share` x n to within one question."""

    def __init__(self, share: float, rng: np.random.Generator):
        self.share = share
        self._start = dict(zip(KINDS, rng.random(len(KINDS)).tolist(), strict=True))
        self._decided: Counter[str] = Counter()

    @property
    def possible(self) -> list[bool]:
        """The decisions that can come: both, unless the share is 0 or 1."""
        return [split for split in (False, True) if self.share != 1 - split]

    def next(self, kind: str) -> bool:
        """Whether the next question of this kind is split."""
        done, start = self._decided[kind], self._start[kind]
        self._decided[kind] += 1
        return int((done + 1) * self.share + start) > int(done * self.share + start)


def first_thought(rounds: Rounds) -> str:
    """The entities and relations of the question, in a form that does not depend on its dependency structure."""
    named = dict.fromkeys(triple.entity for triple in rounds[0])
    asked = dict.fromkeys(triple.relation for r in rounds for triple in r)
    return f"Named: {', '.join(named)}. Asked: {', '.join(asked)}."


def _searches(rounds: Rounds, split: bool, several: bool) -> list[tuple[list[str], list[Triple]]]:
    """(sub-queries, the facts that they should retrieve) of every search.

    A split first search covers everything that can be worded. A single known fact is joined by a query for the next
    fact through its path of relations, whose results the transcript does not rely on. Without `several`, every search
    has one sub-query.
    """
    first, *later = rounds
    searches: list[tuple[list[str], list[Triple]]] = []
    if split:
        queries = [query_of(triple) for triple in first]
        if len(queries) == 1:  # no second independent fact: the next fact by its path, or only the entity
            path = [first[0].relation, *(r[0].relation for r in later[:1])]
            queries.append(f"{first[0].entity} {' '.join(path)}" if later else first[0].entity)
        searches.append((queries, list(first)))
    else:
        searches += [([query_of(triple)], [triple]) for triple in first]
    for r in later:
        if several and (split or len(first) > 1):
            searches.append(([query_of(triple) for triple in r], list(r)))
        else:
            searches += [([query_of(triple)], [triple]) for triple in r]
    return searches


def query_of(triple: Triple) -> str:
    """The sub-query that looks up one fact."""
    return f"{triple.entity} {triple.relation}"


def _stated(fact: Triple, texts: Sequence[str]) -> bool:
    """Whether one of the texts contains the fact's value, as complete words; a date in any spelling."""
    wanted, texts = list(map(normalise, spellings_of(fact))), list(map(normalise, texts))
    return any(contains_words(text, value) for value in wanted for text in texts)


def spellings_of(fact: Triple) -> tuple[str, ...]:
    """The fact's value as a passage may write it; a date with the day first or the month first."""
    date = parse_date(fact.value)
    return (fact.value, *(date.spellings if date else ()))


def transcript_row(question: Question, turns: Sequence[TranscriptTurn]) -> dict:
    """A transcript in the format of data/transcripts.py, JSON-serialisable."""
    return {
        "source": question.source,
        "id": question.id,
        "kind": question.kind,
        "question": question.text,
        "golden_answers": list(question.answers),
        "turns": [
            {
                "text": turn.text,
                **(
                    {"passages": [[{"title": p.title, "text": p.text} for p in ranking] for ranking in turn.passages]}
                    if turn.queries
                    else {}
                ),
            }
            for turn in turns
        ],
    }

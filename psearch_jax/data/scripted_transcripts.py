"""Scripted transcripts over real passages: a cold start that teaches the grammar but not the strategy.

Whether the facts of a question are searched at once or step by step is decided by `Alternation`, in the same shares
for every kind. The retrieved facts are stated, or compared one after another. The first thought lists the entities
and relations of the question in a form that is drawn without regard to its kind. Some transcripts begin with a search
that finds nothing, which the loss leaves out, and a better one.

A question is used only if the observations, which may be cut, state every fact, with the first search split and
without: otherwise some kinds would be split more often among the questions that are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from psearch_jax.data.transcripts import TranscriptTurn
from psearch_jax.text.answers import contains_words, normalise
from psearch_jax.text.evidence import Rounds, Triple, is_stated, name_key, rounds_of, states
from psearch_jax.text.tags import MAX_SUB_QUERIES, SEPARATOR, split_sub_queries, write_calls
from psearch_jax.types import KINDS, Call, Question, pair_calls
from retrieval.protocol import Passage

_SEPARATOR = f" {SEPARATOR} "
# Wordings of the thoughts. None says whether facts are independent.
PLANS = (
    "Named: {names}. Asked: {relations}.",
    "The question names {names} and asks for {relations}.",
    "Given {names}, I need {relations}.",
    "It is about {names}; wanted: {relations}.",
)
FACTS = ("{0.entity}: {0.relation} {0.value}.", "The {0.relation} of {0.entity} is {0.value}.")
COMPARISONS = ("Compared by {relation}: {compared}.", "By {relation}, one after another: {compared}.")
CONCLUSIONS = ("So the answer is {answer}.", "The answer is {answer}.", "That gives {answer}.")
CORRECTIONS = ("That does not show it. I search again.", "Nothing useful here, so I try other words.")


@dataclass(frozen=True)
class TranscriptWriter:
    """Writes transcripts over the passages of a retriever, within the budgets of a rollout.

    Attributes:
      search: queries -> a ranking for each.
      observe: queries and their rankings -> the text that a rollout shows of them.
      write_calls: searches -> the text of their turn, after its thought.
      fits: whether a rollout has tokens enough for a turn.
      correction_share: share of the transcripts that begin with a search for incomplete names, where it finds no fact.
    """

    search: Callable[[Sequence[str]], Sequence[Sequence[Passage]]]
    observe: Callable[[Sequence[str], Sequence[Sequence[Passage]]], str]
    write_calls: Callable[[Sequence[Call]], str] = write_calls
    fits: Callable[[TranscriptTurn], bool] = lambda turn: True
    search_turns: int = 3
    max_sub_queries: int = MAX_SUB_QUERIES
    correction_share: float = 0.0

    def write(
        self, question: Question, splits: Collection[bool], rng: np.random.Generator
    ) -> dict[bool, list[TranscriptTurn]]:
        """The turns for each of `splits`: with the first search split, or not. {} if one of them is impossible.

        It is if the question has no triples, if it needs more than `search_turns` searches or a turn that does not
        fit, or if a fact that it relies on is not stated in the observation of its search. So with both in `splits`,
        whether a question is kept does not depend on the choice, and the choice reveals nothing about the kind.

        Args:
          rng: draws the wordings of all thoughts, and whether there is a correction; the same for all of `splits`.
        """
        rounds = rounds_of(question)
        wording = Wording.draw(rng)
        corrected = bool(rng.random() < self.correction_share)
        written = {
            split: self._write_turns(question, rounds, split, wording, corrected) if rounds else None
            for split in splits
        }
        return {split: turns for split, turns in written.items() if turns} if all(written.values()) else {}

    def _write_turns(
        self, question: Question, rounds: Rounds, split: bool, wording: Wording, corrected: bool
    ) -> list[TranscriptTurn] | None:
        searches = plan_searches(rounds, split, self.max_sub_queries > 1)
        thought, turns = wording.plan(rounds), []
        if corrected and (turn := self._search_in_vain(thought, *searches[0])):
            turns.append(turn)
            thought = wording.correction
        if len(turns) + len(searches) > self.search_turns:
            return None
        for number, (wanted, facts) in enumerate(searches):
            queries = split_sub_queries(_SEPARATOR.join(wanted), self.max_sub_queries)  # as a rollout, equal ones once
            if not queries or (split and not number and len(queries) == 1):
                return None
            turn = self._search(thought, queries)
            if self._count_shown(turn, facts) < len(facts):
                return None
            turns.append(turn)
            thought = wording.state(facts)
        if len(rounds[-1]) > 1:  # the facts to compare may come from several searches
            compared = compare(rounds[-1], _entity_of(rounds, question.answers[0]), question.text)
            relation = rounds[-1][0].relation
            thought = wording.comparison.format(relation=relation, compared=compared) if compared else thought
        answer = question.answers[0]
        last = f"<think>{thought} {wording.conclusion.format(answer=answer)}</think>\n<answer>{answer}</answer>"
        turns.append(TranscriptTurn(last))
        return turns if all(map(self.fits, turns)) else None

    def _search(self, thought: str, queries: tuple[str, ...]) -> TranscriptTurn:
        text = f"<think>{thought}</think>\n{self.write_calls(pair_calls((), queries))}"
        return TranscriptTurn(text, queries, tuple(map(tuple, self.search(queries))))

    def _count_shown(self, turn: TranscriptTurn, facts: Sequence[Triple]) -> int:
        """How many facts a passage states and the observation shows (which alone may be by its queries)."""
        passages = [passage for ranking in turn.passages for passage in ranking]
        shown = [normalise(self.observe(turn.queries, turn.passages))]
        return sum(any(states(p.title, p.text, fact) for p in passages) and is_stated(fact, shown) for fact in facts)

    def _search_in_vain(self, thought: str, wanted: Sequence[str], facts: Sequence[Triple]) -> TranscriptTurn | None:
        """The search without the first word of each query; None if it has fewer sub-queries or shows a fact."""
        shortened = (query.partition(" ")[2] for query in wanted)
        queries = split_sub_queries(_SEPARATOR.join(shortened), self.max_sub_queries)
        if len(queries) < len(wanted):
            return None
        turn = self._search(thought, queries)
        return None if self._count_shown(turn, facts) else replace(turn, trained=False)


@dataclass(frozen=True)
class Wording:
    """The wording of a transcript's thoughts."""

    first: str
    fact: str
    comparison: str
    conclusion: str
    correction: str

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Wording:
        return cls(*(c[int(rng.integers(len(c)))] for c in (PLANS, FACTS, COMPARISONS, CONCLUSIONS, CORRECTIONS)))

    def plan(self, rounds: Rounds) -> str:
        """The entities and relations of the question, in a form that does not depend on its dependency structure."""
        named = dict.fromkeys(triple.entity for triple in rounds[0])
        asked = dict.fromkeys(triple.relation for r in rounds for triple in r)
        return self.first.format(names=", ".join(named), relations=", ".join(asked))

    def state(self, facts: Sequence[Triple]) -> str:
        return " ".join(self.fact.format(fact) for fact in facts)


def _entity_of(rounds: Rounds, answer: str) -> str:
    """The entity that decides a comparison: the answer, or the value of its fact in an earlier round."""
    earlier = (fact for r in rounds[:-1] for fact in r)
    return next((fact.value for fact in earlier if name_key(fact.entity) == name_key(answer)), answer)


def compare(facts: Sequence[Triple], entity: str, question: str) -> str:
    """The facts one after another: dates with the best so far, other values with the one that the question names.

    The last entity that it names is the one to answer with: a small model cannot point back past several names. Empty
    unless one relation of different entities is compared, one of them `entity`, in one of these two ways.
    """
    names = [name_key(fact.entity) for fact in facts]
    if name_key(entity) not in names or len(set(names)) < len(names) or len({fact.relation for fact in facts}) > 1:
        return ""
    answer = facts[names.index(name_key(entity))]
    if all(fact.date for fact in facts):
        return compare_dates(facts, answer)
    if contains_words(normalise(question), normalise(answer.value)):
        first = [fact.value for fact in facts].index(answer.value)
        others = [f"{fact.entity} {fact.value}, no" for fact in facts[:first]]
        return "; ".join([f"wanted {answer.value}", *others, f"{facts[first].entity} {answer.value}, yes"])
    return ""


def compare_dates(facts: Sequence[Triple], answer: Triple) -> str:
    """Each date is compared with the best one so far; one that is no better is followed by the best one again.

    So a small model can take every decision from the words just before it (docs/results.md compares wordings).

    Args:
      facts: of different entities, with dates as values.
      answer: the one with the earliest or the latest date.
    """
    dates = [fact.date or () for fact in facts]
    by_year = len({date[:1] for date in dates}) == len(dates)
    values = [str(date[0]) if by_year else fact.value for date, fact in zip(dates, facts, strict=True)]
    stated = [f"{fact.entity} {value}" for fact, value in zip(facts, values, strict=True)]
    wanted = "earlier" if facts[dates.index(min(dates))] == answer else "later"
    best, parts = 0, [stated[0]]
    for i in range(1, len(facts)):
        relation = "earlier" if dates[i] < dates[best] else "later"
        verdict = "yes" if relation == wanted else f"no, still {stated[best]}"
        parts.append(f"{stated[i]}, {relation}, wanted {wanted}: {verdict}")
        best = i if relation == wanted else best
    return "; ".join(parts)


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
        untrained = {} if turn.trained else {"train": False}
        rows.append({"text": turn.text} | ({"passages": rankings} if turn.queries else {}) | untrained)
    asked = {"source": question.source, "id": question.id, "kind": question.kind, "question": question.text}
    return {**asked, "golden_answers": list(question.answers), "turns": rows}

"""Whether a rollout's searches follow the dependency plan of its question, edge by edge.

The plan comes from the question's facts (`metadata.rounds` or `metadata.evidences`). Two entities of the same round,
neither of which is a value of the other, are independent and can be searched at once. An entity that is the value of
another entity's fact depends on it and can only be searched afterwards. No binary kind of question is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from psearch_jax.data.triples import name_key, rounds_of, without_parenthesis
from psearch_jax.text.answers import contains_words, normalise
from psearch_jax.types import Question, Trajectory


@dataclass(frozen=True)
class PlanCounts:
    """Pairs of entities of a question's plan, and how many of them a rollout searched as the plan allows."""

    independent: int  # pairs that can be searched at once
    at_once: int  # of these, in different sub-queries of one search
    dependent: int  # pairs of which the second is found through the first
    in_order: int  # of these, the second in a later search than the first


def pairs_of(question: Question) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The independent and the dependent pairs of entities; empty if the question's facts are unknown."""
    rounds = rounds_of(question)
    facts = [fact for r in rounds for fact in r]
    names = {name_key(fact.entity): fact.entity for fact in reversed(facts)}
    keys = [(name_key(fact.entity), name_key(fact.value)) for fact in facts]
    edges = {(entity, value) for entity, value in keys if value in names and value != entity}
    levels: dict[str, int] = {}
    for level, r in enumerate(rounds):
        for fact in r:
            levels.setdefault(name_key(fact.entity), level)
    independent = [
        (names[a], names[b])
        for a, b in combinations(levels, 2)
        if levels[a] == levels[b] and not {(a, b), (b, a)} & edges
    ]
    dependent = [(names[a], names[b]) for a, b in sorted(edges) if levels[a] < levels[b]]
    return independent, dependent


def plan_counts(trajectory: Trajectory) -> PlanCounts:
    """How many pairs of the question's plan the rollout's executed searches follow.

    An entity counts as searched by the first search of which a sub-query contains its name. A pair of which an entity
    was never searched by name is not followed, even if passages about the other one happened to answer the question.
    """
    independent, dependent = pairs_of(trajectory.question)
    places: dict[str, tuple[int, set[int]]] = {}  # entity -> its first search, and the sub-queries there that name it
    for entity in {name for pair in independent + dependent for name in pair}:
        name = normalise(without_parenthesis(entity))
        for search, turn in enumerate(trajectory.executed):
            named = {i for i, query in enumerate(turn.queries) if contains_words(normalise(query), name)}
            if named:
                places[entity] = (search, named)
                break

    def at_once(a: str, b: str) -> bool:
        if a not in places or b not in places or places[a][0] != places[b][0]:
            return False
        return len(places[a][1] | places[b][1]) > 1  # not only one sub-query that names both

    def in_order(a: str, b: str) -> bool:
        return a in places and b in places and places[a][0] < places[b][0]

    return PlanCounts(
        len(independent),
        sum(at_once(a, b) for a, b in independent),
        len(dependent),
        sum(in_order(a, b) for a, b in dependent),
    )

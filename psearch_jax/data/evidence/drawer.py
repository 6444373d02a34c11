"""Random choices among the facts of triples, and phrases that several question forms share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psearch_jax.data.evidence.facts import Evidence, Fact, key
from psearch_jax.data.evidence.wordings import (
    EVENTS,
    RELATIONS,
    Core,
    Orders,
    nouns,
)

SIZES = {2: 0.6, 3: 0.25, 4: 0.15}  # number of entities that a question compares -> frequency
ATTEMPTS = 60
_OF_WORKS = "director performer composer producer country inception".split() + [
    "country of origin",
    "publication date",
]
YES, NO = ("yes",), ("no",)


@dataclass(frozen=True)
class Draft:
    """One question before its wording is chosen: facts by round, answers, named candidates, and all its cores."""

    form: str
    rounds: list[list[Fact]]
    answers: tuple[str, ...]
    cores: list[Core]
    options: list[str] = field(default_factory=list)

    @property
    def relations(self) -> frozenset[str]:
        """The relations of all facts that the question needs."""
        return frozenset(fact.relation for facts in self.rounds for fact in facts)


class Drawer:
    """Samples drafts from checked facts with one random generator."""

    def __init__(self, evidence: Evidence, rng: np.random.Generator):
        self.evidence, self.rng = evidence, rng
        self.relations = list(evidence.by_relation)
        self.dated = [name for name in self.relations if name in EVENTS]
        self.chains = evidence.chains
        self.dated_chains = [chain for chain in self.chains[2] if chain[-1].date]

    def pick(self, items: Sequence) -> Any:
        """One of the items, uniformly; None if there are none."""
        return items[int(self.rng.integers(len(items)))] if items else None

    def coin(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def size(self, most: int = 4) -> int:
        sizes = [size for size in SIZES if size <= most]
        shares = np.asarray([SIZES[size] for size in sizes])
        return int(self.rng.choice(sizes, p=shares / shares.sum()))

    def some(self, items: Sequence, count: int) -> list:
        """Up to `count` different items in random order."""
        return [items[int(i)] for i in self.rng.permutation(len(items))[:count]]

    def relation(self, names: Sequence[str]) -> str | None:
        """One of the relations, weighted by the square root of its number of facts."""
        if not names:
            return None
        weights = np.sqrt([len(self.evidence.by_relation[name]) for name in names])
        return names[int(self.rng.choice(len(names), p=weights / weights.sum()))]

    def facts(self, relation: str | None, count: int) -> list[Fact] | None:
        """`count` facts of a relation about entities whose names can be listed together; None if it has too few."""
        facts = self.some(self.evidence.by_relation.get(relation or "", []), count)
        return facts if len(facts) == count and nameable([f.entity for f in facts]) else None

    def others(self, fact: Fact, count: int) -> list[Fact] | None:
        """Facts of the same relation whose values certainly differ from that of `fact` and from one another."""
        different: list[Fact] = []
        for other in self.some(self.evidence.by_relation[fact.relation], 8 * count + 8):
            taken = any(other.same_value(known) for known in (fact, *different))
            if not taken and key(other.shown) != key(fact.entity) and not self.evidence.mentions(fact.entity, other):
                different.append(other)
            if len(different) == count:
                return different
        return None


def nameable(names: Sequence[str]) -> bool:
    """Whether the names are unambiguous in a list: no duplicates, and no commas within three or more names."""
    return len({key(name) for name in names}) == len(names) and not (len(names) > 2 and any("," in n for n in names))


def cores_of(prefix: str, clauses: Sequence[Orders], polar: bool = False, asserts: bool = True) -> list[Core]:
    """The clauses as cores, numbered."""
    return [Core(f"{prefix}.{i}", *clause, polar, asserts) for i, clause in enumerate(clauses)]


def role(relation: str) -> str:
    """`director`, `date of birth`: the relation as a noun."""
    return RELATIONS[relation].nouns[0].removeprefix("the ").removesuffix(" of {e}")


def about_people(relation: str) -> bool:
    """Whether the entities of a relation are people."""
    return relation not in _OF_WORKS


def ordered_by_date(facts: Sequence[Fact]) -> list[Fact] | None:
    """Facts sorted by date; None if the order of two neighbours is not certain."""
    ordered = sorted(facts, key=lambda fact: fact.date)
    return ordered if all(a.date.before(b.date) for a, b in zip(ordered, ordered[1:], strict=False)) else None


def _subject(chain: Sequence[Fact], variant: int) -> str:
    """The subject of a chain's last fact, described by the facts before it: `the director of A`."""
    phrase = chain[0].entity
    for fact in chain[:-1]:
        phrases = nouns(fact.relation, phrase)
        phrase = phrases[variant % len(phrases)]
    return phrase


def subjects_of(chain: Sequence[Fact]) -> list[str]:
    """Different phrases for the subject of a chain's last fact."""
    return list(dict.fromkeys(_subject(chain, variant) for variant in range(3)))


def same_clauses(phrases: Sequence[Sequence[str]]) -> list[Orders]:
    """Clauses that two things are the same, each described by several phrases."""
    clauses = []
    for a, b in zip(*phrases, strict=False):
        clauses += [(f"is {a} the same as {b}", f"{a} is the same as {b}")]
        clauses += [(f"are {a} and {b} the same", f"{a} and {b} are the same")]
    return clauses


def doubtful(drawer: Drawer, facts: Sequence[Fact]) -> bool:
    """Whether a passage about one entity also mentions the other's value, so that `no` may be wrong."""
    a, b = facts
    return drawer.evidence.mentions(a.entity, b) or drawer.evidence.mentions(b.entity, a)

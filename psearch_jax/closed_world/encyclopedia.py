"""A seeded fictional encyclopedia: people, films and cities, one fact per passage.

Every fact of an entity (a year, or the name of another entity) has its own passage, so a question about two facts
needs two passages, and searching for the question itself finds few of them. Every world samples its own names
(names.py); some entities of different types share a name. One entity in four is held out: training questions never
use it, and evaluation questions use only held-out entities. All passages are in one corpus. Worlds of other seeds are
for cold starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from psearch_jax.closed_world.names import Names, draw_names
from psearch_jax.types import UserError
from retrieval.protocol import Passage

Split = Literal["train", "eval"]

HELD_OUT_SHARE = 0.25
HOMONYM_SHARE = 0.1  # of the films and cities, which share the name of an entity of another type
YEARS = range(1920, 1980)
# Entity type -> attribute -> type of the value.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "person": {"birth year": "year", "hometown": "city", "teacher": "person", "debut": "film"},
    "film": {"release year": "year", "director": "person", "sequel": "film", "setting": "city"},
    "city": {"founding year": "year", "mayor": "person", "rival": "city"},
}
YEAR_OF = {"person": "birth year", "film": "release year", "city": "founding year"}
HAPPENED = {"person": "born", "film": "released", "city": "founded"}  # the event of YEAR_OF


@dataclass(frozen=True)
class Entity:
    """One entity. `facts`: attribute -> value, a year or an entity's id."""

    id: int
    kind: str  # one of ATTRIBUTES
    name: str
    held_out: bool
    facts: dict[str, int]


@dataclass(frozen=True)
class ClosedWorld:
    """All entities of one world, by id."""

    seed: int
    names: Names
    entities: tuple[Entity, ...]

    @classmethod
    def make(
        cls, seed: int = 0, persons: int = 600, films: int = 480, cities: int = 240, names: Names = "known"
    ) -> ClosedWorld:
        """Sample a world. Equal arguments give an equal world on every machine.

        Args:
          names: `new` names occur in no row of any cold start.

        Raises:
          UserError: a type has too few entities to make questions about its held-out ones.
        """
        counts = {"person": persons, "film": films, "city": cities}
        for kind, count in counts.items():
            if count < 30:
                raise UserError(f"closed world: {count} entities of type {kind!r} found, accepted: at least 30")
        rng = np.random.default_rng([seed, 0x31])
        fresh = iter(draw_names(rng, sum(counts.values()), names))
        sides: dict[tuple[str, bool], range] = {}  # (type, held out) -> entity ids
        start = 0
        for kind, count in counts.items():
            seen = round((1 - HELD_OUT_SHARE) * count)
            sides[kind, False], sides[kind, True] = range(start, start + seen), range(start + seen, start + count)
            start += count
        entities: list[Entity] = []
        for (kind, held_out), ids in sides.items():
            used: set[str] = set()
            for i in ids:
                name = next(fresh)
                if kind != "person" and rng.random() < HOMONYM_SHARE:
                    others = sides["person" if kind == "film" else "film", held_out]
                    shared = entities[others[rng.integers(len(others))]].name
                    name = name if shared in used else shared
                used.add(name)
                facts = {}
                for attribute, what in ATTRIBUTES[kind].items():
                    # Relations never cross between held-out and other entities.
                    pool = YEARS if what == "year" else [j for j in sides[what, held_out] if j != i]
                    facts[attribute] = int(pool[rng.integers(len(pool))])
                entities.append(Entity(i, kind, name, held_out, facts))
        return cls(seed, names, tuple(entities))

    def value(self, entity: Entity, attribute: str) -> str:
        """An entity's fact as text: a year or a name."""
        fact = entity.facts[attribute]
        return str(fact) if attribute == YEAR_OF[entity.kind] else self.entities[fact].name

    @cached_property
    def passages(self) -> list[Passage]:
        """One passage of one sentence per fact, facts of held-out entities included."""
        return [
            Passage(f"{e.id}-{attribute}", "", fact_sentence(attribute, e.name, self.value(e, attribute)))
            for e in self.entities
            for attribute in e.facts
        ]

    @cached_property
    def owners(self) -> dict[tuple[str, int], list[Entity]]:
        """(attribute, value) -> the entities with that value."""
        owners: dict[tuple[str, int], list[Entity]] = {}
        for entity in self.entities:
            for attribute, value in entity.facts.items():
                owners.setdefault((attribute, value), []).append(entity)
        return owners

    def members(self, split: Split, kind: str) -> list[Entity]:
        """The entities of a type that questions of a split may use."""
        return [e for e in self.entities if e.kind == kind and e.held_out == (split == "eval")]


def fact_sentence(attribute: str, name: str, value: str) -> str:
    """The sentence of a passage."""
    return f"The {attribute} of {name} is {value}."

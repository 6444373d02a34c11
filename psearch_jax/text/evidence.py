"""Evidence triples [entity, relation, value]: which facts a question needs, and which of them passages state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from psearch_jax.text.answers import contains_words, normalise
from psearch_jax.types import Question, Turn
from retrieval.protocol import Passage

Date = tuple[int, ...]  # year, month, day; or only the year, or year and month
# Formats of dates, and how many parts they state.
_DATE_FORMATS = {"%d %B %Y": 3, "%B %d, %Y": 3, "%d %b %Y": 3, "%b %d, %Y": 3, "%Y-%m-%d": 3, "%B %Y": 2, "%Y": 1}


@dataclass(frozen=True)
class Triple:
    """One evidence triple: the `relation` of `entity` is `value`."""

    entity: str
    relation: str
    value: str

    @property
    def date(self) -> Date | None:
        """The value as a date, if it is one."""
        return parse_date(self.value)

    @property
    def value_spellings(self) -> tuple[str, ...]:
        """The value as a passage may write it; a date with the day first or the month first."""
        date = self.date
        if not date or len(date) < 3:
            return (self.value,)
        month = f"{datetime(date[0], date[1], date[2]):%B}"
        return tuple(dict.fromkeys((self.value, f"{date[2]} {month} {date[0]}", f"{month} {date[2]}, {date[0]}")))


Rounds = tuple[tuple[Triple, ...], ...]


@lru_cache(maxsize=1 << 16)
def parse_date(text: str) -> Date | None:
    """The date that a text consists of; None for ambiguous formats like 4/2/1894, and for years before 1000."""
    for form, parts in _DATE_FORMATS.items():
        try:
            day = datetime.strptime(text.strip(), form)
        except ValueError:
            continue
        return (day.year, day.month, day.day)[:parts]
    return None


def name_key(name: str) -> str:
    """A name normalised for case and white space."""
    return " ".join(name.casefold().split())


def without_parenthesis(title: str) -> str:
    """`Karma (1986 film)` -> `Karma`."""
    return re.sub(r" \([^()]*\)$", "", title)


def is_stated(fact: Triple, texts: Iterable[str]) -> bool:
    """Whether one of the normalised texts contains the fact's value, as complete words; a date in any spelling."""
    values = list(map(normalise, fact.value_spellings))
    return any(contains_words(text, value) for text in texts for value in values)


def states(title: str, text: str, fact: Triple) -> bool:
    """Whether a text contains the fact's value and is about its entity: by its title or, without one, by its words."""
    words, entity = normalise(text), normalise(fact.entity)
    titles = (normalise(title), normalise(without_parenthesis(title)))
    return (entity in titles if title else contains_words(words, entity)) and is_stated(fact, [words])


def find_support(turns: Iterable[Turn], answers: Iterable[str]) -> list[Passage]:
    """The passages whose shown part contains one of the answers: each once, in order of retrieval.

    `yes` and `no` do not count, as any text may contain them.
    """
    golds = [gold for answer in answers if (gold := normalise(answer)) not in ("yes", "no")]
    texts = [(passage, normalise(text)) for turn in turns for passage, text in turn.seen]
    return list({p.id: p for p, text in texts if any(contains_words(text, gold) for gold in golds)}.values())


def rounds_of(question: Question) -> Rounds:
    """The triples that a question needs, by rounds; empty if its metadata has neither `rounds` nor `evidences`.

    `rounds`, of questions that this project made, have triples in the order relation, entity, value.
    """
    if rounds := question.metadata.get("rounds"):
        return tuple(tuple(Triple(entity, relation, value) for relation, entity, value in r) for r in rounds)
    return dependency_rounds([Triple(*evidence) for evidence in question.metadata.get("evidences", [])])


def dependency_rounds(triples: Sequence[Triple]) -> Rounds:
    """The triples in the fewest rounds: a triple whose entity is another's value is in a later round than that one.

    Names are compared without case and repeated white space. Triples in a dependency cycle (a spouse's spouse) have no
    order: they share a round, after everything else that they need, and with what depends on them.
    """
    left, rounds = list(dict.fromkeys(triples)), []
    while left:
        free = [t for t in left if not any(o is not t and name_key(o.value) == name_key(t.entity) for o in left)]
        free = free or left  # a cycle
        rounds.append(tuple(free))
        left = [t for t in left if t not in free]
    return tuple(rounds)

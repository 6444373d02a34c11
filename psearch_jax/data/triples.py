"""Evidence triples [entity, relation, value], as in the rows of 2WikiMultiHopQA: which facts a question needs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from psearch_jax.data.sources import iter_questions
from psearch_jax.text.answers import contains_words, normalise
from psearch_jax.types import Question, UserError
from retrieval.protocol import Passage

Date = tuple[int, ...]  # year, month, day; or only the year, or year and month
# Formats of dates, and how many parts they state.
_DATE_FORMATS = {"%d %B %Y": 3, "%B %d, %Y": 3, "%d %b %Y": 3, "%b %d, %Y": 3, "%Y-%m-%d": 3, "%B %Y": 2, "%Y": 1}
_DESCRIPTION = re.compile(r'"|[?;]|\b(was|died|born)\b|, the ')  # in the place of a name


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
        month = f"{datetime(*date):%B}"
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


def differ(a: Triple, b: Triple) -> bool:
    """Whether two values certainly differ: neither a place within the other, nor a date that is less precise."""
    if a.date and b.date:
        known = min(len(a.date), len(b.date))
        return a.date[:known] != b.date[:known]
    return not set(name_key(a.value).split(", ")) & set(name_key(b.value).split(", "))


def is_stated(fact: Triple, texts: Iterable[str]) -> bool:
    """Whether one of the normalised texts contains the fact's value, as complete words; a date in any spelling."""
    values = list(map(normalise, fact.value_spellings))
    return any(contains_words(text, value) for text in texts for value in values)


def read_triples(path: str | Path, skipped: list[str] | None = None) -> list[Triple]:
    """The distinct triples in `metadata.evidences` of a question file, in order.

    Args:
      skipped: receives one line per bad row; without it the first bad row is an error.

    Raises:
      UserError: as `iter_questions`, and if no question has triples.
    """
    rows = (triple for q in iter_questions(path, None, skipped) for triple in q.metadata.get("evidences", []))
    # Quotation marks at the ends are remnants of titles that were cut out of a text.
    cleaned = ([" ".join(part.split()).strip('" ') for part in row] for row in rows)
    triples = dict.fromkeys(Triple(*parts) for parts in cleaned if all(parts))
    if not triples:
        raise UserError(f"{path}: no evidence triples found, accepted: questions with metadata.evidences")
    return list(triples)


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


def select_stated(triples: Iterable[Triple], corpus: Sequence[Passage]) -> list[Triple]:
    """The triples whose value occurs in the passages with the entity's title.

    Left out are entities whose name several titles share, as `Karma (1986 film)` and another film do.
    """
    triples = list(triples)
    entities, titles = {name_key(t.entity) for t in triples}, defaultdict(set)
    texts: dict[str, list[str]] = defaultdict(list)
    for row in range(len(corpus)):
        passage = corpus[row]
        for name in {name_key(passage.title), name_key(without_parenthesis(passage.title))} & entities:
            titles[name].add(passage.title)
            texts[name].append(normalise(f"{passage.title} {passage.text}"))
    named = [(triple, name_key(triple.entity)) for triple in triples]
    return [triple for triple, name in named if len(titles[name]) == 1 and is_stated(triple, texts[name])]


def without_entities_of(triples: Iterable[Triple], others: Iterable[Triple]) -> list[Triple]:
    """The triples whose entity is not in `others`, as an entity or a value, and whose value is not an entity there."""
    others = list(others)
    entities = {name_key(other.entity) for other in others}
    names = entities | {name_key(other.value) for other in others}
    return [t for t in triples if name_key(t.entity) not in names and name_key(t.value) not in entities]


def select_certain(triples: Iterable[Triple]) -> list[Triple]:
    """The triples, sorted, without descriptions in place of names and entities with several values of a relation."""
    values: dict[tuple[str, str], set[Triple]] = defaultdict(set)
    for triple in triples:
        values[triple.relation, name_key(triple.entity)].add(triple)
    single = sorted((t for (t, *others) in values.values() if not others), key=lambda t: (t.relation, t.entity))
    return [t for t in single if not any(len(n) > 60 or _DESCRIPTION.search(n) for n in (t.entity, t.value))]


def chain_triples(triples: Sequence[Triple]) -> list[tuple[Triple, ...]]:
    """All pairs of triples of which the second's entity is the first's value, and is another entity."""
    about: dict[str, list[Triple]] = defaultdict(list)
    for triple in triples:
        about[name_key(triple.entity)].append(triple)
    chains = ((first, second) for first in triples for second in about.get(name_key(first.value), ()))
    return [(a, b) for a, b in chains if len({name_key(name) for name in (a.entity, a.value, b.value)}) == 3]

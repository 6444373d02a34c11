"""Facts from evidence triples: dates and countries are parsed, doubtful triples are left out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from psearch_jax.data.evidence.wordings import RELATIONS
from retrieval.protocol import Passage

MONTHS = tuple("January February March April May June July August September October November December".split())
# A country's name, then its other names in triples. Questions use only these; constituent nations are left out.
_COUNTRIES = """
United States|American|U.S.|US|USA|United States of America; United Kingdom|British|UK|U.K.|Britain|Great Britain;
France|French; Germany|German; Italy|Italian; Spain|Spanish; Canada|Canadian; Australia|Australian;
Argentina|Argentine|Argentinian; Sweden|Swedish; Austria|Austrian; New Zealand|New Zealander; Poland|Polish;
Denmark|Danish; India|Indian; Greece|Greek; Pakistan|Pakistani; Cuba|Cuban; Philippines|Filipino; Russia|Russian;
Romania|Romanian; Brazil|Brazilian; Japan|Japanese; China|Chinese; Mexico|Mexican; Norway|Norwegian; Finland|Finnish;
Portugal|Portuguese; Hungary|Hungarian; Ireland|Irish; Switzerland|Swiss; Belgium|Belgian; Turkey|Turkish;
Iran|Iranian; South Korea|South Korean; Egypt|Egyptian; Israel|Israeli; Netherlands|Dutch
"""
COUNTRIES: dict[str, tuple[str, ...]] = {
    names[0]: names for names in (tuple(row.strip().split("|")) for row in _COUNTRIES.split(";"))
}
_COUNTRY_OF = {name.casefold(): names[0] for names in COUNTRIES.values() for name in names}
_WITH_ARTICLE = ("United States", "United Kingdom", "Philippines", "Netherlands")
# Adjectives that some triples have instead of a place.
_NO_PLACES = {"roman", "neapolitan", "viennese", "parisian", "punjabi", "english", "scottish", "welsh", "bengali"}
_LONGEST_NAME = 60
LEAST_EQUAL_PAIRS = 3


def key(name: str) -> str:
    """A name normalised for case and white space."""
    return " ".join(name.casefold().split())


@dataclass(frozen=True)
class Triple:
    """One evidence triple: the `relation` of `entity` is `value`."""

    entity: str
    relation: str
    value: str


@dataclass(frozen=True, order=True)
class Date:
    """A date of which the day, or month and day, may be unknown (0)."""

    year: int
    month: int = 0
    day: int = 0

    def before(self, other: Date) -> bool | None:
        """Whether this date is the earlier one; None if they are equal or an unknown part would decide."""
        for mine, theirs in zip((self.year, self.month, self.day), (other.year, other.month, other.day), strict=True):
            if not mine or not theirs:
                return None
            if mine != theirs:
                return mine < theirs
        return None

    @property
    def spellings(self) -> tuple[str, ...]:
        """`4 February 1894` and `February 4, 1894`, or just the known part."""
        if not self.month:
            return (str(self.year),)
        month = MONTHS[self.month - 1]
        if not self.day:
            return (f"{month} {self.year}",)
        return f"{self.day} {month} {self.year}", f"{month} {self.day}, {self.year}"


_MONTH = {name[:3].casefold(): number for number, name in enumerate(MONTHS, 1)}
_DATE_FORMS = (
    r"(?P<day>\d{1,2})(?:st|nd|rd|th)?(?: of)? (?P<name>[A-Za-z]{3,9})\.?,? (?P<year>\d{3,4})",
    r"(?P<name>[A-Za-z]{3,9})\.? (?P<day>\d{1,2})(?:st|nd|rd|th)?,? (?P<year>\d{3,4})",
    r"(?P<name>[A-Za-z]{3,9})\.? (?P<year>\d{3,4})",
    r"(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})",
    r"(?P<year>\d{3,4})",
)
_LENGTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def parse_date(text: str) -> Date | None:
    """The date that a text consists of; None for formats like 4/2/1894, for `c. 1125` and for years BC."""
    text = " ".join(text.split())
    for form in _DATE_FORMS:
        match = re.fullmatch(form, text)
        if match is None:
            continue
        parts = match.groupdict()
        month = int(parts.get("month") or 0)
        if name := parts.get("name"):
            month = _MONTH.get(name[:3].casefold(), 0)
            full = MONTHS[month - 1].casefold()
            if not month or name.casefold() not in (full, full[:3], full[:4]):
                return None
        day = int(parts.get("day") or 0)
        if month > 12 or (parts.get("day") and not 1 <= day <= _LENGTHS[month - 1]):
            return None
        return Date(int(parts["year"]), month, day) if int(parts["year"]) else None
    return None


@dataclass(frozen=True)
class Fact:
    """A triple that questions can use: `shown` is its value as questions write it, `date` the parsed date, if any."""

    triple: Triple
    shown: str
    answers: tuple[str, ...]
    date: Date | None = None

    @property
    def entity(self) -> str:
        return self.triple.entity

    @property
    def relation(self) -> str:
        return self.triple.relation

    @property
    def lookup(self) -> list[str]:
        """[relation, entity, value], as in the metadata of questions."""
        return [self.relation, self.entity, self.triple.value]

    @property
    def on(self) -> str:
        """The value after its preposition: `on 4 February 1894`, `in 1894`."""
        return f"{'on' if self.date and self.date.day else 'in'} {self.shown}"

    def same_value(self, other: Fact) -> bool:
        """Whether both may have the same value: a date known less precisely, or a place within the other's, counts."""
        if self.date and other.date:
            return self.date.before(other.date) is None
        mine, theirs = key(self.shown), key(other.shown)
        place = RELATIONS[self.relation].value == "place"
        return mine == theirs or (place and bool(set(mine.split(", ")) & set(theirs.split(", "))))


def read_fact(triple: Triple) -> Fact | str:
    """The fact in a triple, or the reason why it is left out."""
    relation = RELATIONS.get(triple.relation)
    if relation is None:
        return f"relation {triple.relation} has no wording"
    for name in (triple.entity, triple.value):
        if len(name) > _LONGEST_NAME or re.search(r'"|[?;]|\b(was|died|born)\b|, the ', name):
            return "a name that is a description, or too long"
    value = triple.value
    if relation.value == "date":
        date = parse_date(value)
        return Fact(triple, date.spellings[0], date.spellings, date) if date else "a date that is not clear"
    if relation.value == "country":
        country = _COUNTRY_OF.get(key(value))
        if country is None:
            return "a country without an unambiguous name"
        article = "the " if country in _WITH_ARTICLE else ""
        return Fact(triple, article + country, COUNTRIES[country])
    if relation.value == "place":
        if key(value) in _NO_PLACES or (key(value) in _COUNTRY_OF and value not in COUNTRIES):
            return "an adjective in the place of a place"
        return Fact(triple, value, tuple(dict.fromkeys((value, value.split(",")[0]))))
    return Fact(triple, value, (value,))


def without_parenthesis(title: str) -> str:
    """`Karma (1986 film)` -> `Karma`."""
    return re.sub(r" \([^()]*\)$", "", title)


def names_of(entity: str) -> tuple[str, ...]:
    """The accepted answers for an entity."""
    return tuple(dict.fromkeys((entity, without_parenthesis(entity))))


class Evidence:
    """The facts of some triples, checked against a corpus if there is one.

    `left_out` counts the triples that are left out, by reason.
    """

    def __init__(self, triples: Iterable[Triple], corpus: Sequence[Passage] | None = None):
        self.left_out: Counter[str] = Counter()
        facts: list[Fact] = []
        for triple in sorted(set(triples), key=lambda t: (t.relation, t.entity, t.value)):
            fact = read_fact(triple)
            if isinstance(fact, str):
                self.left_out[fact] += 1
            else:
                facts.append(fact)
        values = defaultdict(set)
        for fact in facts:
            values[fact.relation, key(fact.entity)].add(fact.date or key(fact.shown))
        single = [fact for fact in facts if len(values[fact.relation, key(fact.entity)]) == 1]
        self.left_out["an entity with several values of the relation"] += len(facts) - len(single)
        unique = {(fact.relation, key(fact.entity)): fact for fact in reversed(single)}
        self.left_out["the same fact in another spelling"] += len(single) - len(unique)
        self.facts = list(reversed(unique.values()))
        self._about: dict[str, str] | None = None
        if corpus is not None:
            self._check(corpus)
        self.left_out = +self.left_out

    def _check(self, corpus: Sequence[Passage]) -> None:
        """Removes facts that the passages about their entity do not state."""
        titles: dict[str, set[str]] = defaultdict(set)  # entity -> passage titles that may refer to it
        about: dict[str, list[str]] = defaultdict(list)
        entities = {key(fact.entity) for fact in self.facts}
        for row in range(len(corpus)):
            passage = corpus[row]
            for name in {key(title) for title in names_of(passage.title)} & entities:
                titles[name].add(key(passage.title))
                about[name].append(passage.title + "\n" + passage.text)
        missing = sorted(entities - set(about))
        for row in range(len(corpus)) if missing else ():
            text = key(corpus[row].text)
            for name in missing:
                if name in text and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
                    about[name].append(text)
        self._about = {name: key(" ".join(texts)) for name, texts in about.items()}
        kept = []
        for fact in self.facts:
            name = key(fact.entity)
            if name not in about:
                self.left_out["no passage about the entity"] += 1
            elif len(titles[name]) > 1:
                self.left_out["passages of several titles for the entity"] += 1
            elif not self.mentions(fact.entity, fact):
                self.left_out["no passage about the entity has the value"] += 1
            else:
                kept.append(fact)
        self.facts = kept

    def mentions(self, entity: str, value: Fact) -> bool:
        """Whether the passages about an entity contain a value in any spelling; False without a corpus."""
        text = (self._about or {}).get(key(entity), "")
        return any(re.search(rf"(?<!\w){re.escape(key(answer))}(?!\w)", text) for answer in value.answers)

    @cached_property
    def by_relation(self) -> dict[str, list[Fact]]:
        """The facts by relation."""
        grouped = defaultdict(list)
        for fact in self.facts:
            grouped[fact.relation].append(fact)
        return dict(grouped)

    @cached_property
    def chains(self) -> dict[int, list[tuple[Fact, ...]]]:
        """Chains of length 2 and 3, by length: each fact's entity is the previous fact's value; no entity repeats."""
        about = defaultdict(list)
        for fact in self.facts:
            about[key(fact.entity)].append(fact)
        by_length: dict[int, list[tuple[Fact, ...]]] = {1: [(fact,) for fact in self.facts]}
        for length in (2, 3):
            by_length[length] = [
                (*chain, fact)
                for chain in by_length[length - 1]
                for fact in about[key(chain[-1].triple.value)]
                if key(fact.triple.value) not in {key(link.entity) for link in chain}
            ]
        return {length: by_length[length] for length in (2, 3)}

    @cached_property
    def equal_pairs(self) -> dict[str, list[tuple[Fact, Fact]]]:
        """By relation, pairs of facts with exactly the same value.

        Dates are left out, and so are relations with too few such pairs, whose answers would nearly all be no.
        """
        equal = {}
        for relation, facts in self.by_relation.items():
            if RELATIONS[relation].value == "date":
                continue
            groups = defaultdict(list)
            for fact in facts:
                groups[key(fact.shown)].append(fact)
            pairs = [(a, b) for group in groups.values() for i, a in enumerate(group) for b in group[i + 1 :]]
            if len(pairs) >= LEAST_EQUAL_PAIRS:
                equal[relation] = pairs
        return equal

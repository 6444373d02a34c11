"""The wordings of questions made from evidence triples (triples.py).

A question is a core in two word orders, direct (`where was the director of A born`) and indirect (`where the director
of A was born`), inside a frame (`Tell me {indirect}.`). All forms share the frames and most of the vocabulary, so the
opening of a question does not reveal whether its facts are independent of one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Orders = tuple[str, str]  # one clause, direct and indirect


@dataclass(frozen=True)
class Relation:
    """The wordings of a relation. `{e}`: its entity, `{p}`: the entity with 's, `{x}`: its value, `{on}`: in or on it.

    `value` is the type of the value (person, place, country, date), `nouns` are phrases for it, `checks` state it, and
    `open` asks for it.
    """

    value: str
    nouns: tuple[str, ...]
    checks: tuple[Orders, ...]
    open: tuple[Orders, ...]


@dataclass(frozen=True)
class Event:
    """Phrases to compare dates of a relation: `{a} ... before {b}`, `... first`, and the plural of the event."""

    before: Orders  # with {a}, {b} and {when}: before, after, or "before or after"
    ranked: str  # with {rank}: first or last
    plural: str
    owner: str  # with {rank}: "who was born {rank}", after "the director"


def _is(noun: str) -> Orders:
    return f"is {{x}} {noun}", f"{{x}} is {noun}"


def _which(thing: str, noun: str) -> tuple[Orders, ...]:
    return (
        (f"what is {noun}", f"what {noun} is") if thing != "person" else (f"who is {noun}", f"who {noun} is"),
        (f"which {thing} is {noun}", f"which {thing} is {noun}"),
    )


def _person(role: str, verb: str = "", passive: str = "") -> Relation:
    """A relation whose value is a person; `verb` (past tense) and `passive` if there is one."""
    noun = f"the {role} of {{e}}"
    nouns, checks, asked = [noun, f"{{p}} {role}"], [_is(noun)], [*_which("person", noun)]
    if verb:
        nouns.append(f"the person who {verb} {{e}}")
        checks += [(f"is {{x}} the person who {verb} {{e}}", f"{{x}} {verb} {{e}}")]
        checks += [(f"was {{e}} {passive} by {{x}}", f"{{e}} was {passive} by {{x}}")]
        asked += [(f"who {verb} {{e}}",) * 2, (f"which person {verb} {{e}}",) * 2]
    else:
        checks.append((f"was {{x}} {noun}", f"{{x}} was {noun}"))
        asked += [(f"who was {noun}", f"who {noun} was")]
    return Relation("person", tuple(nouns), tuple(checks), tuple(asked))


def _place(noun: str, be: str, done: str, infinitive: str = "", past: str = "") -> Relation:
    """`be done in X` (was born in), or `did infinitive in X` and `past in X` (did die in, died in)."""
    if infinitive:
        clause, check = f"{{e}} {past}", (f"did {{e}} {infinitive} in {{x}}", f"{{e}} {past} in {{x}}")
        where = f"did {{e}} {infinitive}"
    else:
        clause, check = f"{{e}} {be} {done}", (f"{be} {{e}} {done} in {{x}}", f"{{e}} {be} {done} in {{x}}")
        where = f"{be} {{e}} {done}"
    asked = ((f"where {where}", f"where {clause}"), (f"in which place {where}", f"in which place {clause}"))
    nouns = (f"the {noun} of {{e}}", f"{{p}} {noun}", f"the place where {clause}")
    return Relation("place", nouns, (check, _is(nouns[0])), (*asked, *_which("place", nouns[0])))


def _country(noun: str, be: str, done: str, particle: str) -> Relation:
    check = (f"{be} {{e}} {done}{particle} {{x}}", f"{{e}} {be} {done}{particle} {{x}}")
    which = (f"which country {be} {{e}} {done}{particle}", f"which country {{e}} {be} {done}{particle}")
    nouns = (f"the {noun} of {{e}}", f"{{p}} {noun}")
    return Relation("country", nouns, (check, _is(nouns[0])), (which, *_which("country", nouns[0])))


def _date(noun: str, clause: Orders) -> Relation:
    direct, indirect = clause
    nouns = (f"the date of {noun} of {{e}}", f"{{p}} date of {noun}", f"the date when {indirect}")
    asked = ((f"when {direct}", f"when {indirect}"), *_which("date", nouns[0]))
    return Relation("date", nouns, ((f"{direct} {{on}}", f"{indirect} {{on}}"), _is(nouns[0])), asked)


RELATIONS: dict[str, Relation] = {
    "director": _person("director", "directed", "directed"),
    "performer": _person("performer", "performed", "performed"),
    "composer": _person("composer", "composed", "composed"),
    "producer": _person("producer", "produced", "produced"),
    "father": _person("father"),
    "mother": _person("mother"),
    "spouse": _person("spouse"),
    "place of birth": _place("birthplace", "was", "born"),
    "place of death": _place("place of death", "", "", "die", "died"),
    "place of burial": _place("burial place", "was", "buried"),
    "country of citizenship": _country("country of citizenship", "was", "a citizen ", "of"),
    "country of origin": _country("country of origin", "was", "made ", "in"),
    "country": _country("country", "is", "", "in"),
    "date of birth": _date("birth", ("was {e} born", "{e} was born")),
    "date of death": _date("death", ("did {e} die", "{e} died")),
    "publication date": _date("release", ("was {e} released", "{e} was released")),
    "inception": _date("foundation", ("was {e} founded", "{e} was founded")),
}
EVENTS: dict[str, Event] = {
    "date of birth": Event(
        ("was {a} born {when} {b}", "{a} was born {when} {b}"), "was born {rank}", "births", "who was born {rank}"
    ),
    "date of death": Event(
        ("did {a} die {when} {b}", "{a} died {when} {b}"), "died {rank}", "deaths", "who died {rank}"
    ),
    "publication date": Event(
        ("was {a} released {when} {b}", "{a} was released {when} {b}"),
        "was released {rank}",
        "releases",
        "that was released {rank}",
    ),
    "inception": Event(
        ("was {a} founded {when} {b}", "{a} was founded {when} {b}"),
        "was founded {rank}",
        "foundations",
        "that was founded {rank}",
    ),
}

# In a frame, `whether ` precedes the indirect form of a yes/no question.
FRAMES: dict[str, str] = {
    "plain": "{direct}?",
    "tell": "Tell me {indirect}.",
    "like": "I would like to know {indirect}.",
    "could": "Could you tell me {indirect}?",
    "find": "Please find out {indirect}.",
    "do": "Do you know {indirect}?",
    "say": "Can you say {indirect}?",
    "true": "Is it true that {indirect}?",  # yes/no questions only
}


@dataclass(frozen=True)
class Core:
    """A question without its frame. `polar`: a yes/no question; `asserts`: `Is it true that` fits it."""

    id: str
    direct: str
    indirect: str
    polar: bool = False
    asserts: bool = True


def joined(names: Sequence[str], word: str = "and") -> str:
    """`A and B`, `A, B and C`."""
    return f"{', '.join(names[:-1])} {word} {names[-1]}"


def possessive(phrase: str) -> str:
    """`Ada's`; `James'`."""
    return phrase + ("'" if phrase.endswith("s") else "'s")


def framed(core: Core) -> list[tuple[str, str]]:
    """(wording id, text) of a core in every frame that fits it."""
    texts = []
    for name, frame in FRAMES.items():
        if name == "true" and not (core.polar and core.asserts):
            continue
        whether = "whether " if core.polar and name != "true" else ""
        text = frame.format(direct=core.direct, indirect=whether + core.indirect)
        texts.append((f"{core.id}.{name}", text[0].upper() + text[1:]))
    return texts


def nouns(relation: str, entity: str) -> list[str]:
    """Phrases for the value of a relation, such as `the director of A`.

    A phrase with `of`, or a name with a comma, takes no possessive: `the father of A's mother` is another person than
    the mother of the father of A.
    """
    long = entity.startswith("the ") or " of " in entity or "," in entity
    phrases = [noun for noun in RELATIONS[relation].nouns if not (long and "{p}" in noun)]
    return [noun.format(e=entity, p=possessive(entity)) for noun in phrases]


def checks(relation: str, entity: str, value: str, on: str) -> list[Orders]:
    """Clauses that state a fact, direct and indirect."""
    fill = {"e": entity, "p": possessive(entity), "x": value, "on": on}
    return [(direct.format(**fill), indirect.format(**fill)) for direct, indirect in RELATIONS[relation].checks]


def open_questions_about(relation: str, entity: str) -> list[Orders]:
    """Clauses that ask for the value of a fact, direct and indirect."""
    fill = {"e": entity, "p": possessive(entity)}
    return [(direct.format(**fill), indirect.format(**fill)) for direct, indirect in RELATIONS[relation].open]


def before(relation: str, a: str, b: str, when: str) -> list[Orders]:
    """`was A born before B` and `was it before B that A was born`, direct and indirect."""
    event = EVENTS[relation]
    direct, indirect = (text.format(a=a, b=b, when=when) for text in event.before)
    happened = event.ranked.removesuffix(" {rank}")
    return [(direct, indirect), (f"was it {when} {b} that {a} {happened}", f"it was {when} {b} that {a} {happened}")]


def choices(names: Sequence[str], predicate: str, about_people: bool = False) -> list[Orders]:
    """`which of A and B was born first` in several ways; most have the same word order when asked indirectly."""
    either, both = joined(names, "or"), joined(names)
    asked = (
        *((f"who {predicate}, {either}",) if about_people else (f"which {predicate}, {either}",)),
        f"which of {both} {predicate}",
        f"which one {predicate}, {either}",
        f"which one {predicate} out of {both}",
    )
    embedded = f"which one of {both} {predicate}"
    return [
        *((text, text) for text in asked),
        (f"of {both}, {'who' if about_people else 'which one'} {predicate}", embedded),
        (f"given {both}, which one {predicate}", embedded),
    ]

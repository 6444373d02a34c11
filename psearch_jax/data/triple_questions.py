"""Makes parallel, sequential and single questions from evidence triples.

A question is a clause in two word orders, direct (`where was the director of A born`) and indirect (`where the
director of A was born`), inside a frame (`Tell me {indirect}.`). All forms share the frames and most words. Most
sequential questions have a parallel twin with the same opening and connectives (`Which of A and B was born first?` and
`Which of C and D is the father of the director of E?`), so these hardly reveal whether the facts are independent.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from psearch_jax.data.triples import Triple, chain_triples, is_before, name_key, select_certain, without_parenthesis
from psearch_jax.text.answers import normalise
from psearch_jax.types import Kind, Question, UserError

log = logging.getLogger("psearch_jax")
Clause = tuple[str, str]  # in direct and in indirect word order


class Relation(NamedTuple):
    """How a relation is worded. `predicate` states a value {x}, or that the event of a date happened."""

    value_type: str  # person, place or date
    noun: str
    predicate: str
    question: Clause

    @property
    def is_person(self) -> bool:
        return self.value_type == "person"


RELATIONS = {
    "director": Relation("person", "director", "was directed by {x}", ("who directed {e}",) * 2),
    "performer": Relation("person", "performer", "was performed by {x}", ("who performed {e}",) * 2),
    "composer": Relation("person", "composer", "was composed by {x}", ("who composed {e}",) * 2),
    "producer": Relation("person", "producer", "was produced by {x}", ("who produced {e}",) * 2),
    "father": Relation("person", "father", "had {x} as a father", ("whose child was {e}", "whose child {e} was")),
    "mother": Relation("person", "mother", "had {x} as a mother", ("whose child was {e}", "whose child {e} was")),
    "spouse": Relation("person", "spouse", "was married to {x}", ("who married {e}",) * 2),
    "place of birth": Relation("place", "birthplace", "was born in {x}", ("where was {e} born", "where {e} was born")),
    "place of death": Relation("place", "place of death", "died in {x}", ("where did {e} die", "where {e} died")),
    "place of burial": Relation(
        "place", "burial place", "was buried in {x}", ("where was {e} buried", "where {e} was buried")
    ),
    "date of birth": Relation("date", "date of birth", "was born", ("when was {e} born", "when {e} was born")),
    "date of death": Relation("date", "date of death", "died", ("when did {e} die", "when {e} died")),
    "publication date": Relation(
        "date", "release date", "was released", ("when was {e} released", "when {e} was released")
    ),
    "inception": Relation("date", "foundation date", "was founded", ("when was {e} founded", "when {e} was founded")),
}
FRAMES = (
    "{direct}?",
    "Tell me {indirect}.",
    "I would like to know {indirect}.",
    "Could you tell me {indirect}?",
    "Please find out {indirect}.",
    "Do you know {indirect}?",
)
SIZES = {2: 0.6, 3: 0.25, 4: 0.15}  # number of names to choose from -> frequency
SHARES: dict[Kind, float] = {"parallel": 0.45, "sequential": 0.45, "single": 0.1}
TWINS = 0.35  # share of all questions that are the parallel (or sequential) member of a pair of twins
MOST_PER_FACTS = 3  # at most this number of questions of one form about the same facts


def choose_from(names: Sequence[str], predicate: str, person: bool) -> list[Clause]:
    """`which of A and B was born first`, in several ways; most have the same word order when asked indirectly."""
    *rest, last = names
    both, either, which = f"{', '.join(rest)} and {last}", f"{', '.join(rest)} or {last}", "who" if person else "which"
    same = (f"{which} {predicate}, {either}", f"which of {both} {predicate}", f"which one {predicate}, {either}")
    indirect = f"which one of {both} {predicate}"
    return [
        *((text, text) for text in same),
        (f"of {both}, which one {predicate}", indirect),
        (f"given {both}, which one {predicate}", indirect),
    ]


def name_subject(chain: Sequence[Triple]) -> str:
    """The entity of a chain's last fact, described by the facts before it: `the father of the director of A`."""
    phrase = chain[0].entity
    for fact in chain[:-1]:
        phrase = f"the {RELATIONS[fact.relation].noun} of {phrase}"
    return phrase


@dataclass(frozen=True)
class Draft:
    """A question before its wording is chosen: its facts by round, its answers, and its possible clauses."""

    form: str
    rounds: list[list[Triple]]
    answers: tuple[str, ...]
    clauses: list[Clause]

    @property
    def identity(self) -> tuple:
        """The form and the facts."""
        return self.form, frozenset(fact for facts in self.rounds for fact in facts)

    def word(self) -> list[str]:
        """The question in every wording."""
        texts = [frame.format(direct=d, indirect=i) for d, i in self.clauses for frame in FRAMES]
        return [text[0].upper() + text[1:] for text in texts]


class QuestionMaker:
    """Makes questions about triples with one random generator. A form returns None if the facts drawn do not fit."""

    def __init__(self, triples: Iterable[Triple], rng: np.random.Generator, source: str):
        self.rng, self.source = rng, source
        dated = {name: relation.value_type == "date" for name, relation in RELATIONS.items()}
        facts = [t for t in select_certain(triples) if t.relation in dated and bool(t.date) == dated[t.relation]]
        self.chains = {length: chain_triples(facts, length) for length in (1, 2)}
        self.facts: dict[str, list[Triple]] = {}  # by relation
        for fact in facts:
            self.facts.setdefault(fact.relation, []).append(fact)
        self.made: dict[str, Question] = {}  # by normalised text
        self.uses: Counter[tuple] = Counter()  # questions by form and facts

    # -------------------------------------------------- forms

    def compare(self) -> Draft | None:
        """Which of two to four entities was born, died, was released or was founded first or last?"""
        facts = self.draw_facts(dated=True)
        ordered = sorted(facts, key=lambda fact: fact.date or ())
        if not facts or not all(_differ(a, b) for a, b in zip(ordered, ordered[1:], strict=False)):
            return None
        first, relation = self.rng.random() < 0.5, facts[0].relation
        person = relation in ("date of birth", "date of death")
        clauses: list[Clause] = []
        for rank in ("first", "earliest") if first else ("last", "most recently"):
            clauses += choose_from([f.entity for f in facts], f"{RELATIONS[relation].predicate} {rank}", person)
        return Draft("compare", [facts], _entity_answers(ordered[0 if first else -1]), clauses)

    def has(self) -> Draft | None:
        """Which of two to four entities has this value?"""
        facts = self.draw_facts(dated=False)
        if not facts or not all(_differ(a, b) for a in facts for b in facts if a != b):
            return None
        right, names = self.pick(facts), [fact.entity for fact in facts]
        clauses = choose_from(names, RELATIONS[right.relation].predicate.format(x=right.value), False)
        return Draft("has", [facts], _entity_answers(right), clauses)

    def ask(self, form: str, length: int) -> Draft | None:
        """What is at the end of a chain of `length` facts?"""
        chain = self.pick(self.chains[length])
        if not chain:
            return None
        relation = RELATIONS[chain[-1].relation]
        direct, indirect = (text.format(e=name_subject(chain)) for text in relation.question)
        noun, what = f"the {relation.noun} of {name_subject(chain)}", "who" if relation.is_person else "what"
        clauses = [(direct, indirect), (f"{what} is {noun}", f"{what} {noun} is")]
        return Draft(form, [[fact] for fact in chain], chain[-1].value_spellings, clauses)

    def choose(self, form: str, length: int) -> Draft | None:
        """Which of two to four values is at the end of a chain of `length` facts?"""
        chain = self.pick(self.chains[length])
        if not chain:
            return None
        end, count = chain[-1], self.draw_size()
        options = [end]
        for other in self.shuffle(self.facts[end.relation])[: 8 * count]:
            if len(options) < count and all(_differ(known, other) for known in options):
                options.append(other)
        names, relation = [fact.value for fact in self.shuffle(options)], RELATIONS[end.relation]
        if len(names) < count or not _can_list(names):
            return None
        clauses = choose_from(names, f"is the {relation.noun} of {name_subject(chain)}", relation.is_person)
        return Draft(form, [[fact] for fact in chain], end.value_spellings, clauses)

    # -------------------------------------------------- random choices

    def pick(self, items: Sequence) -> Any:
        """One of the items, uniformly; None if there are none."""
        return items[int(self.rng.integers(len(items)))] if items else None

    def shuffle(self, items: Sequence) -> list:
        return [items[int(i)] for i in self.rng.permutation(len(items))]

    def draw_size(self) -> int:
        return int(self.rng.choice(list(SIZES), p=list(SIZES.values())))

    def draw_facts(self, dated: bool) -> list[Triple]:
        """Two to four facts of one relation; relations are weighted by the square root of their number of facts."""
        relations = [name for name in self.facts if (RELATIONS[name].value_type == "date") == dated]
        weights = np.sqrt([len(self.facts[name]) for name in relations])
        if not relations:
            return []
        relation = relations[int(self.rng.choice(len(relations), p=weights / weights.sum()))]
        facts = self.shuffle(self.facts[relation])[: self.draw_size()]
        return facts if len(facts) > 1 and _can_list([fact.entity for fact in facts]) else []

    def draw(self, kind: Kind) -> Draft | None:
        """A draft of a kind about facts that are not used up; None if many attempts fail."""
        forms = [name for name, form in FORMS.items() if form.kind == kind]
        shares = np.asarray([FORMS[name].share for name in forms])
        for _ in range(20):
            name = forms[int(self.rng.choice(len(forms), p=shares / shares.sum()))]
            draft = FORMS[name].draft(self)
            if draft and self.uses[draft.identity] < MOST_PER_FACTS:
                return draft
        return None

    # -------------------------------------------------- questions

    def make(self, kind: Kind, twin: Kind | None, wanted: int) -> None:
        """Adds questions of a kind until there are `wanted`; stops after 40 attempts in a row that fail.

        With `twin`, each is added together with a question of that kind that has the same signature.
        """
        failures = 0
        while failures < 40 and sum(question.kind == kind for question in self.made.values()) < wanted:
            drafts = [self.draw(kind), self.draw(twin)] if twin else [self.draw(kind)]
            texts = [[t for t in draft.word() if normalise(t) not in self.made] if draft else [] for draft in drafts]
            failures += 1
            if shared := set.intersection(*({signature(text) for text in of} for of in texts)):
                failures, chosen = 0, self.pick(sorted(shared))
                for draft, of in zip(drafts, texts, strict=True):
                    self.add(draft, self.pick([text for text in of if signature(text) == chosen]))

    def add(self, draft: Draft, text: str) -> None:
        """Adds a draft in one of its wordings."""
        rounds = [[[fact.relation, fact.entity, fact.value] for fact in facts] for facts in draft.rounds]
        identifier = f"{draft.form}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        metadata = {"form": draft.form, "rounds": rounds}
        kind = FORMS[draft.form].kind
        self.made[normalise(text)] = Question(self.source, identifier, text, draft.answers, kind, metadata)
        self.uses[draft.identity] += 1


class Form(NamedTuple):
    """A form's kind, its share among the questions of its kind, and the method that drafts it."""

    kind: Kind
    share: float
    draft: Callable[[QuestionMaker], Draft | None]


FORMS = {
    "compare": Form("parallel", 0.5, QuestionMaker.compare),
    "has": Form("parallel", 0.5, QuestionMaker.has),
    "bridge": Form("sequential", 0.2, lambda maker: maker.ask("bridge", 2)),
    "bridge_choose": Form("sequential", 0.8, lambda maker: maker.choose("bridge_choose", 2)),
    "fact": Form("single", 0.5, lambda maker: maker.ask("fact", 1)),
    "fact_choose": Form("single", 0.5, lambda maker: maker.choose("fact_choose", 1)),
}


def make_questions(triples: Iterable[Triple], *, seed: int, count: int, source: str) -> list[Question]:
    """Questions about the triples, with distinct texts; equal arguments give equal questions.

    Raises:
      UserError: no question can be made.
    """
    maker = QuestionMaker(triples, np.random.default_rng([seed, 0x7249]), source)
    maker.make("sequential", "parallel", round(TWINS * count))
    for kind, share in SHARES.items():
        maker.make(kind, None, round(share * count))
    questions = maker.shuffle(list(maker.made.values()))[:count]
    if not questions:
        raise UserError(f"{source}: no question can be made of the triples")
    if len(questions) < count:
        log.warning("%s: %d questions asked for, %d made", source, count, len(questions))
    return questions


def signature(text: str) -> tuple[str, ...]:
    """Surface features of a question: its first two words (a name is `*`), and its connectives."""
    opening = [word if i == 0 or word.islower() or word == "I" else "*" for i, word in enumerate(text.split()[:2])]
    return (*opening, *(word for word in ("or", "and") if re.search(rf"\b{word}\b", text)))


def _differ(a: Triple, b: Triple) -> bool:
    """Whether two values certainly differ: neither a place within the other, nor a date that is less precise."""
    if a.date and b.date:
        return is_before(a.date, b.date) is not None
    return not set(name_key(a.value).split(", ")) & set(name_key(b.value).split(", "))


def _can_list(names: Sequence[str]) -> bool:
    """Whether names are unambiguous in a list: no duplicates, and no commas within three or more names."""
    commas = len(names) > 2 and any("," in name for name in names)
    return len({name_key(name) for name in names}) == len(names) and not commas


def _entity_answers(fact: Triple) -> tuple[str, ...]:
    return tuple(dict.fromkeys((fact.entity, without_parenthesis(fact.entity))))

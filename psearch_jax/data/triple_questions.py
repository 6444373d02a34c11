"""Makes parallel, sequential and single questions from evidence triples.

All forms share their opening phrases (`Tell me: `) and most words. Most sequential questions have a parallel twin with
the same opening and connectives (`Which of A and B was born first?`, `Which of C and D is the father of the director
of E?`), so these hardly reveal whether the facts are independent.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from psearch_jax.data.triples import chain_triples, differ, select_certain
from psearch_jax.text.answers import normalise
from psearch_jax.text.evidence import Triple, name_key, without_parenthesis
from psearch_jax.types import Kind, Question, UserError

log = logging.getLogger("psearch_jax")


class Relation(NamedTuple):
    """How a relation is worded, for an entity {e} and a value {x}; `predicate` of a date: that its event happened."""

    value_type: str  # person, place or date
    noun: str
    predicate: str
    question: str


RELATIONS = {
    "director": Relation("person", "director", "was directed by {x}", "who directed {e}"),
    "performer": Relation("person", "performer", "was performed by {x}", "who performed {e}"),
    "composer": Relation("person", "composer", "was composed by {x}", "who composed {e}"),
    "producer": Relation("person", "producer", "was produced by {x}", "who produced {e}"),
    "father": Relation("person", "father", "had {x} as a father", "who was the father of {e}"),
    "mother": Relation("person", "mother", "had {x} as a mother", "who was the mother of {e}"),
    "spouse": Relation("person", "spouse", "was married to {x}", "who married {e}"),
    "place of birth": Relation("place", "birthplace", "was born in {x}", "where was {e} born"),
    "place of death": Relation("place", "place of death", "died in {x}", "where did {e} die"),
    "place of burial": Relation("place", "burial place", "was buried in {x}", "where was {e} buried"),
    "date of birth": Relation("date", "date of birth", "was born", "when was {e} born"),
    "date of death": Relation("date", "date of death", "died", "when did {e} die"),
    "publication date": Relation("date", "release date", "was released", "when was {e} released"),
    "inception": Relation("date", "foundation date", "was founded", "when was {e} founded"),
}
OPENINGS = ("", "Tell me: ", "I would like to know: ", "Could you tell me: ", "Please find out: ", "Do you know: ")
SIZES = (2, 2, 2, 3, 4)  # default numbers of names to choose from, drawn uniformly
SHARES: dict[Kind, float] = {"parallel": 0.5, "sequential": 0.3, "single": 0.2}
MOST_PER_FACTS = 3  # at most this number of questions of one form about the same facts
TWINS = 0.25  # share of all questions that are the sequential member of a pair of twins; below its share in SHARES
FORMS: dict[Kind, tuple[str, ...]] = {  # drawn uniformly
    "parallel": ("compare", "has"),
    "sequential": ("bridge", *["bridge_choose"] * 4),
    "single": ("fact", "fact_choose"),
}
PAIRED = ("director", "performer", "composer", "producer", "father", "mother")  # the relations of minimal pairs
ALL_FORMS = tuple(dict.fromkeys(form for forms in FORMS.values() for form in forms))
Draft = tuple[Question, list[str], frozenset[Triple]]  # without a text and an id; its possible texts; its facts
Content = tuple[list[list[Triple]], tuple[str, ...], list[str], int]  # rounds, answers, clauses, names to choose from


def make_questions(
    triples: Iterable[Triple],
    *,
    seed: int,
    count: int,
    source: str,
    sizes: Sequence[int] = SIZES,
    forms: Sequence[str] = ALL_FORMS,
    pairs: bool = False,
) -> list[Question]:
    """Questions about the triples, with distinct texts; equal arguments give equal questions.

    Args:
      sizes: numbers of names to choose from, drawn uniformly; each at least 2.
      forms: the forms of FORMS to use. Kinds without any are left out, the others keep their proportions.
      pairs: only minimal pairs (`QuestionMaker.draft_pair`), instead of `forms`.

    Raises:
      UserError: no question can be made.
    """
    maker = QuestionMaker(triples, seed, source, sizes, () if pairs else forms)
    shares = {kind: share for kind, share in SHARES.items() if maker.forms[kind]}
    if pairs:
        maker.add_questions("single", maker.draft_pair, count // 2)
    if "sequential" in shares and "parallel" in shares:
        twins: tuple[Kind, Kind] = ("sequential", "parallel")
        maker.add_questions("sequential", lambda: [maker.draft(kind) for kind in twins], round(TWINS * count))
    for kind, share in shares.items():
        maker.add_questions(kind, lambda kind=kind: [maker.draft(kind)], round(share / sum(shares.values()) * count))
    questions = maker.shuffle(list(maker.made.values()))[:count]
    if not questions:
        raise UserError(f"{source}: no question can be made of the triples")
    if len(questions) < count:
        log.warning("%s: %d questions asked for, %d made", source, count, len(questions))
    return questions


class QuestionMaker:
    """Makes questions about triples with one random generator. A draft is None if the facts drawn do not fit."""

    def __init__(self, triples: Iterable[Triple], seed: int, source: str, sizes: Sequence[int], forms: Sequence[str]):
        self.rng, self.source, self.sizes = np.random.default_rng([seed, 0x7249]), source, sizes
        self.forms = {kind: [form for form in of_kind if form in forms] for kind, of_kind in FORMS.items()}
        dated = {name: relation.value_type == "date" for name, relation in RELATIONS.items()}
        facts = [t for t in select_certain(triples) if t.relation in dated and bool(t.date) == dated[t.relation]]
        self.chains = {"fact": [(fact,) for fact in facts], "bridge": chain_triples(facts)}
        self.facts: dict[str, list[Triple]] = {}  # by relation
        for fact in facts:
            self.facts.setdefault(fact.relation, []).append(fact)
        self.made: dict[str, Question] = {}  # by normalised text
        self.counts: Counter[Kind] = Counter()
        self.uses: Counter[tuple[str, frozenset[Triple]]] = Counter()  # questions by form and facts

    def add_questions(self, kind: Kind, draft: Callable[[], Sequence[Draft | None]], wanted: int) -> None:
        """Adds questions until there are `wanted` of a kind; stops after 40 attempts in a row that fail.

        An attempt adds all drafts that `draft` returns, with the same signature; it fails if one is None, or if they
        have no signature in common.
        """
        failures = 0
        while failures < 40 and self.counts[kind] < wanted:
            failures += 1
            drafts = draft()
            signatures = [{signature(text) for text in drafted[1]} if drafted else set() for drafted in drafts]
            if shared := set.intersection(*signatures):
                failures, chosen = 0, self.pick(sorted(shared))
                for question, texts, facts in filter(None, drafts):
                    form, text = question.metadata["form"], self.pick([t for t in texts if signature(t) == chosen])
                    identifier = f"{form}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
                    self.made[normalise(text)] = replace(question, id=identifier, text=text)
                    self.counts[question.kind] += 1
                    self.uses[form, facts] += 1

    def draft(self, kind: Kind) -> Draft | None:
        """A draft of a kind about facts that are not used up; None if many attempts fail."""
        for _ in range(20):
            form = self.pick(self.forms[kind])
            content = self.draft_parallel(form) if kind == "parallel" else self.draft_chain(form)
            if content and (drafted := self.complete(kind, form, content, OPENINGS)):
                return drafted
        return None

    def complete(self, kind: Kind, form: str, content: Content, openings: Sequence[str]) -> Draft | None:
        """The draft with this content; None if its facts are used up."""
        rounds, answers, clauses, options = content
        facts = frozenset(fact for r in rounds for fact in r)
        if self.uses[form, facts] >= MOST_PER_FACTS:
            return None
        stored = [[[fact.relation, fact.entity, fact.value] for fact in r] for r in rounds]
        texts = [f"{opening}{clause}?" for clause in clauses for opening in openings]
        texts = [text[0].upper() + text[1:] for text in texts]
        chance = 1 / options if options else 0.0  # EM of a random guess
        question = Question(self.source, "", "", answers, kind, {"form": form, "rounds": stored, "chance": chance})
        return question, [text for text in texts if normalise(text) not in self.made], facts

    def draft_pair(self) -> tuple[Draft | None, Draft | None]:
        """A parallel and a single question whose words differ only in the names, and in their order.

        `Which of A, B and C was D the father of?` needs the fathers of A, B and C; `Which of D, E and F was the father
        of A?` only that of A. No parallel question of FORMS has the order of the first.
        """
        facts = self.draw_facts(PAIRED)
        if not facts:
            return None, None
        relation = facts[0].relation
        right, asked, noun = self.pick(facts), self.pick(self.facts[relation]), f"the {RELATIONS[relation].noun} of"
        names, options = [fact.entity for fact in facts], self.draw_options(asked)
        if not options:
            return None, None

        def ask(names: list[str], predicate: str) -> list[str]:  # names after the predicate would read as part of it
            return [clause for clause in choose_from(names, predicate, False) if clause.endswith(predicate)]

        of_which, which = ask(names, f"was {right.value} {noun}"), ask(options, f"was {noun} {asked.entity}")
        parallel: Content = [facts], spell_name(right.entity), of_which, len(names)
        single: Content = [[asked]], asked.value_spellings, which, len(options)
        return self.complete("parallel", "pair", parallel, [""]), self.complete("single", "pair", single, [""])

    def draft_parallel(self, form: str) -> Content | None:
        """Which of several entities was born, died, was released or founded first or last, or has some value?"""
        dated = [name for name, relation in RELATIONS.items() if relation.value_type == "date"]
        facts = self.draw_facts(dated if form == "compare" else RELATIONS.keys() - dated)
        if not facts:
            return None
        names, predicate = [fact.entity for fact in facts], RELATIONS[facts[0].relation].predicate
        if form == "compare":
            first, person = self.rng.random() < 0.5, facts[0].relation in ("date of birth", "date of death")
            right = sorted(facts, key=lambda fact: fact.date or ())[0 if first else -1]
            ranks = ("first", "earliest") if first else ("last", "most recently")
            clauses = [clause for rank in ranks for clause in choose_from(names, f"{predicate} {rank}", person)]
        else:
            right = self.pick(facts)
            clauses = choose_from(names, predicate.format(x=right.value), False)
        return [facts], spell_name(right.entity), clauses, len(names)

    def draft_chain(self, form: str) -> Content | None:
        """What is at the end of a chain of facts, or which of several values is?"""
        chain = self.pick(self.chains[form.removesuffix("_choose")])
        if not chain:
            return None
        end, subject = chain[-1], chain[0].entity
        for fact in chain[:-1]:
            subject = f"the {RELATIONS[fact.relation].noun} of {subject}"
        relation, noun = RELATIONS[end.relation], f"the {RELATIONS[end.relation].noun} of {subject}"
        person = relation.value_type == "person"
        is_choice = form.endswith("_choose")
        names = self.draw_options(end) if is_choice else []
        if is_choice and not names:
            return None
        if is_choice:
            clauses = choose_from(names, f"is {noun}", person)
        else:
            clauses = [relation.question.format(e=subject), f"{'who' if person else 'what'} is {noun}"]
        return [[fact] for fact in chain], end.value_spellings, clauses, len(names)

    def draw_facts(self, relations: Collection[str]) -> list[Triple]:
        """Some facts of one of the relations, with different values; [] if those drawn cannot be listed.

        Relations are weighted by the square root of their number of facts.
        """
        relations = [name for name in self.facts if name in relations]
        if not relations:
            return []
        weights = np.sqrt([len(self.facts[name]) for name in relations])
        relation = relations[int(self.rng.choice(len(relations), p=weights / weights.sum()))]
        order = self.rng.permutation(len(self.facts[relation]))[: self.pick(self.sizes)]
        facts = [self.facts[relation][i] for i in order]
        differing = all(differ(a, b) for a, b in combinations(facts, 2))
        return facts if len(facts) in self.sizes and differing and can_list([fact.entity for fact in facts]) else []

    def draw_options(self, right: Triple) -> list[str]:
        """The value of a fact among values of other facts of its relation; [] if there are too few."""
        options, count = [right], self.pick(self.sizes)
        for other in self.shuffle(self.facts[right.relation], 8 * count):
            if len(options) < count and all(differ(known, other) for known in options):
                options.append(other)
        names = [fact.value for fact in self.shuffle(options)]
        return names if len(names) == count and can_list(names) else []

    def pick(self, items: Sequence) -> Any:
        """One of the items, uniformly; None if there are none."""
        return items[int(self.rng.integers(len(items)))] if items else None

    def shuffle(self, items: Sequence, count: int | None = None) -> list:
        return [items[int(i)] for i in self.rng.permutation(len(items))[:count]]


def choose_from(names: Sequence[str], predicate: str, person: bool) -> list[str]:
    """`which of A and B was born first`, in several ways."""
    *rest, last = names
    both, either, which = f"{', '.join(rest)} and {last}", f"{', '.join(rest)} or {last}", "who" if person else "which"
    return [
        f"{which} {predicate}, {either}",
        f"which of {both} {predicate}",
        f"which one {predicate}, {either}",
        f"of {both}, which one {predicate}",
        f"given {both}, which one {predicate}",
    ]


def signature(text: str) -> tuple[str, ...]:
    """Surface features of a question: its first two words (a name is `*`), and its connectives."""
    opening = [word if i == 0 or word.islower() or word == "I" else "*" for i, word in enumerate(text.split()[:2])]
    return (*opening, *(word for word in ("or", "and") if re.search(rf"\b{word}\b", text)))


def can_list(names: Sequence[str]) -> bool:
    """Whether names are unambiguous in a list: no duplicates, and no commas within three or more names."""
    commas = len(names) > 2 and any("," in name for name in names)
    return len({name_key(name) for name in names}) == len(names) and not commas


def spell_name(name: str) -> tuple[str, ...]:
    """A name, and the same without what is in parentheses."""
    return tuple(dict.fromkeys((name, without_parenthesis(name))))

"""Question forms whose facts are independent of one another, so that all can be searched at once."""

from __future__ import annotations

from collections.abc import Sequence

from psearch_jax.data.evidence.drawer import (
    NO,
    YES,
    Draft,
    Drawer,
    about_people,
    cores_of,
    doubtful,
    nameable,
    ordered_by_date,
    role,
    same_clauses,
)
from psearch_jax.data.evidence.facts import Fact, key, names_of
from psearch_jax.data.evidence.wordings import EVENTS, RELATIONS, Core, before, checks, choices, joined, nouns


def compare(drawer: Drawer) -> Draft | None:
    relation = drawer.relation(drawer.dated)
    facts = drawer.facts(relation, drawer.size())
    ordered = facts and ordered_by_date(facts)
    if not ordered:
        return None
    first, names = drawer.coin(), [fact.entity for fact in facts]
    ranks = ("first", "earliest") if first else ("last", "most recently")
    if len(facts) == 2:
        ranks = ("first", "earlier") if first else ("last", "later")
    predicates = [EVENTS[relation].ranked.format(rank=rank) for rank in ranks]
    clauses = [clause for text in predicates for clause in choices(names, text, about_people(relation))]
    answer = ordered[0 if first else -1].entity
    return Draft("compare", [facts], names_of(answer), cores_of(f"compare.{relation}.{first}", clauses), names)


def compare_date(drawer: Drawer) -> Draft | None:
    relation = drawer.relation(drawer.dated)
    facts = drawer.facts(relation, 2)
    ordered = facts and ordered_by_date(facts)
    if not ordered:
        return None
    first, listed = drawer.coin(), joined([fact.entity for fact in facts])
    rank = "earlier" if first else "later"
    happened, noun = EVENTS[relation].plural, f"the {rank} of the {EVENTS[relation].plural} of {listed}"
    dates = f"the {rank} of the two dates of the {happened} of {listed}"
    clauses = [
        (f"when was {noun}", f"when {noun} was"),
        (f"what is {dates}", f"what {dates} is"),
        (f"which date is {dates}", f"which date is {dates}"),
    ]
    answers = ordered[0 if first else 1].answers
    return Draft("compare_date", [facts], answers, cores_of(f"compare_date.{relation}.{first}", clauses))


def compare_check(drawer: Drawer) -> Draft | None:
    relation = drawer.relation(drawer.dated)
    facts = drawer.facts(relation, 2)
    if not facts or not ordered_by_date(facts):
        return None
    a, b = facts
    when = "before" if drawer.coin() else "after"
    answers = YES if a.date.before(b.date) == (when == "before") else NO
    clauses = before(relation, a.entity, b.entity, when)
    return Draft("compare_check", [facts], answers, cores_of(f"compare_check.{relation}.{when}", clauses, polar=True))


def before_or_after(drawer: Drawer) -> Draft | None:
    relation = drawer.relation(drawer.dated)
    facts = drawer.facts(relation, 2)
    if not facts or not ordered_by_date(facts):
        return None
    a, b = facts
    clauses = before(relation, a.entity, b.entity, "before or after")
    answers = ("before",) if a.date.before(b.date) else ("after",)
    cores = cores_of(f"before_or_after.{relation}", clauses, polar=True, asserts=False)
    return Draft("before_or_after", [facts], answers, cores, ["before", "after"])


def same(drawer: Drawer) -> Draft | None:
    relation = drawer.relation(list(drawer.evidence.equal_pairs))
    if relation is None:
        return None
    wanted, noun = drawer.coin(), role(relation)
    pair = drawer.pick(drawer.evidence.equal_pairs[relation]) if wanted else drawer.facts(relation, 2)
    if not pair or not nameable([fact.entity for fact in pair]):
        return None
    facts = drawer.some(pair, 2)
    if not wanted and (facts[0].same_value(facts[1]) or doubtful(drawer, facts)):
        return None
    a, b = (fact.entity for fact in facts)
    clauses = [
        (f"do {a} and {b} have the same {noun}", f"{a} and {b} have the same {noun}"),
        (f"do both {a} and {b} have the same {noun}", f"both {a} and {b} have the same {noun}"),
        (f"does {a} have the same {noun} as {b}", f"{a} has the same {noun} as {b}"),
        (f"is the {noun} the same for {a} and {b}", f"the {noun} is the same for {a} and {b}"),
        *same_clauses([nouns(relation, a), nouns(relation, b)]),
    ]
    return Draft("same", [facts], YES if wanted else NO, cores_of(f"same.{relation}", clauses, polar=True))


def shared(drawer: Drawer) -> Draft | None:
    relation = drawer.relation(list(drawer.evidence.equal_pairs))
    pair = relation and drawer.pick(drawer.evidence.equal_pairs[relation])
    if not pair or not nameable([fact.entity for fact in pair]):
        return None
    facts = drawer.some(pair, 2)
    listed = joined([fact.entity for fact in facts])
    noun = role(relation)
    thing, what = RELATIONS[relation].value, "who" if RELATIONS[relation].value == "person" else "what"
    clauses = [
        (f"{what} is the {noun} of both {listed}", f"{what} the {noun} of both {listed} is"),
        (f"{what} is the shared {noun} of {listed}", f"{what} the shared {noun} of {listed} is"),
        (f"which {thing} is the {noun} of both {listed}",) * 2,
    ]
    return Draft("shared", [facts], facts[0].answers, cores_of(f"shared.{relation}", clauses))


def _undated(drawer: Drawer) -> list[str]:
    return [name for name in drawer.relations if name not in EVENTS]


def has(drawer: Drawer, relation: str | None = None) -> Draft | None:
    """Which of two to four entities has this value?"""
    relation = relation or drawer.relation(_undated(drawer))
    facts = drawer.facts(relation, drawer.size())
    if not facts or any(a.same_value(b) or doubtful(drawer, (a, b)) for a in facts for b in facts if a != b):
        return None
    right, names = drawer.pick(facts), [fact.entity for fact in facts]
    if key(right.shown) in map(key, names):
        return None
    noun = role(relation)
    predicate = f"{'had' if about_people(relation) else 'has'} {right.shown} as {noun}"
    clauses = choices(names, predicate)
    passive = [indirect for _, indirect in checks(relation, "{e}", right.shown, right.on) if indirect[:4] == "{e} "]
    for clause in passive:
        clauses += choices(names, clause.removeprefix("{e} "))
    listed = joined(names, "or")
    if len(facts) == 2:
        clauses.append((f"is {right.shown} the {noun} of {listed}", f"{right.shown} is the {noun} of {listed}"))
    cores = [
        Core(f"has.{relation}.{i}", *clause, clause[0].startswith("is "), False) for i, clause in enumerate(clauses)
    ]
    return Draft("has", [facts], names_of(right.entity), cores, names)


def two_checks(drawer: Drawer, links: Sequence[Fact] | None, either: bool) -> Draft | None:
    """Are two independent statements both true? With `either`: is one of them? `links`: use the relations of these."""
    pair = links or [drawer.pick(drawer.evidence.by_relation.get(drawer.relation(drawer.relations) or "", []))] * 2
    if pair[0] is None:
        return None
    facts = [drawer.pick(drawer.evidence.by_relation[fact.relation]) for fact in pair]
    if not links:
        facts[1] = drawer.pick(drawer.evidence.facts)
    a, b = facts
    if len({key(a.entity), key(b.entity), key(a.shown), key(b.shown)}) < 4:
        return None
    yes = drawer.coin()
    one_true, none_true = [[True, False], [False, True]], [[False, False]]
    if either:
        true = drawer.pick(one_true if yes else none_true)
    else:
        true = [True, True] if yes else drawer.pick(one_true + none_true)
    asked = []
    for fact, right in zip(facts, true, strict=True):
        said = fact if right else (drawer.others(fact, 1) or [None])[0]
        if said is None:
            return None
        asked.append(checks(fact.relation, fact.entity, said.shown, said.on))
    clauses = []
    for i, first in enumerate(asked[0]):
        for second in asked[1][i % len(asked[1]) :]:
            if either:
                text = f"either {first[1]} or {second[1]}"
                clauses.append((f"is at least one thing true, that {first[1]} or that {second[1]}", text))
            else:
                clauses.append((f"{first[0]}, and {second[0]}", f"{first[1]} and {second[1]}"))
    form = "either_true" if either else "both_true"
    relations = "+".join(fact.relation for fact in facts)
    return Draft(form, [facts], YES if yes else NO, cores_of(f"{form}.{relations}", clauses, polar=True))

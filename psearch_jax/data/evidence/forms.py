"""The forms of questions made from triples: which facts a question needs, its answer, and its wordings (cores)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psearch_jax.data.evidence import parallel as parallel
from psearch_jax.data.evidence.drawer import (
    ATTEMPTS,
    NO,
    YES,
    Draft,
    Drawer,
    cores_of,
    doubtful,
    nameable,
    ordered_by_date,
    role,
    same_clauses,
    subjects_of,
)
from psearch_jax.data.evidence.facts import Fact, key, names_of
from psearch_jax.data.evidence.wordings import (
    EVENTS,
    RELATIONS,
    Orders,
    before,
    checks,
    choices,
    joined,
    nouns,
    open_questions_about,
)
from psearch_jax.types import Kind

# ---------------------------------------------------------------------- sequential, and single


def _rounds(chain: Sequence[Fact]) -> list[list[Fact]]:
    return [[fact] for fact in chain]


def _chain(drawer: Drawer, length: int) -> Sequence[Fact] | None:
    if length == 1:
        fact = drawer.pick(drawer.evidence.by_relation.get(drawer.relation(drawer.relations) or "", []))
        return fact and (fact,)
    return drawer.pick(drawer.chains[length])


def _path(chain: Sequence[Fact]) -> str:
    return "+".join(fact.relation for fact in chain)


def _open(form: str, length: int) -> Callable[[Drawer], Draft | None]:
    def draw(drawer: Drawer) -> Draft | None:
        chain = _chain(drawer, length)
        if chain is None:
            return None
        end = chain[-1]
        clauses = [c for subject in subjects_of(chain) for c in open_questions_about(end.relation, subject)]
        return Draft(form, _rounds(chain), end.answers, cores_of(f"{form}.{_path(chain)}", clauses))

    return draw


def choose(drawer: Drawer, form: str, chain: Sequence[Fact] | None) -> Draft | None:
    """Which of two to four values is at the end of the chain?"""
    wrong = chain and drawer.others(chain[-1], drawer.size() - 1)
    if not wrong:
        return None
    end = chain[-1]
    facts = drawer.some([end, *wrong], len(wrong) + 1)
    names = [fact.shown for fact in facts]
    if len(names) > 2 and any("," in name for name in names):
        return None
    people, listed = RELATIONS[end.relation].value == "person", joined(names, "or")
    clauses: list[Orders] = []
    for subject in subjects_of(chain):
        phrases = nouns(end.relation, subject)
        for noun in phrases:
            clauses += choices(names, f"is {noun}", people)
        direct, indirect = checks(end.relation, subject, listed, joined([fact.on for fact in facts], "or"))[0]
        clauses += [
            (direct, f"whether {indirect}"),
            (f"is {phrases[0]} {listed}", f"whether {phrases[0]} is {listed}"),
        ]
    cores = cores_of(f"{form}.{_path(chain)}", clauses)
    return Draft(form, _rounds(chain), end.answers, cores, names)


def check(drawer: Drawer, form: str, chain: Sequence[Fact] | None, either: bool = False) -> Draft | None:
    """Is this the value at the end of the chain? With `either`: is it one of these two?"""
    wrong = chain and drawer.others(chain[-1], 2)
    if not wrong:
        return None
    end, yes = chain[-1], drawer.coin()
    said = [end if yes else wrong[0], wrong[1]] if either else [end if yes else wrong[0]]
    said = drawer.some(said, len(said))
    clauses: list[Orders] = []
    for subject in subjects_of(chain):
        if either:
            value = "either " + joined([fact.shown for fact in said], "or")
            on = "either " + joined([fact.on for fact in said], "or")
            clauses += checks(end.relation, subject, value, on)
            continue
        clauses += checks(end.relation, subject, said[0].shown, said[0].on)
        phrases = nouns(end.relation, subject)
        clauses += same_clauses([[said[0].shown] * len(phrases), phrases])
        clauses += same_clauses([phrases, [said[0].shown] * len(phrases)])
    return Draft(form, _rounds(chain), YES if yes else NO, cores_of(f"{form}.{_path(chain)}", clauses, polar=True))


def _bridge_year(or_after: bool) -> Callable[[Drawer], Draft | None]:
    """Was the director of A born before 1920? With `or_after`: before or after 1920?"""
    form = "bridge_before_or_after" if or_after else "bridge_before"

    def draw(drawer: Drawer) -> Draft | None:
        chain = drawer.pick(drawer.dated_chains)
        if chain is None:
            return None
        end = chain[-1]
        earlier = drawer.coin()  # whether the fact is earlier than the year in the question
        year = end.date.year + int(drawer.rng.integers(3, 40)) * (1 if earlier else -1)
        if year < 100:
            return None
        when = "before or after" if or_after else drawer.pick(["before", "after"])
        clauses = [c for subject in subjects_of(chain) for c in before(end.relation, subject, str(year), when)]
        if or_after:
            answers, options = ("before",) if earlier else ("after",), ["before", "after"]
        else:
            answers, options = YES if earlier == (when == "before") else NO, []
        cores = cores_of(f"{form}.{_path(chain)}.{when}", clauses, polar=True, asserts=not or_after)
        return Draft(form, _rounds(chain), answers, cores, options)

    return draw


# ---------------------------------------------------------------------- mixed


def _alike(drawer: Drawer, count: int, dated: bool) -> list[tuple[Fact, ...]] | None:
    """`count` chains of the same two relations about different entities. `dated`: whether they end in dates."""
    model = drawer.pick(drawer.chains[2])
    if model is None or bool(model[-1].date) != dated:
        return None
    same = [chain for chain in drawer.chains[2] if _path(chain) == _path(model) and chain[0] != model[0]]
    chains = [model, *drawer.some(same, count - 1)]
    names = {key(name) for chain in chains for name in (chain[0].entity, chain[1].entity)}
    fits = len(chains) == count and len(names) == 2 * count and nameable([chain[0].entity for chain in chains])
    return drawer.some(chains, count) if fits else None


def _levels(chains: Sequence[Sequence[Fact]]) -> list[list[Fact]]:
    return [list(facts) for facts in zip(*chains, strict=True)]


def _bridge_compare(drawer: Drawer) -> Draft | None:
    chains = _alike(drawer, drawer.size(most=3), dated=True)
    ordered = chains and ordered_by_date([chain[1] for chain in chains])
    if not ordered:
        return None
    link, relation = chains[0][0].relation, chains[0][1].relation
    first, names = drawer.coin(), [chain[0].entity for chain in chains]
    ranks = ("first", "earlier" if len(names) == 2 else "earliest") if first else ("last",)
    clauses: list[Orders] = []
    for rank in ranks:
        clauses += choices(names, f"has the {role(link)} {EVENTS[relation].owner.format(rank=rank)}")
    answer = next(chain[0].entity for chain in chains if chain[1] == ordered[0 if first else -1])
    cores = cores_of(f"bridge_compare.{link}+{relation}.{first}", clauses)
    return Draft("bridge_compare", _levels(chains), names_of(answer), cores, names)


def _equal_ends(drawer: Drawer) -> list[tuple[Fact, ...]] | None:
    """Two chains of the same relations that end in the same value, not a date."""
    model = drawer.pick(drawer.chains[2])
    if model is None or model[-1].date:
        return None
    equal = [
        chain
        for chain in drawer.chains[2]
        if _path(chain) == _path(model) and key(chain[1].shown) == key(model[1].shown) and chain[1] != model[1]
    ]
    other = drawer.pick(equal)
    return other and drawer.some([model, other], 2)


def _bridge_same(drawer: Drawer) -> Draft | None:
    wanted = drawer.coin()  # fixed over the attempts, because a `no` succeeds more often
    for _ in range(ATTEMPTS):
        if draft := _bridge_same_as(drawer, wanted):
            return draft
    return None


def _bridge_same_as(drawer: Drawer, wanted: bool) -> Draft | None:
    chains = _equal_ends(drawer) if wanted else _alike(drawer, 2, dated=False)
    if not chains or chains[0][1].relation not in drawer.evidence.equal_pairs:
        return None
    a, b = (chain[1] for chain in chains)
    equal = key(a.shown) == key(b.shown)
    if equal != wanted or (not equal and (a.same_value(b) or doubtful(drawer, (a, b)))):
        return None
    noun, subjects = role(a.relation), [subjects_of(chain) for chain in chains]
    clauses: list[Orders] = []
    for x, y in zip(*subjects, strict=False):
        clauses += [(f"do {x} and {y} have the same {noun}", f"{x} and {y} have the same {noun}")]
        clauses += [(f"does {x} have the same {noun} as {y}", f"{x} has the same {noun} as {y}")]
        clauses += same_clauses([nouns(a.relation, x)[:1], nouns(b.relation, y)[:1]])
    cores = cores_of(f"bridge_same.{_path(chains[0])}", clauses, polar=True)
    return Draft("bridge_same", _levels(chains), YES if equal else NO, cores)


def _bridge_has(drawer: Drawer) -> Draft | None:
    chains = _alike(drawer, drawer.size(most=3), dated=False)
    ends = [chain[1] for chain in chains or ()]
    if not ends or any(a.same_value(b) or doubtful(drawer, (a, b)) for a in ends for b in ends if a != b):
        return None
    right, names = drawer.pick(chains), [chain[0].entity for chain in chains]
    link, end = right[0].relation, right[1]
    clauses = choices(names, f"has a {role(link)} whose {role(end.relation)} is {end.shown}")
    _, clause = checks(end.relation, "{e}", end.shown, end.on)[0]
    if clause.startswith("{e} "):
        clauses += choices(names, f"has a {role(link)} who {clause.removeprefix('{e} ')}")
    cores = cores_of(f"bridge_has.{_path(right)}", clauses)
    return Draft("bridge_has", _levels(chains), names_of(right[0].entity), cores, names)


def _bridge_versus(drawer: Drawer) -> Draft | None:
    chain = drawer.pick(drawer.dated_chains)
    other = chain and drawer.pick(drawer.evidence.by_relation[chain[-1].relation])
    if not other or len({key(n) for n in (chain[0].entity, chain[1].entity, other.entity)}) < 3:
        return None
    link, end = chain
    earlier = end.date.before(other.date)
    if earlier is None:
        return None
    relation, clauses, when = end.relation, [], drawer.pick(["before", "after"])
    for subject in subjects_of(chain):
        clauses += before(relation, subject, other.entity, when)
        swapped = "after" if when == "before" else "before"
        clauses += before(relation, other.entity, subject, swapped)
    yes = earlier == (when == "before")
    cores = cores_of(f"bridge_versus.{_path(chain)}.{when}", clauses, polar=True)
    return Draft("bridge_versus", [[link, other], [end]], YES if yes else NO, cores)


@dataclass(frozen=True)
class Form:
    """A form's kind, its share among the questions of its kind, and the function that samples it."""

    kind: Kind
    share: float
    draw: Callable[[Drawer], Draft | None]


FORMS: dict[str, Form] = {
    "compare": Form("parallel", 0.35, parallel.compare),
    "compare_date": Form("parallel", 0.08, parallel.compare_date),
    "compare_check": Form("parallel", 0.1, parallel.compare_check),
    "before_or_after": Form("parallel", 0.06, parallel.before_or_after),
    "same": Form("parallel", 0.16, parallel.same),
    "shared": Form("parallel", 0.07, parallel.shared),
    "has": Form("parallel", 0.18, parallel.has),
    "both_true": Form("parallel", 0.0, lambda drawer: parallel.two_checks(drawer, None, False)),
    "either_true": Form("parallel", 0.0, lambda drawer: parallel.two_checks(drawer, None, True)),
    "bridge": Form("sequential", 0.35, _open("bridge", 2)),
    "bridge_choose": Form("sequential", 0.25, lambda d: choose(d, "bridge_choose", _chain(d, 2))),
    "bridge_check": Form("sequential", 0.16, lambda d: check(d, "bridge_check", _chain(d, 2))),
    "bridge_either": Form("sequential", 0.0, lambda d: check(d, "bridge_either", _chain(d, 2), True)),
    "bridge_before": Form("sequential", 0.1, _bridge_year(False)),
    "bridge_before_or_after": Form("sequential", 0.06, _bridge_year(True)),
    "chain": Form("sequential", 0.04, _open("chain", 3)),
    "chain_choose": Form("sequential", 0.04, lambda d: choose(d, "chain_choose", _chain(d, 3))),
    "bridge_compare": Form("mixed", 0.4, _bridge_compare),
    "bridge_same": Form("mixed", 0.25, _bridge_same),
    "bridge_has": Form("mixed", 0.15, _bridge_has),
    "bridge_versus": Form("mixed", 0.2, _bridge_versus),
    "fact": Form("single", 0.5, _open("fact", 1)),
    "fact_choose": Form("single", 0.25, lambda d: choose(d, "fact_choose", _chain(d, 1))),
    "fact_check": Form("single", 0.25, lambda d: check(d, "fact_check", _chain(d, 1))),
}


def draw(drawer: Drawer, form: str) -> Draft | None:
    """A draft of the form; None if `ATTEMPTS` attempts fail."""
    for _ in range(ATTEMPTS):
        draft = FORMS[form].draw(drawer)
        if draft is not None:
            return draft
    return None


def draw_pair(drawer: Drawer) -> tuple[Draft, Draft] | None:
    """A sequential and a parallel draft that need facts of the same relations."""
    chain = drawer.pick(drawer.chains[2])
    if chain is None:
        return None
    if len({fact.relation for fact in chain}) == 1:
        bridge, independent = choose(drawer, "bridge_choose", chain), parallel.has(drawer, chain[0].relation)
    else:
        either = drawer.coin()
        form = "bridge_either" if either else "bridge_check"
        bridge, independent = check(drawer, form, chain, either), parallel.two_checks(drawer, chain, either)
    if not bridge or not independent or bridge.relations != independent.relations:
        return None
    return bridge, independent

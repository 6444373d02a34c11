"""Questions about a closed world: facts sampled in the dependency graph of a form (wordings.py), and their wording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, HAPPENED, YEAR_OF, YEARS, ClosedWorld, Entity, Split
from psearch_jax.closed_world.names import head
from psearch_jax.closed_world.wordings import FORMS, fill_wording, join_names
from psearch_jax.types import KINDS, Kind, Question, UserError

SOURCE = "closed_world"
# Number of entities that a question compares -> frequency, in training and in the evaluation set of each kind.
SIZES = {2: 0.5, 3: 0.3, 4: 0.2}
LARGEST = 8
KNOWN_ENTITIES = 20
ATTEMPTS = 200  # to find entities for two relations, before others are drawn
CALCULATION = "calculation"  # the attribute of a look-up that the calculator makes
MOST_YEARS = 30  # between two years of a calculation

Lookup = tuple[str, str, str]  # attribute, subject, value; or CALCULATION, an expression, its value

_OWNER = {attribute: kind for kind, attributes in ATTRIBUTES.items() for attribute in attributes}
_VALUE = {attribute: value for attributes in ATTRIBUTES.values() for attribute, value in attributes.items()}
# Pairs of relations (inner, outer) that a parallel and a sequential question can both ask for. Their values have the
# same type, so a question can compare them; the outer one belongs to that type, so a question can chain them. A
# relation with itself is half as frequent as two, because one search often finds both facts.
SHARED_PAIRS = tuple(
    (inner, outer)
    for outer in _OWNER
    if _VALUE[outer] == _OWNER[outer]
    for inner in _OWNER
    if _VALUE[inner] == _VALUE[outer]
)
_WEIGHTS = np.asarray([0.5 if inner == outer else 1.0 for inner, outer in SHARED_PAIRS])
_SHARED_SHARES = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True)
class QuestionFacts:
    """The facts of one question.

    `rounds`: the look-ups, those of a round being independent; `fills`: values for the letters of the wordings;
    `options`: the names to choose from, in the question's order; `sought`: the value that the looked-up values are
    compared with.
    """

    rounds: list[list[Lookup]]
    fills: dict[str, str]
    answer: str
    options: list[str]
    sought: str = ""


class Asker:
    """Samples questions of one split of a world, form by form, from one random generator."""

    def __init__(self, world: ClosedWorld, split: Split, rng: np.random.Generator, sizes: dict[int, float]):
        self.world, self.rng, self.sizes = world, rng, sizes
        self.held_out = split == "eval"
        self.pools = {kind: world.members(split, kind) for kind in ATTRIBUTES}

    def draw(self, form: str) -> QuestionFacts:
        """The facts of a question of the form; samples that do not fit are drawn again."""
        while True:
            facts = _DRAWS[form](self)
            if facts is not None and _can_tell_apart(facts):
                return facts

    def pick(self, items: Sequence) -> Any:
        """One of the items, uniformly."""
        return items[self.rng.integers(len(items))]

    def flip(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def draw_kind(self) -> str:
        """A random entity type."""
        return self.pick(list(ATTRIBUTES))

    def draw_entity(self, kind: str | None = None) -> Entity:
        """A random entity of a type; default: of a random type."""
        return self.pick(self.pools[kind or self.draw_kind()])

    def draw_entities(self, kind: str, count: int) -> list[Entity]:
        """`count` different entities of a type."""
        pool = self.pools[kind]
        return [pool[i] for i in self.rng.choice(len(pool), count, replace=False)]

    def draw_size(self, most: int = LARGEST) -> int:
        """The number of entities that a question compares, at most `most`."""
        sizes = {n: share for n, share in self.sizes.items() if n <= most}
        return int(self.rng.choice(list(sizes), p=np.divide(list(sizes.values()), sum(sizes.values()))))

    def draw_relation(self, kind: str) -> str:
        """An attribute of a type whose value is an entity."""
        return self.pick([a for a, v in ATTRIBUTES[kind].items() if v != "year"])

    def draw_pair(self) -> tuple[str, str]:
        """One of `SHARED_PAIRS`."""
        return SHARED_PAIRS[self.rng.choice(len(SHARED_PAIRS), p=_SHARED_SHARES)]

    def draw_unordered_pair(self) -> tuple[str, str]:
        """One of `SHARED_PAIRS`, in either order."""
        pair = self.draw_pair()
        return pair if self.flip() else pair[::-1]

    def follow(self, entity: Entity, attribute: str) -> Entity:
        """The entity that a relation leads to."""
        return self.world.entities[entity.facts[attribute]]

    def owners(self, attribute: str, value: int) -> list[Entity]:
        """The entities of this split that have a value for an attribute."""
        return [e for e in self.world.owners.get((attribute, value), ()) if e.held_out == self.held_out]


def _can_tell_apart(facts: QuestionFacts) -> bool:
    """Whether all names in the question and its look-ups begin differently, and no look-up or option repeats."""
    lookups = [lookup for r in facts.rounds for lookup in r]
    names = {*facts.options, facts.sought, *(name for _, *pair in lookups for name in pair)} - {""}
    names = {name for name in names if not name.isdigit()}
    unique = len(set(lookups)) == len(lookups) and len(set(facts.options)) == len(facts.options)
    return unique and len({head(name) for name in names}) == len(names)


def _year(entity: Entity) -> int:
    return entity.facts[YEAR_OF[entity.kind]]


def _year_lookup(entity: Entity) -> Lookup:
    return YEAR_OF[entity.kind], entity.name, str(_year(entity))


def _first(asker: Asker) -> QuestionFacts | None:
    kind = asker.draw_kind()
    chosen = asker.draw_entities(kind, asker.draw_size())
    return _earliest(chosen, chosen, [], {"v": HAPPENED[kind]})


def _first_of(asker: Asker) -> QuestionFacts | None:
    kind = asker.draw_kind()
    attribute = asker.draw_relation(kind)
    chosen = asker.draw_entities(kind, 2)
    reached = [asker.follow(e, attribute) for e in chosen]
    links = [(attribute, e.name, r.name) for e, r in zip(chosen, reached, strict=True)]
    return _earliest(chosen, reached, [links], {"a": attribute, "v": HAPPENED[reached[0].kind]})


def _earliest(
    compared: list[Entity], dated: list[Entity], rounds: list[list[Lookup]], fills: dict[str, str]
) -> QuestionFacts | None:
    """Which of `compared` has the earliest year in `dated`; None if two years are equal."""
    years, names = [_year(e) for e in dated], [e.name for e in compared]
    if len(set(years)) < len(years):
        return None
    return QuestionFacts([*rounds, list(map(_year_lookup, dated))], fills, names[int(np.argmin(years))], names)


def _has(asker: Asker) -> QuestionFacts | None:
    kind = asker.draw_kind()
    return _owner_of(asker, kind, asker.draw_relation(kind), LARGEST)


def _owner_of(asker: Asker, kind: str, attribute: str, most: int) -> QuestionFacts | None:
    """Which of some entities of a type has a value, that of the right one, as an attribute."""
    chosen = asker.draw_entities(kind, asker.draw_size(most))
    values = [asker.world.value(e, attribute) for e in chosen]
    if len(set(values)) < len(values):
        return None
    right = int(asker.rng.integers(len(chosen)))
    names = [e.name for e in chosen]
    lookups = [(attribute, name, value) for name, value in zip(names, values, strict=True)]
    return QuestionFacts([lookups], {"a": attribute, "X": values[right]}, names[right], names, values[right])


def _shares(asker: Asker) -> QuestionFacts | None:
    a, b = asker.draw_unordered_pair()
    for _ in range(ATTEMPTS):
        facts = _owner_of(asker, _OWNER[a], a, most=3)
        if facts is None:
            continue
        right = next(e for e in asker.pools[_OWNER[a]] if e.name == facts.answer)
        owners = [e for e in asker.owners(b, right.facts[a]) if e.name not in facts.options]
        if owners:
            subject = asker.pick(owners).name
            lookups = [*facts.rounds[0], (b, subject, facts.sought)]
            fills = {"a": a, "b": b, "B": subject}
            return QuestionFacts([lookups], fills, facts.answer, facts.options, facts.sought)
    return None


def _same(asker: Asker) -> QuestionFacts | None:
    a, b = asker.draw_unordered_pair()
    equal = asker.flip()
    for _ in range(ATTEMPTS):
        first, second = asker.draw_entity(_OWNER[a]), asker.draw_entity(_OWNER[b])
        if equal:
            owners = [e for e in asker.owners(b, first.facts[a]) if e.id != first.id]
            if not owners:
                continue
            second = asker.pick(owners)
        values = asker.world.value(first, a), asker.world.value(second, b)
        lookups = [(a, first.name, values[0]), (b, second.name, values[1])]
        fills = {"a": a, "b": b, "A": first.name, "B": second.name}
        return QuestionFacts([lookups], fills, "yes" if values[0] == values[1] else "no", [], values[1])
    return None


def _walk(
    asker: Asker, hops: int, attributes: Sequence[str] = ()
) -> tuple[list[list[Lookup]], Entity, dict[str, str]]:
    """A walk over relations: rounds of one look-up each, the final entity, and `fills` of the wording.

    attributes: the relations; default: random ones.
    """
    at = asker.draw_entity(_OWNER[attributes[0]] if attributes else None)
    rounds, fills = [], {"A": at.name}
    for hop, letter in enumerate("abc"[:hops]):
        attribute = attributes[hop] if attributes else asker.draw_relation(at.kind)
        fills[letter] = attribute
        reached = asker.follow(at, attribute)
        rounds.append([(attribute, at.name, reached.name)])
        at = reached
    return rounds, at, fills | {"k": at.kind}


def _name_end(asker: Asker, hops: int) -> QuestionFacts:
    rounds, end, fills = _walk(asker, hops)
    return QuestionFacts(rounds, fills, end.name, [])


def _date_end(asker: Asker, hops: int) -> QuestionFacts:
    rounds, end, fills = _walk(asker, hops)
    return QuestionFacts([*rounds, [_year_lookup(end)]], fills | {"v": HAPPENED[end.kind]}, str(_year(end)), [])


def _choose_end(asker: Asker, hops: int) -> QuestionFacts:
    rounds, end, fills = _walk(asker, hops, asker.draw_pair() if hops == 2 else ())
    names = [end.name, *(asker.draw_entity(end.kind).name for _ in range(asker.draw_size(most=3) - 1))]
    return QuestionFacts(rounds, fills, end.name, [names[i] for i in asker.rng.permutation(len(names))])


def _confirm_end(asker: Asker, hops: int) -> QuestionFacts:
    rounds, end, fills = _walk(asker, hops, asker.draw_pair() if hops == 2 else ())
    asked = end.name if asker.flip() else asker.draw_entity(end.kind).name
    return QuestionFacts(rounds, fills | {"X": asked}, "yes" if asked == end.name else "no", [], asked)


def _same_year(asker: Asker, hops: int) -> QuestionFacts | None:
    rounds, end, fills = _walk(asker, hops)
    if asker.flip():
        other = asker.draw_entity()
    else:
        owners = [e for e in asker.owners(YEAR_OF[asker.draw_kind()], _year(end)) if e.id != end.id]
        if not owners:
            return None
        other = asker.pick(owners)
    first, *later = [*rounds, [_year_lookup(end)]]
    fills |= {"B": other.name, "v": HAPPENED[end.kind], "w": HAPPENED[other.kind]}
    answer = "yes" if _year(end) == _year(other) else "no"
    return QuestionFacts([[*first, _year_lookup(other)], *later], fills, answer, [], str(_year(other)))


def _draw_sum(asker: Asker, end: int) -> tuple[int, Lookup] | None:
    """A number of years, and the sum of a year and that number, which is `end`; None if there is none."""
    number = 2 + int(asker.rng.integers(MOST_YEARS - 1))
    start = end - number
    return (number, (CALCULATION, f"{start} + {number}", str(end))) if start in YEARS else None


def _sum_is(asker: Asker) -> QuestionFacts | None:
    entity = asker.draw_entity()
    end = _year(entity) if asker.flip() else int(asker.pick(YEARS))
    if drawn := _draw_sum(asker, end):
        number, lookup = drawn
        fills = {"A": entity.name, "v": HAPPENED[entity.kind], "n": str(number), "Y": str(end - number)}
        answer = "yes" if _year(entity) == end else "no"
        return QuestionFacts([[_year_lookup(entity), lookup]], fills, answer, [], str(end))
    return None


def _sum_which(asker: Asker) -> QuestionFacts | None:
    kind = asker.draw_kind()
    facts = _owner_of(asker, kind, YEAR_OF[kind], most=3)
    drawn = _draw_sum(asker, int(facts.sought)) if facts else None
    if facts is None or drawn is None:
        return None
    number, lookup = drawn
    fills = {"v": HAPPENED[kind], "n": str(number), "Y": str(int(facts.sought) - number)}
    return QuestionFacts([[*facts.rounds[0], lookup]], fills, facts.answer, facts.options, facts.sought)


def _after(asker: Asker) -> QuestionFacts | None:
    entity, number = asker.draw_entity(), 2 + int(asker.rng.integers(MOST_YEARS - 1))
    end = _year(entity) + number
    if end not in YEARS:
        return None
    rounds = [[_year_lookup(entity)], [(CALCULATION, f"{_year(entity)} + {number}", str(end))]]
    return QuestionFacts(rounds, {"A": entity.name, "v": HAPPENED[entity.kind], "n": str(number)}, str(end), [])


def _until(asker: Asker) -> QuestionFacts | None:
    entity = asker.draw_entity()
    end = int(asker.pick(YEARS))
    fills = {"A": entity.name, "v": HAPPENED[entity.kind], "Y": str(end)}
    return _difference([[_year_lookup(entity)]], fills, _year(entity), end)


def _between(asker: Asker) -> QuestionFacts | None:
    first, second = asker.draw_entity(), asker.draw_entity()
    fills = {"A": first.name, "v": HAPPENED[first.kind], "B": second.name, "w": HAPPENED[second.kind]}
    return _difference([[_year_lookup(first), _year_lookup(second)]], fills, _year(first), _year(second))


def _difference(rounds: list[list[Lookup]], fills: dict[str, str], start: int, end: int) -> QuestionFacts | None:
    if not 2 <= end - start <= MOST_YEARS:
        return None
    answer = str(end - start)
    return QuestionFacts([*rounds, [(CALCULATION, f"{end} - {start}", answer)]], fills, answer, [])


_DRAWS: dict[str, Callable[[Asker], QuestionFacts | None]] = {
    "first": _first,
    "has": _has,
    "shares": _shares,
    "same": _same,
    "same_year": partial(_same_year, hops=0),
    "bridge_name": partial(_name_end, hops=2),
    "bridge_year": partial(_date_end, hops=1),
    "bridge_which": partial(_choose_end, hops=2),
    "bridge_is": partial(_confirm_end, hops=2),
    "chain": partial(_name_end, hops=3),
    "name": partial(_name_end, hops=1),
    "year": partial(_date_end, hops=0),
    "which": partial(_choose_end, hops=1),
    "is": partial(_confirm_end, hops=1),
    "first_of": _first_of,
    "year_of": partial(_same_year, hops=1),
    "sum_is": _sum_is,
    "sum_which": _sum_which,
    "after": _after,
    "until": _until,
    "between": _between,
}


def kind_counts(total: int, shares: dict[Kind, float]) -> dict[Kind, int]:
    """How many of `total` questions are of each kind: the shares, rounded, as long as any are left; `single` the rest.

    Raises `UserError` if the shares sum to more than 1.
    """
    if sum(shares.values()) > 1 + 1e-9:
        raise UserError(f"closed world: shares {', '.join(map(str, shares.values()))} sum to more than 1")
    counts: dict[Kind, int] = {}
    for kind, share in shares.items():
        counts[kind] = min(round(total * share), total - sum(counts.values()))
    return counts | {"single": total - sum(counts.values())}


def calculated_forms(kind: Kind) -> list[str]:
    """The forms of a kind whose questions need the calculator."""
    return [name for name, form in FORMS.items() if form.kind == kind and form.calculated]


def questions(
    world: ClosedWorld,
    split: Split,
    kind: Kind,
    count: int,
    seed: int,
    forms: Sequence[str] = (),
    sizes: dict[int, float] | None = None,
    held_out_wordings: bool = False,
) -> list[Question]:
    """`count` different questions of a kind; equal arguments give equal questions.

    `metadata` has what the scripted teacher needs: `form`; `rounds`, lists of [attribute, subject, value], each
    depending on the previous one; `options`, the names to choose from; `sought`, the value to compare with; `chance`,
    the EM of a random guess among the possible answers.

    Args:
      forms: names in `wordings.FORMS`, sampled by their shares; default: all of the kind that need no calculator
        (`train`: only trained ones).
      sizes: number of entities that a question compares -> frequency; default `SIZES`.
      held_out_wordings: use only wordings that no training question has.

    Raises:
      UserError: arguments that are not accepted, or fewer questions exist than requested.
    """
    if split not in ("train", "eval") or kind not in KINDS:
        raise UserError(f"closed world: no questions of split {split!r}, kind {kind!r} (train|eval; {KINDS})")
    of_kind = {name: form for name, form in FORMS.items() if form.kind == kind and not form.calculated}
    chosen = list(forms) or [name for name, form in of_kind.items() if split == "eval" or form.trained]
    if any(FORMS[name].kind != kind for name in chosen):
        raise UserError(f"closed world: forms {', '.join(chosen)} are not of kind {kind!r}")
    rng = np.random.default_rng([world.seed, seed, 0x02, KINDS.index(kind), split == "eval", held_out_wordings])
    asker = Asker(world, split, rng, sizes or SIZES)
    shares = np.asarray([FORMS[name].share for name in chosen])
    made: dict[str, Question] = {}
    for _ in range(20 * count + 100):
        if len(made) == count:
            break
        name = chosen[rng.choice(len(chosen), p=shares / shares.sum())]
        form, facts = FORMS[name], asker.draw(name)
        asked = _question(split, name, facts, asker.pick(form.held_out if held_out_wordings else form.known))
        made.setdefault(asked.text, asked)
    if len(made) < count:
        raise UserError(f"closed world: {count} {split} questions of kind {kind!r} asked, {len(made)} exist")
    return list(made.values())


def known_questions(world: ClosedWorld, held_out_wordings: bool = False) -> list[Question]:
    """Every wording of every fact of the world's first `KNOWN_ENTITIES` people.

    For world 0, a cold start states these facts outright, so a policy can know them without a search.
    """
    made = []
    for entity in world.members("train", "person")[:KNOWN_ENTITIES]:
        for attribute in entity.facts:
            value = world.value(entity, attribute)
            form, fills = "year", {"A": entity.name, "v": HAPPENED[entity.kind]}
            if attribute != YEAR_OF[entity.kind]:
                form, fills = "name", {"A": entity.name, "a": attribute, "k": ATTRIBUTES[entity.kind][attribute]}
            facts = QuestionFacts([[(attribute, entity.name, value)]], fills, value, [])
            wordings = FORMS[form].held_out if held_out_wordings else FORMS[form].known
            made += [_question("train", form, facts, wording) for wording in wordings]
    return made


def _question(split: Split, form: str, facts: QuestionFacts, wording: str) -> Question:
    text = fill_wording(wording, facts.fills | ({"l": join_names(facts.options)} if facts.options else {}))
    metadata = {
        "form": form,
        "rounds": [[list(lookup) for lookup in r] for r in facts.rounds],
        "options": facts.options,
        "sought": facts.sought,
        "chance": 0.5 if facts.answer in ("yes", "no") else 1 / len(facts.options) if facts.options else 0.0,
    }
    return Question(SOURCE, f"{split}-{form}-{text}", text, (facts.answer,), FORMS[form].kind, metadata)

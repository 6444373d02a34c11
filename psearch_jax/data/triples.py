"""Evidence triples from the rows of question files, as 2WikiMultiHopQA has them, and those to make questions of."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from psearch_jax.data.sources import iter_questions
from psearch_jax.text.answers import normalise
from psearch_jax.text.evidence import Triple, is_stated, name_key, without_parenthesis
from psearch_jax.types import UserError
from retrieval.protocol import Passage

_DESCRIPTION = re.compile(r'"|[?;]|\b(was|died|born)\b|, the ')  # in the place of a name


def differ(a: Triple, b: Triple) -> bool:
    """Whether two values certainly differ: neither a place within the other, nor a date that is less precise."""
    if a.date and b.date:
        known = min(len(a.date), len(b.date))
        return a.date[:known] != b.date[:known]
    return not set(name_key(a.value).split(", ")) & set(name_key(b.value).split(", "))


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

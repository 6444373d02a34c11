"""Exercises for the cold start: rows that train the skills of trajectories, many examples per row.

A trajectory has one conclude and two or three names among a hundred tokens, too few to learn copying or comparing
within a cold start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from experiments.toy.scripted import compare, find_least
from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, YEARS, fact_sentence
from psearch_jax.closed_world.names import draw_names
from psearch_jax.data.transcripts import Row

Encode = Callable[[str], list[int]]


def copying(rng: np.random.Generator, encode: Encode) -> Row:
    """Names, some followed by a year; then all again in the same order, then some in random order.

    The loss covers the copies. Of the randomly ordered ones it skips the first token, which says which item follows.
    The number of items and their separators vary, so positions do not predict the next token.
    """
    names = draw_names(rng, 3 + int(rng.integers(6)), "known")
    items = [f" {name}" if rng.random() < 0.5 else f" {name} {_year(rng)}" for name in names]
    items = [item + _MARKS[rng.integers(len(_MARKS))] for item in items]
    parts: list[tuple[str, bool | int]] = [("".join(items), False), ("".join(items), True)]
    parts += [(items[i], 1) for i in rng.integers(len(items), size=6)]
    return _encode_parts(parts, encode)


_MARKS = ("", " ;", ",", " and", " is", ".\n", " vs", " ##")


def looking_up(rng: np.random.Generator, encode: Encode) -> Row:
    """Passages, then the same facts asked for in another order; the loss covers the values."""
    names = draw_names(rng, 7, "known")
    subjects, values = names[:3], names[3:]
    facts = []
    for subject in subjects:
        kind = list(ATTRIBUTES)[rng.integers(len(ATTRIBUTES))]
        for attribute in rng.permutation(list(ATTRIBUTES[kind]))[:2].tolist():
            dated = ATTRIBUTES[kind][attribute] == "year"
            facts.append((attribute, subject, _year(rng) if dated else values[rng.integers(len(values))]))
    facts = [facts[i] for i in rng.permutation(len(facts))]
    parts = [("".join(fact_sentence(*fact) + "\n" for fact in facts), False)]
    for i in rng.permutation(len(facts)):
        attribute, subject, value = facts[i]
        asked = (f" {attribute} of {subject} found", f" {value}", " ;")
        parts += [(asked[0], False), (asked[1], True), (asked[2], False)]
    return _encode_parts(parts, encode)


def judging(rng: np.random.Generator, encode: Encode) -> Row:
    """Comparisons in the words of a last thought: the smallest year so far, and whether two values are equal."""
    parts: list[tuple[str, bool]] = []
    for _ in range(3):
        names = draw_names(rng, 2 + int(rng.integers(3)), "known")
        dated = [(name, _year(rng)) for name in names]
        text = find_least(dated)
        for i, piece in enumerate(text.split(" ; ")):
            before, least, after = piece.partition(" least")
            parts += [(f"{' ;' if i else ''} {before}{least}", False), (after, True)]
        parts += [(" so", False), (f" {min(dated, key=lambda pair: pair[1])[0]}", True), (".\n", False)]
    for _ in range(8):
        values = draw_names(rng, 2, "known") if rng.random() < 0.7 else [_year(rng), _year(rng)]
        value = values[0]
        sought = value if rng.random() < 0.5 else values[1]
        *asked, said = compare(value, sought).split(" ")
        parts += [(f" {value} {' '.join(asked)}", False), (f" {said}", True), (".\n", False)]
    places = [i for i, (text, _) in enumerate(parts) if text == ".\n"]
    blocks = [parts[start + 1 : end + 1] for start, end in zip([-1, *places[:-1]], places, strict=True)]
    return _encode_parts([part for i in rng.permutation(len(blocks)) for part in blocks[i]], encode)


def _year(rng: np.random.Generator) -> str:
    return str(YEARS[rng.integers(len(YEARS))])


def _encode_parts(parts: Sequence[tuple[str, bool | int]], encode: Encode) -> Row:
    """Token ids and loss mask of (text, taught) parts. A number n for `taught`: the loss skips the first n tokens."""
    ids: list[int] = []
    mask: list[bool] = []
    for text, taught in parts:
        piece = encode(text) if text else []
        skipped = len(piece) if taught is False else 0 if taught is True else taught
        ids += piece
        mask += [i >= skipped for i in range(len(piece))]
    return np.asarray(ids, np.int32), np.asarray(mask, bool)

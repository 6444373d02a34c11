"""The closed world: its facts and its questions, which stay as they are to the byte."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import pytest

from experiments.toy.scripted import Mixture, plan
from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, YEAR_OF, ClosedWorld
from psearch_jax.closed_world.names import head
from psearch_jax.closed_world.question_forms import KNOWN_ENTITIES, kind_counts, known_questions, questions
from psearch_jax.closed_world.wordings import FORMS
from psearch_jax.text.dialects import Tags
from psearch_jax.types import KINDS, Question, UserError

NAME = re.compile(r"\b[A-Z][a-z]{6}\b")


@pytest.fixture(scope="module")
def world() -> ClosedWorld:
    return ClosedWorld.make(0)


def facts_of(question: Question) -> list[list[str]]:
    """[attribute, subject, value] of every look-up of a question."""
    return [lookup for r in question.metadata["rounds"] for lookup in r]


def test_world_does_not_drift(world, tokenizer):
    """The world of the shipped policy and of all figures stays as it is: passages, questions and scripts."""
    assert world.passages[500].text == "The birth year of Guluron is 1976."
    first = questions(world, "eval", "parallel", 1, seed=0)[0]
    assert first.text == "Is the sequel of Famamim Judipon's sequel?"
    drawn = [q for kind in KINDS for q in questions(world, "train", kind, 50, seed=0)]
    rng = np.random.default_rng(0)
    dialect = Tags(tokenizer, 144)
    plans = [[step.write(dialect) for step in plan(q, rng, Mixture(), 4)] for q in drawn]
    text = json.dumps([[p.text for p in world.passages], [[q.text, q.answers, q.metadata] for q in drawn], plans])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a136f868998f6ca6"
    every_form = [
        [q.text, q.answers, q.metadata]
        for name, form in FORMS.items()
        if not form.calculated
        for held_out in (False, True)
        for q in questions(world, "eval", form.kind, 30, 2, [name], held_out_wordings=held_out)
    ]
    assert hashlib.sha256(json.dumps(every_form).encode()).hexdigest()[:16] == "e10c33e620128321"


def test_kinds_sum_to_the_questions_asked_for():
    """Counts of kinds sum to the total and are never negative; shares above 1 are refused."""
    for total in (1, 2, 3, 7, 103, 2003, 4000):
        for shares in ({"parallel": 0.5, "sequential": 0.5}, {"parallel": 0.42, "sequential": 0.32, "mixed": 0.06}):
            counts = kind_counts(total, shares)
            assert sum(counts.values()) == total and min(counts.values()) >= 0
    with pytest.raises(UserError, match="sum to more than 1"):
        kind_counts(7, {"parallel": 0.9, "sequential": 0.9})


def test_held_out_entities_and_wordings_stay_out_of_training(world):
    """Training questions name no held-out entity and use no held-out wording; evaluation questions name no other."""

    def names_in(asked) -> set[str]:
        return {name for q in asked for name in NAME.findall(json.dumps([q.text, q.answers, q.metadata]))}

    def shapes_of(asked) -> set[str]:
        return {re.sub(NAME, "Name", q.text) for q in asked}

    held_out = {e.name for e in world.entities if e.held_out} - {e.name for e in world.entities if not e.held_out}
    train, known, unknown = (
        [q for kind in KINDS for q in questions(world, split, kind, 300, 0, held_out_wordings=wordings)]
        for split, wordings in (("train", False), ("eval", False), ("eval", True))
    )
    assert not names_in(train) & held_out and not names_in(known + unknown) - held_out
    assert not shapes_of(train) & shapes_of(unknown)
    assert 0.2 < len(held_out) / len({e.name for e in world.entities}) < 0.3
    stated = known_questions(world)
    subjects = {facts_of(q)[0][1] for q in stated}
    assert len(subjects) == KNOWN_ENTITIES and not subjects & {e.name for e in world.entities if e.held_out}
    assert not {q.text for q in stated} & {q.text for q in known_questions(world, held_out_wordings=True)}
    assert {facts_of(q)[0][0] for q in stated} == set(ATTRIBUTES["person"]) >= {YEAR_OF["person"]}


def test_answers_follow_from_passages(world):
    """Every answer follows from facts of passages, and every round's subjects from the one before."""
    facts: dict[tuple[str, str], set[str]] = {}
    for e in world.entities:
        for attribute in e.facts:
            facts.setdefault((e.name, attribute), set()).add(world.value(e, attribute))
    for q in [q for kind in KINDS for q in questions(world, "eval", kind, 300, seed=0)]:
        m = q.metadata
        names = set(NAME.findall(q.text)) | {v for _, _, v in facts_of(q) if not v.isdigit()}
        assert len({head(name) for name in names}) == len(names), "two names begin alike"
        assert all(value in facts[subject, attribute] for attribute, subject, value in facts_of(q))
        for before, after in zip(m["rounds"], m["rounds"][1:], strict=False):
            assert {subject for _, subject, _ in after} <= {value for _, _, value in before}
        values = [value for _, _, value in m["rounds"][-1]]
        if m["form"] in ("first", "first_of"):
            years = list(map(int, values))
            assert q.answers == (m["options"][years.index(min(years))],) and len(set(years)) == len(years)
        elif m["form"] in ("has", "shares"):
            right = [name for name, value in zip(m["options"], values, strict=False) if value == m["sought"]]
            assert q.answers == tuple(right)
        elif m["sought"]:
            assert q.answers == ("yes" if values[0] == m["sought"] else "no",)
        else:
            assert q.answers == (values[-1],) and (not m["options"] or q.answers[0] in m["options"])


def test_bad_requests_are_refused(world):
    """A request that cannot be met is one line."""
    with pytest.raises(UserError, match="not of kind"):
        questions(world, "eval", "single", 1, 0, ["first"])
    with pytest.raises(UserError, match="500 eval questions of kind 'single' asked"):
        questions(ClosedWorld.make(0, persons=30, films=30, cities=30), "eval", "single", 500, 0, ["year"])

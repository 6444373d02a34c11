"""The closed world: its facts, its questions, and what their wording and a single search give away."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import numpy as np
import pytest
from question_cues import PAIRS, facts_of, measure_cues, measure_searches

from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, YEAR_OF, ClosedWorld
from psearch_jax.closed_world.names import (
    HEADS,
    MIDDLES,
    TAILS,
    change_syllable,
    draw_names,
    draw_renaming,
    head,
    is_new,
)
from psearch_jax.closed_world.question_forms import (
    KNOWN_ENTITIES,
    SHARED_PAIRS,
    kind_counts,
    known_questions,
    questions,
)
from psearch_jax.closed_world.scripted import Mixture, plan
from psearch_jax.closed_world.wordings import FORMS, PAIRED
from psearch_jax.types import KINDS, UserError
from retrieval.service import RetrievalService

NAME = re.compile(r"\b[A-Z][a-z]{6}\b")


@pytest.fixture(scope="module")
def world() -> ClosedWorld:
    return ClosedWorld.make(0)


def test_world_is_a_function_of_its_seed(world):
    """Equal seeds give equal worlds and questions, other seeds others."""
    assert ClosedWorld.make(0) == world
    assert ClosedWorld.make(1).passages != world.passages
    for kind in KINDS:
        first, again = (questions(world, "eval", kind, 50, seed=3) for _ in range(2))
        assert first == again != questions(world, "eval", kind, 50, seed=4)


def test_kinds_sum_to_the_questions_asked_for():
    """Counts of kinds sum to the total and are never negative; shares above 1 are refused."""
    for total in (1, 2, 3, 7, 103, 2003, 4000):
        for shares in ({"parallel": 0.5, "sequential": 0.5}, {"parallel": 0.42, "sequential": 0.32, "mixed": 0.06}):
            counts = kind_counts(total, shares)
            assert sum(counts.values()) == total and min(counts.values()) >= 0
    with pytest.raises(UserError, match="sum to more than 1"):
        kind_counts(7, {"parallel": 0.9, "sequential": 0.9})


def test_world_does_not_drift(world):
    """The world of the shipped policy and of all figures stays as it is, to the byte."""
    assert world.passages[500].text == "The birth year of Guluron is 1976."
    first = questions(world, "eval", "parallel", 1, seed=0)[0]
    assert first.text == "Is the sequel of Famamim Judipon's sequel?"
    drawn = [q for kind in KINDS for q in questions(world, "train", kind, 50, seed=0)]
    rng = np.random.default_rng(0)
    plans = [[step.text for step in plan(q, rng, Mixture(), 4)] for q in drawn]
    text = json.dumps([[p.text for p in world.passages], [[q.text, q.answers, q.metadata] for q in drawn], plans])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a136f868998f6ca6"


def test_every_fact_has_a_passage_of_its_own(world):
    """Every passage states one fact, and nearly no two facts have the same subject and attribute."""
    assert len(world.passages) == sum(len(ATTRIBUTES[e.kind]) for e in world.entities)
    texts = [p.text for p in world.passages]
    for text in texts:
        assert re.fullmatch(r"The [a-z ]+ of [A-Z][a-z]{6} is ([A-Z][a-z]{6}|19\d\d)\.", text), text
    subjects = [(text.split(" is ")[0]) for text in texts]
    shared = len(subjects) - len(set(subjects))
    assert shared < 0.02 * len(subjects)  # homonyms are of different types, which share no attribute
    assert len({p.id for p in world.passages}) == len(world.passages)
    kinds: dict[str, list[str]] = {}
    for entity in world.entities:
        kinds.setdefault(entity.name, []).append(entity.kind)
    homonyms = [types for types in kinds.values() if len(types) > 1]
    assert len(homonyms) > 20 and all(len(set(types)) == len(types) for types in homonyms)


def test_held_out_entities_stay_out_of_training(world):
    """Training questions never name a held-out entity, evaluation questions name no other."""

    def named(asked) -> set[str]:
        return {name for q in asked for name in NAME.findall(json.dumps([q.text, q.answers, q.metadata]))}

    held_out = {e.name for e in world.entities if e.held_out} - {e.name for e in world.entities if not e.held_out}
    train = named(q for kind in KINDS for q in questions(world, "train", kind, 300, seed=0))
    asked = named(q for kind in KINDS for q in questions(world, "eval", kind, 150, seed=0))
    assert not train & held_out
    assert not asked - held_out
    assert 0.2 < len(held_out) / len({e.name for e in world.entities}) < 0.3


def test_new_names_are_never_renamed_into(world):
    """Renaming keeps new names new and known names known."""
    rng = np.random.default_rng(0)
    fresh = ClosedWorld.make(0, names="new")
    assert all(is_new(e.name) for e in fresh.entities) and not any(is_new(e.name) for e in world.entities)
    ids = [range(80), range(100, 160), range(200, 280)]
    for which in ("known", "new"):
        for name in draw_names(rng, 50, which):
            places = [HEADS.index(name[:2]), MIDDLES.index(name[2:4]), TAILS.index(name[4:])]
            moved = draw_renaming(rng, ids, 300)[[group[at] for group, at in zip(ids, places, strict=True)]]
            again = HEADS[moved[0]] + MIDDLES[moved[1] - 100] + TAILS[moved[2] - 200]
            assert is_new(again) == (which == "new")


def test_renaming_changes_names_and_nothing_else():
    """A renaming permutes heads, middles and tails among themselves, and keeps all other tokens."""
    ids = [range(10, 90), range(90, 150), range(150, 230)]
    first, second = (draw_renaming(np.random.default_rng(seed), ids, 240) for seed in (0, 1))
    assert sorted(first) == list(range(240)) and (first != second).sum() > 150
    assert (first[:10] == np.arange(10)).all() and (first[230:] == np.arange(230, 240)).all()
    assert all(set(first[list(group)]) == set(group) for group in ids)
    rng = np.random.default_rng(0)
    for name in draw_names(rng, 50, "known"):
        other = change_syllable(rng, name)
        parts = [(name[a:b], other[a:b]) for a, b in ((0, 2), (2, 4), (4, 7))]
        assert sum(a != b for a, b in parts) == 1 and not is_new(other)


def test_answers_follow_from_passages(world):
    """Every answer follows from facts of passages, and every round's subjects from the one before."""
    facts = {(e.name, attribute): set() for e in world.entities for attribute in e.facts}
    for e in world.entities:
        for attribute in e.facts:
            facts[e.name, attribute].add(world.value(e, attribute))
    for kind in KINDS:
        for q in questions(world, "eval", kind, 300, seed=0):
            m = q.metadata
            names = set(NAME.findall(q.text)) | {v for _, _, v in facts_of(q) if not v.isdigit()}
            assert len({head(name) for name in names}) == len(names), "two names begin alike"
            assert len(set(m["options"])) == len(m["options"])
            for attribute, subject, value in facts_of(q):
                assert value in facts[subject, attribute]
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
                same = values[0] == m["sought"]
                assert q.answers == ("yes" if same else "no",)
            else:
                assert q.answers == (values[-1],)
                assert not m["options"] or q.answers[0] in m["options"]


def test_every_form_comes_in_every_wording(world):
    """Every wording is filled in completely, and none begins with a name."""
    for name, form in FORMS.items():
        assert set(form.held_out) < set(form.wordings) and len(form.known) >= 3 and len(form.wordings) >= 4
        for held_out in (False, True):
            for q in questions(world, "eval", form.kind, 60, 2, [name], held_out_wordings=held_out):
                assert "{" not in q.text and re.fullmatch(r"[A-Za-z', ]+\?", q.text) and q.metadata["form"] == name
                assert not NAME.match(q.text)
    assert all(FORMS[a].kind == "parallel" and FORMS[b].kind == "sequential" for a, b in PAIRED)


def test_held_out_wordings_hold_no_unknown_word(world):
    """Held-out wordings are in no training question, but all their words are."""

    def shapes(split: str, trained: bool, held_out: bool) -> set[str]:
        forms = [(name, form.kind) for name, form in FORMS.items() if form.trained or not trained]
        asked = [q for name, kind in forms for q in questions(world, split, kind, 300, 7, [name], None, held_out)]
        return {re.sub(NAME, "Name", q.text) for q in asked}

    trained, kept = shapes("train", True, False), shapes("eval", False, True)
    assert not trained & kept
    assert {w for text in kept for w in re.findall(r"\w+", text)} <= {
        w for text in trained for w in re.findall(r"\w+", text)
    }


def test_yes_and_no_and_every_place_are_as_likely(world):
    """Yes and no, and every place of the right option, are equally likely."""
    for name, form in FORMS.items():
        asked = questions(world, "eval", form.kind, 400, 3, [name])
        if asked[0].answers[0] in ("yes", "no"):
            assert abs(np.mean([q.answers[0] == "yes" for q in asked]) - 0.5) < 0.09, name
        elif asked[0].metadata["options"]:
            places = [q.metadata["options"].index(q.answers[0]) for q in asked if len(q.metadata["options"]) == 2]
            assert abs(np.mean(places) - 0.5) < 0.12, name


def test_known_facts_are_of_training_entities(world):
    """Facts stated by a cold start are of training entities."""
    known = known_questions(world)
    subjects = {facts_of(q)[0][1] for q in known}
    assert len(subjects) == KNOWN_ENTITIES and len(known) > 150
    assert not subjects & {e.name for e in world.entities if e.held_out}
    assert not {q.text for q in known} & {q.text for q in known_questions(world, held_out_wordings=True)}
    assert {facts_of(q)[0][0] for q in known} == set(ATTRIBUTES["person"]) >= {YEAR_OF["person"]}


def test_bad_requests_are_refused(world):
    """A request that cannot be met is refused."""
    for arguments, says in (
        (("test", "single", 1, 0), "split 'test'"),
        (("eval", "bridge", 1, 0), "kind 'bridge'"),
        (("eval", "single", 1, 0, ["first"]), "not of kind"),
    ):
        with pytest.raises(UserError, match=says):
            questions(world, *arguments)
    with pytest.raises(UserError, match="500 eval questions of kind 'single' asked"):
        questions(ClosedWorld.make(0, persons=30, films=30, cities=30), "eval", "single", 500, 0, ["year"])
    with pytest.raises(UserError, match="at least 30"):
        ClosedWorld.make(0, persons=3)


def test_what_searches_find(world):
    """A sub-query finds its fact, and the question alone seldom finds all facts."""
    results = measure_searches(world, RetrievalService.from_corpus(world.passages), 200)
    assert all(figures["sub-query@3"] >= 0.95 and figures["sub-query@1"] >= 0.95 for figures in results.values())
    question_recall = {
        name: figures["question@2"] for name, figures in results.items() if FORMS[name].kind != "single"
    }
    assert max(question_recall.values()) < 0.5
    parallel = {name: form for name, form in FORMS.items() if form.kind == "parallel"}
    assert sum(question_recall[name] * form.share for name, form in parallel.items()) < 0.4


def test_minimal_pairs_ask_for_the_same_attributes(world):
    """The members of minimal pairs ask for the same pairs of attributes equally often."""
    for parallel, sequential in PAIRED:
        counts = []
        for name in (parallel, sequential):
            asked = questions(world, "eval", FORMS[name].kind, 800, 4, [name], held_out_wordings=True)
            counts.append(Counter(tuple(sorted(attribute for attribute, _, _ in _two(q))) for q in asked))
        assert counts[0].keys() == counts[1].keys() and len(counts[0]) == len(SHARED_PAIRS)
        assert all(abs(counts[0][pair] - counts[1][pair]) < 0.05 * 800 for pair in counts[0]), counts


def _two(q):
    """Look-ups with the two attributes that a member of a minimal pair asks for."""
    facts = facts_of(q)
    return facts if q.metadata["form"] in ("same", "bridge_is", "bridge_which") else [facts[0], facts[-1]]


def test_what_words_give_away(world):
    """First words, unordered words and first thoughts do not reveal when to split; word order does."""
    cues = measure_cues(world, 800)
    assert cues["first three words"]["held-out wordings"] <= 0.65
    assert cues["bag of words, linear"]["held-out wordings"] <= 0.8
    for features in (
        "first three words",
        "bag of words, linear",
        "bag of words, random forest",
        "first thought, random forest",
    ):
        assert cues[features][PAIRS] <= 0.56 and cues[features][f"{PAIRS}, trained on {PAIRS} only"] <= 0.56
    assert cues["one rule: an attribute of an attribute"][PAIRS] > 0.99
    assert cues["word bigrams"]["known wordings"] > 0.9  # the order of the words does show the structure

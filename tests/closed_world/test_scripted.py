"""The toy tokenizer, the scripted teacher and the cold-start exercises."""

from __future__ import annotations

import numpy as np
import pytest

from psearch_jax.closed_world import exercises
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.closed_world.scripted import (
    OBSERVATION_TOKENS,
    Mixture,
    Step,
    conclude,
    first_thought,
    plan,
    query_all_at_once,
    word_query,
    write_all,
)
from psearch_jax.closed_world.toy_tokenizer import write_tokenizer
from psearch_jax.text.tags import parse_turn
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import KINDS, Question
from retrieval.service import RetrievalService

RIGHT = Mixture(split=0, hasty=0, guess=0, redundant=0, forgotten=0, closed=0)


@pytest.fixture(scope="module")
def world() -> ClosedWorld:
    return ClosedWorld.make(0)


@pytest.fixture(scope="module")
def retriever(world) -> RetrievalService:
    return RetrievalService.from_corpus(world.passages)


def every_kind(world, count, split="train"):
    return [q for kind in KINDS for q in questions(world, split, kind, count, 0)]


def search_optimally(question: Question) -> list[Step]:
    """One search per round with all of its queries, then the right answer."""
    searches = [Step(first_thought(question), tuple(map(word_query, r))) for r in question.metadata["rounds"]]
    return [*searches, Step(conclude(question), answer=question.answers[0])]


def sentences(question: Question) -> set[str]:
    """The passages with a question's facts."""
    return {f"The {a} of {s} is {v}." for r in question.metadata["rounds"] for a, s, v in r}


def test_the_tokenizer_has_a_token_for_every_word(world, tokenizer):
    """A name has the same three tokens wherever it stands, and no word is split into letters."""
    assert tokenizer.size < 1000
    for entity in world.entities[::37]:
        ids = tokenizer.encode_foreign(f" {entity.name}")
        assert len(ids) == 3, entity.name
        for text in (f"The rival of {entity.name} is", f"<answer> {entity.name} </answer>", f"Of {entity.name}'s"):
            tokens = tokenizer.encode_foreign(text)
            assert any(tokens[i : i + 3] == ids for i in range(len(tokens))), text
    batch = [q for h in (False, True) for k in KINDS for q in questions(world, "eval", k, 200, 0, held_out_wordings=h)]
    texts = [f"user\n{q.text}" for q in batch] + [step.text for q in batch for step in search_optimally(q)]
    letters = {tokenizer.encode_foreign(chr(c))[0] for c in range(ord("A"), ord("z") + 1) if chr(c).isalpha()}
    for text in [*texts, *(f"{p.text}\n" for p in world.passages)]:
        assert not letters & set(tokenizer.encode_foreign(text)), text


def test_tokenizer_is_reproducible_and_lossless(tokenizer, tmp_path):
    """A rebuilt tokenizer is the same, also next to a Qwen2 config.json, and texts decode to themselves."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    for text in ("Zoë <said>:\n\n 12345 </search>x", "<|im_end|> < a", "\t日本 ##", "", "Ba", "  Bakasan's"):
        assert tokenizer.decode(tokenizer.encode_foreign(text)) == text
    prompt = tokenizer.chat([{"role": "user", "content": "Who?"}])
    assert tokenizer.decode(prompt, control=True) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_scripted_turns_parse_as_written(world, tokenizer, retriever):
    """Scripted turns parse as they were written, and the loss covers exactly them."""
    batch = every_kind(world, 40)
    plans = [plan(q, np.random.default_rng(1), RIGHT, 4) for q in batch]
    rows = write_all(batch, plans, retriever, tokenizer, 2)
    for question, steps, (ids, mask) in zip(batch, plans, rows, strict=True):
        actions = [parse_turn(step.text) for step in steps]
        assert all(action.well_formed for action in actions) and len(steps) <= 5
        assert actions[-1].answer == steps[-1].answer
        assert [a.queries for a in actions[:-1]] == [step.queries for step in steps[:-1]]
        assert tokenizer.decode(ids[mask], control=True) == "".join(step.text for step in steps) + "<|im_end|>"
        if len(sentences(question)) <= 4:  # more facts than look-ups are possible
            assert actions[-1].answer == question.answers[0]
    assert np.median([len(ids) for ids, _ in rows]) <= 220


def test_searching_all_at_once_misses_what_depends_on_another_fact(world, retriever):
    """A split finds all facts of a parallel question, and not the last one of a sequential question."""
    for q in every_kind(world, 60, "eval"):
        queries, best, rounds = query_all_at_once(q), search_optimally(q), q.metadata["rounds"]
        retrieved = {p.text for ranking in retriever.search(list(queries), 2) for p in ranking}
        assert queries[0] == best[0].queries[0]
        if q.kind == "parallel":
            assert queries == best[0].queries
        elif q.kind == "sequential":
            a, s, v = rounds[-1][-1]
            assert f"The {a} of {s} is {v}." not in retrieved or rounds[0][0][1] in (s, v), q


def test_optimal_searches_show_all_facts(world, tokenizer, retriever):
    """Also eight facts in one observation."""
    missed, batch = 0, every_kind(world, 60, "eval")
    for q in batch:
        retrieved = {p.text for s in search_optimally(q) for r in retriever.search(list(s.queries), 2) for p in r}
        missed += not sentences(q) <= retrieved
    assert missed <= 0.02 * len(batch)
    many = questions(world, "eval", "parallel", 30, 0, ["first", "has"], {8: 1.0})
    for q, (ids, mask) in zip(
        many, write_all(many, list(map(search_optimally, many)), retriever, tokenizer, 2), strict=True
    ):
        text = tokenizer.decode(ids[~mask])
        assert all(sentence in text for sentence in sentences(q))
        assert len(ids) <= 448 and (~mask).sum() <= OBSERVATION_TOKENS + 64


@pytest.mark.parametrize("make", [exercises.copying, exercises.looking_up, exercises.judging])
def test_exercises_teach_what_was_read(tokenizer, make):
    """Every trained token of an exercise occurs before it, or is a verdict."""
    rng = np.random.default_rng(0)
    verdicts = {tokenizer.encode_foreign(f" {word}")[0] for word in ("yes", "no")}
    for _ in range(50):
        ids, mask = make(rng, tokenizer.encode_foreign)
        assert 0 < mask.sum() < len(ids) <= 192
        assert all(ids[at] in ids[:at] or ids[at] in verdicts for at in np.flatnonzero(mask))

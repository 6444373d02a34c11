"""The toy tokenizer, the scripted teacher and the cold-start exercises."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.toy import exercises
from experiments.toy.scripted import (
    OBSERVATION_TOKENS,
    Mixture,
    Step,
    call_all_at_once,
    conclude,
    first_thought,
    plan,
    word_call,
    write_all,
)
from experiments.toy.tokenizer import write_tokenizer
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import CALCULATION, calculated_forms, questions
from psearch_jax.rollout.calculator import CALCULATOR, evaluate
from psearch_jax.rollout.tools import SEARCH_SCHEMA, Toolbox
from psearch_jax.runtime.paths import TOYS
from psearch_jax.text.dialects import Tags, ToolCalls
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import KINDS, Question, pair_calls
from retrieval.service import RetrievalService

RIGHT = Mixture(split=0, hasty=0, guess=0, redundant=0, forgotten=0, closed=0)


@pytest.fixture(scope="module")
def world() -> ClosedWorld:
    return ClosedWorld.make(0)


@pytest.fixture(scope="module")
def retriever(world) -> RetrievalService:
    return RetrievalService.from_corpus(world.passages)


@pytest.fixture(scope="module", params=["tags", "tool_calls"])
def dialect(request, tokenizer, tmp_path_factory):
    """Both dialects, each with its tokenizer."""
    if request.param == "tags":
        return Tags(tokenizer, OBSERVATION_TOKENS)
    directory = tmp_path_factory.mktemp("toy_tools_tokenizer")
    write_tokenizer(directory, "tool_calls")
    return ToolCalls(Tokenizer.load(directory), OBSERVATION_TOKENS, schemas=[SEARCH_SCHEMA, CALCULATOR.schema])


def every_kind(world, count, split="train", calculated=False):
    forms = {kind: calculated_forms(kind) if calculated else [] for kind in KINDS}
    kinds = [kind for kind in KINDS if forms[kind] or not calculated]
    return [q for kind in kinds for q in questions(world, split, kind, count, 0, forms[kind])]


def asked_with(world, dialect, count, split="train"):
    """Questions of every kind; with tool calls, as many that need the calculator."""
    asked = every_kind(world, count, split)
    return asked + every_kind(world, count, split, True) if isinstance(dialect, ToolCalls) else asked


def search_optimally(question: Question) -> list[Step]:
    """One search per round with all of its queries, then the right answer."""
    searches = [Step(first_thought(question), tuple(map(word_call, r))) for r in question.metadata["rounds"]]
    return [*searches, Step(conclude(question), answer=question.answers[0])]


def sentences(question: Question) -> set[str]:
    """The passages with a question's facts."""
    found = [(a, s, v) for r in question.metadata["rounds"] for a, s, v in r if a != CALCULATION]
    return {f"The {a} of {s} is {v}." for a, s, v in found}


def test_the_tokenizer_has_a_token_for_every_word(world, dialect):
    """A name has the same three tokens wherever it stands, and no word is split into letters or digits."""
    tokenizer = dialect.tokenizer
    assert tokenizer.size < 1200
    for entity in world.entities[::37]:
        ids = tokenizer.encode_foreign(f" {entity.name}")
        assert len(ids) == 3, entity.name
        for text in (f"The rival of {entity.name} is", f"<answer> {entity.name} </answer>", f"Of {entity.name}'s"):
            tokens = tokenizer.encode_foreign(text)
            assert any(tokens[i : i + 3] == ids for i in range(len(tokens))), text
    batch = asked_with(world, dialect, 200, "eval")
    batch += [q for k in KINDS for q in questions(world, "eval", k, 200, 0, held_out_wordings=True)]
    texts = [f"user\n{q.text}" for q in batch] + [s.write(dialect) for q in batch for s in search_optimally(q)]
    texts += [tokenizer.decode(dialect.chat([{"role": "user", "content": q.text}])) for q in batch[:1]]
    letters = {i for c in range(0x21, 0x7F) if chr(c).isalnum() for i in tokenizer.encode_foreign(chr(c))}
    for number in range(2, 10):  # years of a difference
        letters -= set(tokenizer.encode_foreign(str(number)))
    for text in [*texts, *(f"{p.text}\n" for p in world.passages)]:
        assert not letters & set(tokenizer.encode_foreign(text)), text


def test_shipped_tokenizers_are_current(dialect):
    """A policy that ships reads the ids that the code of its tokenizer writes."""
    shipped = Tokenizer.load(TOYS["toy_tools" if isinstance(dialect, ToolCalls) else "toy"])
    assert shipped.fingerprint == dialect.tokenizer.fingerprint
    assert shipped.hf.chat_template == dialect.tokenizer.hf.chat_template


def test_tokenizer_is_reproducible_and_lossless(tokenizer, tmp_path):
    """A rebuilt tokenizer is the same, also next to a Qwen2 config.json, and texts decode to themselves."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    for text in ("Zoë <said>:\n\n 12345 </search>x", "<|im_end|> < a", "\t日本 ##", "", "Ba", "  Bakasan's"):
        assert tokenizer.decode(tokenizer.encode_foreign(text)) == text
    prompt = tokenizer.chat([{"role": "user", "content": "Who?"}])
    assert tokenizer.decode(prompt, control=True) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_scripted_turns_parse_as_written(world, dialect, retriever):
    """Scripted turns parse as they were written, and the loss covers exactly them."""
    batch, tokenizer = asked_with(world, dialect, 40), dialect.tokenizer
    plans = [plan(q, np.random.default_rng(1), RIGHT, 4) for q in batch]
    rows = write_all(batch, plans, Toolbox(retriever, 2, [CALCULATOR]), dialect)
    for question, steps, (ids, mask) in zip(batch, plans, rows, strict=True):
        texts = [step.write(dialect) for step in steps]
        actions = list(map(dialect.parse, texts))
        assert all(action.well_formed for action in actions) and len(steps) <= 5
        assert actions[-1].answer == steps[-1].answer
        assert [pair_calls(a.tools, a.queries) for a in actions[:-1]] == [step.calls for step in steps[:-1]]
        stop = "<|im_end|>"
        ended = (stop if dialect.ends_calls else "").join(texts) + stop
        assert tokenizer.decode(ids[mask], control=True) == ended
        if len(sentences(question)) <= 4:  # more facts than look-ups are possible
            assert actions[-1].answer == question.answers[0]
        for attribute, expression, value in question.metadata["rounds"][-1]:
            assert attribute != CALCULATION or evaluate(expression) == value
    assert np.median([len(ids) for ids, _ in rows]) <= 240


def test_calling_all_at_once_misses_what_depends_on_another_fact(world, dialect, retriever):
    """A split finds all facts of a parallel question, and not the last one of a sequential question."""
    toolbox = Toolbox(retriever, 2, [CALCULATOR])
    for q in asked_with(world, dialect, 60, "eval"):
        calls, best, rounds = call_all_at_once(q), search_optimally(q), q.metadata["rounds"]
        retrieved = {p.text for ranking in toolbox.run({0: calls})[0] for p in ranking}
        assert calls[0] == best[0].calls[0]
        if q.kind == "parallel":
            assert calls == best[0].calls
        elif q.kind == "sequential":
            a, s, v = rounds[-1][-1]
            found = v if a == CALCULATION else f"The {a} of {s} is {v}."
            assert found not in retrieved or rounds[0][0][1] in (s, v), q


def test_optimal_searches_show_all_facts(world, dialect, retriever):
    """Also eight facts in one observation."""
    toolbox, missed, batch = Toolbox(retriever, 2, [CALCULATOR]), 0, asked_with(world, dialect, 60, "eval")
    for q in batch:
        found = toolbox.run(dict(enumerate(step.calls for step in search_optimally(q)[:-1])))
        missed += not sentences(q) <= {p.text for of_turn in found.values() for ranking in of_turn for p in ranking}
    assert missed <= 0.02 * len(batch)
    many = questions(world, "eval", "parallel", 30, 0, ["first", "has"], {8: 1.0})
    for q, (ids, mask) in zip(many, write_all(many, list(map(search_optimally, many)), toolbox, dialect), strict=True):
        text = dialect.tokenizer.decode(ids[~mask])
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

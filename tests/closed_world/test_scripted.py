"""The toy tokenizer, the scripted teacher and the cold-start exercises."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from question_cues import facts_of, oracle

from psearch_jax.closed_world import exercises
from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, HAPPENED, ClosedWorld
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.closed_world.scripted import (
    OBSERVATION_TOKENS,
    Mixture,
    conclude,
    find_least,
    first_thought,
    plan,
    query_all_at_once,
    write_all,
)
from psearch_jax.closed_world.toy_tokenizer import write_tokenizer
from psearch_jax.text.tags import parse_turn
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import KINDS
from retrieval.service import RetrievalService

RIGHT = Mixture(split=0, hasty=0, guess=0, redundant=0, forgotten=0, closed=0)
NAME = re.compile(r"\b[A-Z][a-z]{6}\b")
ATTRIBUTE_WORDS = [*(a for of in ATTRIBUTES.values() for a in of), *HAPPENED.values()]


@pytest.fixture(scope="module")
def world() -> ClosedWorld:
    return ClosedWorld.make(0)


@pytest.fixture(scope="module")
def retriever(world) -> RetrievalService:
    return RetrievalService.from_corpus(world.passages)


def every_kind(world, count, split="train", seed=0):
    return [q for kind in KINDS for q in questions(world, split, kind, count, seed)]


# ---- tokenizer ----


def test_names_cost_three_ids_wherever_they_stand(world, tokenizer):
    """A name has the same three tokens wherever it stands."""
    assert tokenizer.size < 1000
    for entity in world.entities[::37]:
        ids = tokenizer.encode_foreign(f" {entity.name}")
        assert len(ids) == 3, entity.name
        for text in (
            "The rival of {} is",
            "<answer> {} </answer>",
            "Of {}'s",
            "named {} asked hometown ; next",
            "{}, ",
        ):
            tokens = tokenizer.encode_foreign(text.format(entity.name) if "{}, " != text else f" {entity.name}, ")
            assert any(tokens[i : i + 3] == ids for i in range(len(tokens))), text
    assert [tokenizer.decode([i]) for i in tokenizer.encode_foreign("is 1943.\n")] == ["is", " 1943", ".\n"]


def test_no_word_of_the_world_falls_to_bytes(world, tokenizer, retriever):
    """Every word of questions, passages and scripts has a token of its own."""
    batch = [q for h in (False, True) for k in KINDS for q in questions(world, "eval", k, 200, 0, held_out_wordings=h)]
    texts = [f"user\n{q.text}" for q in batch] + [step.text for q in batch for step in oracle(q)]
    texts += [f"{p.text}\n" for p in world.passages]
    single = {tokenizer.encode_foreign(chr(c))[0] for c in range(ord("A"), ord("z") + 1) if chr(c).isalpha()}
    for text in texts:
        assert not single & set(tokenizer.encode_foreign(text)), text


def test_tokenizer_survives_beside_a_model(tokenizer, tmp_path):
    """A Qwen2 config.json next to the tokenizer does not change its tokens."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    text = "The director of Bakasan is Dotiles.\n</information>\n"
    assert Tokenizer.load(tmp_path).encode_foreign(text) == tokenizer.encode_foreign(text)


def test_tokenizer_is_reproducible_and_lossless(tokenizer, tmp_path):
    """A rebuilt tokenizer is the same, and texts decode to themselves."""
    write_tokenizer(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    for text in ("Zoë <said>:\n\n 12345 </search>x", "<|im_end|> < a", "\t日本 ##", "", "Ba", "  Bakasan's"):
        assert tokenizer.decode(tokenizer.encode_foreign(text)) == text
    prompt = tokenizer.chat([{"role": "user", "content": "Who?"}])
    assert tokenizer.decode(prompt, control=True) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


# ---- teacher ----


def test_scripted_turns_parse_as_written(world, tokenizer, retriever):
    """Scripted turns parse as they were written, and the loss covers exactly them."""
    batch = every_kind(world, 40)
    plans = [plan(q, np.random.default_rng(1), RIGHT, 4) for q in batch]
    rows = write_all(batch, plans, retriever, tokenizer, 2)
    for question, steps, (ids, mask) in zip(batch, plans, rows, strict=True):
        actions = [parse_turn(step.text) for step in steps]
        assert all(action.well_formed for action in actions)
        assert actions[-1].answer == steps[-1].answer
        assert [a.queries for a in actions[:-1]] == [step.queries for step in steps[:-1]]
        assert tokenizer.decode(ids[mask], control=True) == "".join(step.text for step in steps) + "<|im_end|>"
        if len([x for r in question.metadata["rounds"] for x in r]) <= 4:  # more facts than look-ups are possible
            assert actions[-1].answer == question.answers[0]


def test_first_thoughts_repeat_the_question_and_nothing_else(world):
    """A first thought lists names and attributes in the question's order, and binds none to another."""
    for q in every_kind(world, 100, "eval"):
        named, asked = re.fullmatch(r"named (.+) asked (.+)", first_thought(q)).groups()
        assert named.split(" ; ") == list(dict.fromkeys(NAME.findall(q.text))), q
        places = [q.text.index(words) for words in asked.split(" ; ")]
        assert places == sorted(places) and set(asked.split(" ; ")) <= set(ATTRIBUTE_WORDS), q
        attributes = {a for r in q.metadata["rounds"] for a, _, _ in r}
        assert len(attributes) <= len(asked.split(" ; ")) <= 3, q


def test_searching_all_at_once_misses_what_depends_on_another_fact(world, retriever):
    """A split finds all facts of a parallel question, and not the last one of a sequential question."""
    for q in every_kind(world, 60, "eval"):
        queries = query_all_at_once(q)
        facts = [f"The {a} of {s} is {v}." for r in q.metadata["rounds"] for a, s, v in r]
        retrieved = {p.text for ranking in retriever.search(list(queries), 2) for p in ranking}
        assert len(queries) == sum(len(r) if i == 0 else 1 for i, r in enumerate(q.metadata["rounds"]))
        assert queries[0] == oracle(q)[0].queries[0]
        if q.kind == "parallel":
            assert queries == oracle(q)[0].queries
        elif q.kind == "sequential":
            assert not {facts[-1]} & retrieved or q.metadata["rounds"][0][0][1] in facts[-1], q


def test_optimal_searches_retrieve_all_facts(world, retriever):
    """Nearly always; a search for eight facts shows all of them in one observation."""
    missed = 0
    batch = every_kind(world, 60, "eval")
    for q in batch:
        retrieved = {p.text for s in oracle(q) for r in retriever.search(list(s.queries), 2) for p in r if s.queries}
        missed += not {f"The {a} of {s} is {v}." for a, s, v in facts_of(q)} <= retrieved
    assert missed <= 0.02 * len(batch)


def test_eight_facts_fit_one_observation(world, tokenizer, retriever):
    """A search for eight facts shows all of them; five facts do not fit into four single searches."""
    batch = questions(world, "eval", "parallel", 30, 0, ["first", "has"], {8: 1.0})
    for q, (ids, mask) in zip(batch, write_all(batch, list(map(oracle, batch)), retriever, tokenizer, 2), strict=True):
        text = tokenizer.decode(ids[~mask])
        assert all(f"The {a} of {s} is {v}." in text for a, s, v in q.metadata["rounds"][0])
        assert len(ids) <= 448 and (~mask).sum() <= OBSERVATION_TOKENS + 64
        steps = plan(q, np.random.default_rng(0), RIGHT, 4)
        assert len(steps) == 5 and steps[-1].thought.startswith("guess")


def test_verdicts_end_with_the_answer(world):
    """A last thought compares the right values and concludes with the gold answer."""
    text = find_least([("Bakasan", "1950"), ("Dotiles", "1940"), ("Fegimor", "1945")])
    assert text == "Bakasan 1950 ; Dotiles 1940 least Dotiles 1940 ; Fegimor 1945 least Dotiles 1940"
    for q in every_kind(world, 200, "eval"):
        text = conclude(q)
        assert text.endswith(f" so {q.answers[0]}"), q
        for value, sought, judgement in re.findall(r"(\w+) vs (\w+) (yes|no)", text):
            assert (value == sought) == (judgement == "yes") and sought == q.metadata["sought"]


def test_mixture_has_the_stated_shares(world):
    """The teacher's strategies have the shares of the mixture, the same for every kind."""
    rng, mixture = np.random.default_rng(0), Mixture()
    for kind in ("parallel", "sequential", "single"):
        plans = [plan(q, rng, mixture, 4) for q in questions(world, "train", kind, 2000, seed=0)]
        searched = [steps for steps in plans if steps[0].queries]
        assert abs(np.mean([len(steps[0].queries) > 1 for steps in searched]) - mixture.split) < 0.035, kind
        assert abs(1 - len(searched) / len(plans) - mixture.closed) < 0.02
        assert abs(np.mean([any(s.thought is None for s in steps) for steps in plans]) - mixture.forgotten) < 0.02
        assert max(len(steps) for steps in plans) <= 5


def test_scripted_trajectories_are_short_and_reproducible(world, tokenizer, retriever):
    """Equal seeds give equal rows, at a median of at most 220 tokens."""
    batch = every_kind(world, 150)
    first, again = (
        write_all(batch, [plan(q, rng, Mixture(), 4) for q in batch], retriever, tokenizer, 2)
        for rng in (np.random.default_rng(5), np.random.default_rng(5))
    )
    assert np.median([len(ids) for ids, _ in first]) <= 220
    assert all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in zip(first, again, strict=True))


def test_smoke_config_leaves_the_room_that_scripts_take():
    """The demo's budgets are at least those of the cold start."""
    from configs.smoke import get_config

    rollout = json.loads(get_config().to_json())["rollout"]
    assert rollout["obs_tokens"] == OBSERVATION_TOKENS and rollout["search_turns"] == 4
    assert rollout["context_tokens"] >= 448 and rollout["prompt_tokens"] >= 56


# ---- exercises ----


@pytest.mark.parametrize("make", [exercises.copying, exercises.looking_up, exercises.judging])
def test_exercises_teach_what_was_read(tokenizer, make):
    """Every trained token of an exercise occurs before it, or is a verdict."""
    rng = np.random.default_rng(0)
    verdicts = {tokenizer.encode_foreign(f" {word}")[0] for word in ("yes", "no")}
    for _ in range(50):
        ids, mask = make(rng, tokenizer.encode_foreign)
        assert 0 < mask.sum() < len(ids) <= 192
        for place in np.flatnonzero(mask):
            assert ids[place] in ids[:place] or ids[place] in verdicts


def test_judgements_are_even(tokenizer):
    """Yes and no, and the places of the minimum, are equally likely."""
    rng, texts = np.random.default_rng(0), []
    for _ in range(300):
        texts.append(tokenizer.decode(exercises.judging(rng, tokenizer.encode_foreign)[0]))
    text = "\n".join(texts)
    judgements = re.findall(r"vs \w+ (yes|no)", text)
    assert abs(np.mean([word == "yes" for word in judgements]) - 0.5) < 0.05
    two = re.findall(r"^ (\w+) (\d+) ; (\w+) (\d+) least (\w+) (\d+)", text, re.MULTILINE)
    assert len(two) > 300 and all(min(int(a), int(b)) == int(least) for _, a, _, b, _, least in two)
    assert abs(np.mean([first == chosen for first, _, _, _, chosen, _ in two]) - 0.5) < 0.06

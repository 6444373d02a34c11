"""The closed world, its tokenizer and its scripted trajectories."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from psearch_jax.config import PRESETS
from psearch_jax.data.closed_world import ClosedWorld, train_tokenizer
from psearch_jax.data.scripted import Mixture, plan, scripted_trajectories, scripted_trajectory
from psearch_jax.data.themes import THEMES
from psearch_jax.text.tags import parse_turn
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.sft import SFTConfig, Stage, batches, make_rows, train
from psearch_jax.types import KINDS, UserError
from retrieval.protocol import Passage
from retrieval.service import RetrievalService

ALWAYS_RIGHT = Mixture(split=0, hasty=0, guess=0, wrong_split=0, redundant=0, forgotten_think=0, drill=0)
STAGES = ("copying", "reading", "whole")


@pytest.fixture(scope="module")
def world() -> ClosedWorld:
    return ClosedWorld.make(0)


@pytest.fixture(scope="module")
def tokenizer(world, tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("toy_tokenizer")
    train_tokenizer(world, directory)
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def retriever(world) -> RetrievalService:
    return RetrievalService.from_corpus(world.passages)


def names_in(world: ClosedWorld, text: str) -> set[str]:
    """Names of the world's entities that stand in a text."""
    words = re.findall(r"[A-Za-z]+", text)
    known = {entity.name for entity in world.entities}
    return {pair for pair in (" ".join(words[i : i + 2]) for i in range(len(words) - 1)) if pair in known}


def mentioned(world: ClosedWorld, question) -> set[str]:
    """Names in a question, its answers and its metadata."""
    values = json.dumps([question.text, question.answers, question.metadata])
    return names_in(world, values)


def test_world_is_a_function_of_its_seed(world):
    """Fails if a draw depends on anything but the seed: a policy would then be evaluated in another world."""
    assert ClosedWorld.make(0) == world
    assert ClosedWorld.make(1).passages != world.passages
    for kind in KINDS:
        first, again = (world.questions("eval", kind, 50, seed=3) for _ in range(2))
        assert first == again != world.questions("eval", kind, 50, seed=4)


def test_world_does_not_drift(world):
    """Fails if a change of the code silently changes the world that the shipped policy and all figures belong to."""
    assert world.passages[500].text == "Povo Kalt was born in Budim Falls in 1976."
    assert (
        world.questions("eval", "parallel", 1, seed=0)[0].text
        == "Which of Fallen Island and Blue Memory came out first?"
    )


@pytest.mark.parametrize("theme", THEMES)
def test_answers_of_every_theme_follow_from_its_passages(theme):
    """Fails if a world of other names or relations asks what its documents do not say: no policy could answer."""
    other = ClosedWorld.make(0, makers=200, works=200, places=100, theme=theme)
    text = {p.title: p.text for p in other.passages}
    assert len(text) == 500 and all(p.text.startswith(p.title) for p in other.passages)
    for question in other.questions("eval", "parallel", 40, seed=0) + other.questions("eval", "mixed", 20, seed=0):
        asked = question.metadata.get("links", question.metadata["queries"])
        years = [int(re.findall(r"\d{4}", text[" ".join(query.split()[:2])])[0]) for query in asked]
        assert years == question.metadata["years"]
        assert question.answers == (question.metadata["names"][int(np.argmin(years))],)
    for question in other.questions("eval", "sequential", 40, seed=0) + other.questions("train", "single", 40, seed=0):
        for query, found in question.metadata["hops"]:
            assert found in text[" ".join(query.split()[:2])]
        assert question.answers == (question.metadata["hops"][-1][1],)


def test_themes_share_what_they_say_they_share(world):
    """Fails if `renamed` keeps a name or changes a question, or `register` keeps a relation or a form of document."""
    renamed, register = (ClosedWorld.make(0, theme=name) for name in ("renamed", "register"))
    known = {word for e in world.entities for word in e.name.split()}
    for other in (renamed, register):
        assert not known & {word for e in other.entities for word in e.name.split()}

    def patterns(one):
        texts = [p.text for p in one.passages] + [q.text for k in KINDS for q in one.questions("eval", k, 100, seed=0)]
        return {re.sub(r"[A-Z][a-z]+ [A-Z][a-z]+", "NAME", re.sub(r"\d+", "YEAR", text)) for text in texts}

    assert patterns(renamed) == patterns(world)
    assert not patterns(register) & patterns(world)
    with pytest.raises(UserError, match="theme 'opera' found, accepted: encyclopedia, renamed, register"):
        ClosedWorld.make(0, theme="opera")


def test_passages_are_short_and_named(world):
    """Fails if a passage outgrows the observation budget, or its title no longer opens its text."""
    assert len({p.id for p in world.passages}) == len({p.title for p in world.passages}) == len(world.passages)
    for passage in world.passages:
        assert len(passage.text.split()) <= 16
        assert passage.text.startswith(passage.title) and passage.text.endswith(".")


def test_held_out_entities_stay_out_of_training(world):
    """Fails if an evaluation entity appears in a training question: the policy could then answer from memory."""
    train, held_out = set(), set()
    for kind in ("parallel", "sequential", "single"):
        train.update(*(mentioned(world, q) for q in world.questions("train", kind, 1500, seed=0)))
    for kind in KINDS:
        held_out.update(*(mentioned(world, q) for q in world.questions("eval", kind, 400, seed=0)))
    assert held_out <= world.held_out_names
    assert not train & world.held_out_names
    share = len(world.held_out_names) / len(world.entities)
    assert 0.18 < share < 0.22


def test_cold_start_worlds_share_no_held_out_name(world):
    """Fails if a training world draws a name that evaluation asks about."""
    other = ClosedWorld.make(7, reserved_names=world.held_out_names)
    assert not {e.name for e in other.entities} & world.held_out_names


def test_questions_are_distinct_and_proportioned(world):
    """Fails if a call repeats a question, or the shares of two and three entities are off."""
    questions = world.questions("train", "parallel", 2000, seed=0)
    assert len({q.id for q in questions}) == len({q.text for q in questions}) == 2000
    sizes = [len(q.metadata["names"]) for q in questions]
    assert set(sizes) == {2, 3} and abs(np.mean(np.array(sizes) == 2) - 0.7) < 0.04
    roles = [q.metadata["names"].index(q.answers[0]) for q in questions if len(q.metadata["names"]) == 2]
    assert abs(np.mean(roles) - 0.5) < 0.05
    for kind in KINDS:
        assert len({q.id for q in world.questions("eval", kind, 400, seed=0)}) == 400
    four = world.questions("eval", "parallel", 100, seed=0, entities=4)
    assert all(len(q.metadata["names"]) == 4 for q in four)


def test_answers_follow_from_passages(world):
    """Fails if a gold answer is not what the passages say."""
    text = {p.title: p.text for p in world.passages}
    for question in world.questions("eval", "parallel", 200, seed=0):
        years = {name: int(re.findall(r"\d{4}", text[name])[0]) for name in question.metadata["names"]}
        assert question.answers == (min(years, key=years.get),)
        assert sorted(years.values())[0] < sorted(years.values())[1]
    for question in world.questions("eval", "sequential", 200, seed=0):
        (first, found), (second, answer) = question.metadata["hops"]
        assert found in text[" ".join(first.split()[:2])]
        assert second.startswith(found) and answer in text[found] and question.answers == (answer,)
    for question in world.questions("eval", "mixed", 100, seed=0):
        directors = [" ".join(query.split()[:2]) for query in question.metadata["links"]]
        years = [int(re.findall(r"\d{4}", text[director])[0]) for director in directors]
        assert question.answers == (question.metadata["names"][int(np.argmin(years))],)


def test_bad_requests_are_refused(world):
    """Fails if a request that cannot be met returns fewer or other questions than asked."""
    for arguments in (
        ("train", "mixed", 1, 0),
        ("train", "parallel", 1, 0, 4),
        ("eval", "sequential", 1, 0, 2),
        ("eval", "single", 10**6, 0),
        ("test", "single", 1, 0),
        ("eval", "bridge", 1, 0),
    ):
        with pytest.raises(UserError):
            world.questions(*arguments)


def test_retrieval_finds_the_passage_and_distractors(world, retriever):
    """Fails if searches as the teacher writes them miss, or if nothing but the right passage comes back."""
    queries = [q for question in world.questions("eval", "parallel", 200, 0) for q in question.metadata["queries"]]
    found = retriever.search(queries, 3)
    assert (
        np.mean([ranking[0].title == " ".join(q.split()[:2]) for q, ranking in zip(queries, found, strict=True)])
        > 0.99
    )
    assert all(len(ranking) == 3 for ranking in found)


def test_names_cost_two_tokens_wherever_they_stand(world, tokenizer):
    """Fails if a name is cut differently in a question, a passage and an answer, which a small model cannot copy."""
    assert 1000 <= tokenizer.size <= 2000
    for entity in world.entities[::37]:
        ids = tokenizer.encode_foreign(f"{entity.name} ")
        assert len(ids) == 2, entity.name
        passage = next(p for p in world.passages if p.id == entity.id)
        assert tokenizer.encode_foreign(passage.text)[:2] == ids
        assert tokenizer.encode_foreign(f"<answer> {entity.name} </answer>")[1:3] == ids
    assert [tokenizer.decode([i]) for i in tokenizer.encode_foreign("in 1943.")] == ["in ", "194", "3", "."]


def test_tokenizer_survives_beside_a_model(world, tokenizer, tmp_path):
    """Fails if a directory with a config.json of Qwen2 is cut by Qwen2's own rules instead of its tokenizer.json."""
    train_tokenizer(world, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    text = "Red Harbor was directed by Baro Vond in 1943.\n</information>\n"
    assert Tokenizer.load(tmp_path).encode_foreign(text) == tokenizer.encode_foreign(text)


def test_tokenizer_is_reproducible_and_lossless(world, tokenizer, tmp_path):
    """Fails if training it again gives other ids than the shipped policy knows, or if it drops characters."""
    train_tokenizer(world, tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    for text in ("Zoë <said>:\n\n 12345 </search>x", "<|im_end|> < a", "\t日本 ##", ""):
        assert tokenizer.decode(tokenizer.encode_foreign(text)) == text
    prompt = tokenizer.chat([{"role": "user", "content": "Who?"}])
    assert tokenizer.decode(prompt, control=True) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_scripted_turns_parse_as_written(world, tokenizer, retriever):
    """Fails if a scripted turn is not read back by the grammar, or the mask covers anything but the turns."""
    rng = np.random.default_rng(0)
    for kind in ("parallel", "sequential", "single"):
        for question in world.questions("train", kind, 20, seed=1):
            steps = plan(question, np.random.default_rng(1), ALWAYS_RIGHT)
            actions = [parse_turn(step.text) for step in steps]
            assert all(action.well_formed for action in actions)
            assert actions[-1].answer == question.answers[0]
            assert [a.queries for a in actions[:-1]] == [step.queries for step in steps[:-1]]
            ids, mask = scripted_trajectory(question, retriever, tokenizer, rng, ALWAYS_RIGHT)
            sampled = tokenizer.decode(ids[mask], control=True)
            assert sampled == "".join(step.text for step in steps) + "<|im_end|>"
            assert question.answers[0] in tokenizer.decode(ids[~mask])


def test_mixture_has_the_stated_shares(world):
    """Fails if the cold start does not hold the strategies that reinforcement learning must choose from."""
    rng, mixture = np.random.default_rng(0), Mixture(drill=0)
    plans = {
        kind: [plan(q, rng, mixture) for q in world.questions("train", kind, 1500, seed=0)]
        for kind in ("parallel", "sequential")
    }

    def split_share(kind):
        return np.mean([len(steps[0].queries) > 1 for steps in plans[kind]])

    assert abs(split_share("parallel") - mixture.split) < 0.04
    assert abs(split_share("sequential") - mixture.wrong_split) < 0.04
    slips = [any(step.thought is None for step in steps) for steps in plans["parallel"] + plans["sequential"]]
    assert abs(np.mean(slips) - mixture.forgotten_think) < 0.02


def test_scripted_trajectories_are_short_and_reproducible(world, tokenizer, retriever):
    """Fails if the median trajectory exceeds 200 ids, which the time budget of the demo rests on."""
    questions = [q for kind in ("parallel", "sequential", "single") for q in world.questions("train", kind, 150, 0)]
    first, again = (
        scripted_trajectories(questions, retriever, tokenizer, np.random.default_rng(5), Mixture()) for _ in range(2)
    )
    assert np.median([len(ids) for ids, _ in first]) <= 200
    assert all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in zip(first, again, strict=True))


class TitleRetriever:
    """Finds the passage whose title opens the query; enough to write trajectories of many worlds quickly."""

    def __init__(self, passages: list[Passage]):
        self._by_title = {p.title: p for p in passages}

    def search(self, queries, k):
        return [[p] if (p := self._by_title.get(" ".join(q.split()[:2]))) else [] for q in queries]


def test_sft_learns_and_masks(tokenizer):
    """Fails if padding or observations are trained on, or if a few steps do not lower the loss."""
    stages = {name: Stage(topk, worlds=1, trajectories_per_world=60) for topk, name in enumerate(STAGES)}
    config = SFTConfig(**stages, ordering_rows=10, buckets=(64, 256), tokens_per_batch=1024, log_every_steps=1)
    rows = make_rows(config, tokenizer, TitleRetriever)
    assert [len(r) for r in rows] == [70, 60, 60]
    shapes = set()
    for i in range(len(rows)):
        for ids, mask in batches(rows[i], config, i):
            shapes.add(ids.shape)
            assert ids.shape == mask.shape and ids.shape[1] in config.buckets and ids.size <= config.tokens_per_batch
            assert (ids[mask] != 0).all()
    assert len(shapes) <= len(config.buckets)
    losses = []
    shape, _ = train(config, tokenizer, rows, log=lambda step, values: losses.append(values["loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert shape.vocab_rows >= tokenizer.size and shape.layers == PRESETS["toy"].layers

"""Scripted trajectories for the cold start: right grammar, real passages, deliberately poor strategies.

A teacher plans a trajectory from a question's metadata, the retriever answers its searches, and the text is written as
token ids with a loss mask, in the very form the collector of rollouts gives it. Reinforcement learning then has
something to choose from: the mixture holds too few parallel searches on comparisons, and some on bridges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from psearch_jax.data.closed_world import ROLES
from psearch_jax.data.themes import ENCYCLOPEDIA
from psearch_jax.text.prompts import load_template, render_prompt
from psearch_jax.text.tags import render_observation
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question
from retrieval.protocol import Passage, Retriever

OBSERVATION_TOKENS = 256


@dataclass(frozen=True)
class Mixture:
    """Shares of the teacher's strategies, each between 0 and 1."""

    split: float = 0.25  # comparisons: all entities in one search
    hasty: float = 0.1  # comparisons and bridges: one search, then a guess
    guess: float = 0.5  # comparisons: all is known, but the answer is a guess instead of a comparison
    wrong_split: float = 0.15  # bridges: the second hop is asked before its subject is known
    recover: float = 0.6  # of the wrong splits: one more search finds the answer; the others answer wrongly
    redundant: float = 0.2  # all but splits: one search is run twice
    forgotten_think: float = 0.08  # one turn has no reasoning
    drill: float = 0.3  # comparisons: a split whose first turn is given, so that only reading is taught


@dataclass(frozen=True)
class Step:
    """One scripted turn: the reasoning (None when it is forgotten), then searches, or an answer if there are none."""

    thought: str | None
    queries: tuple[str, ...] = ()
    answer: str = ""
    taught: bool = True  # whether the loss covers the turn

    @property
    def text(self) -> str:
        """The turn as the policy writes it."""
        thought = "" if self.thought is None else f"<think> {self.thought} </think> "
        if self.queries:
            return f"{thought}<search> {' ## '.join(self.queries)} </search>"
        return f"{thought}<answer> {self.answer} </answer>"


def plan(question: Question, rng: np.random.Generator, mixture: Mixture) -> tuple[Step, ...]:
    """The teacher's turns for one closed-world question of kind parallel, sequential or single."""
    steps = (
        _plan_comparison(question, rng, mixture) if question.kind == "parallel" else _plan_hops(question, rng, mixture)
    )
    if rng.random() < mixture.forgotten_think:
        slip = rng.integers(len(steps))
        steps[slip] = Step(None, steps[slip].queries, steps[slip].answer, steps[slip].taught)
    return tuple(steps)


def _plan_comparison(question: Question, rng: np.random.Generator, mixture: Mixture) -> list[Step]:
    names, years = question.metadata["names"], question.metadata["years"]
    queries = tuple(question.metadata["queries"])
    first, other = int(np.argmin(years)), int(rng.integers(len(names)))
    verdict = Step(f"{_weighed(years)}{ROLES[first]}", answer=names[first])
    guess = Step(f"guess {ROLES[other]}", answer=names[other])
    if rng.random() < mixture.drill:
        return [Step("split", queries, taught=False), verdict]
    strategy = rng.random()
    if rng.random() < mixture.guess:
        verdict = guess
    if strategy < mixture.split:
        return [Step("split", queries), verdict]
    if strategy < mixture.split + mixture.hasty:
        return [Step(f"look up {ROLES[0]}", queries[:1]), guess]
    searches = [Step(f"look up {ROLES[i]}", (query,)) for i, query in enumerate(queries)]
    return [*_repeat_one(searches, rng, mixture), verdict]


def _weighed(years: Sequence[int]) -> str:
    """The reasoning before a verdict."""
    return f"{' vs '.join(map(str, years))} so "


def _plan_hops(question: Question, rng: np.random.Generator, mixture: Mixture) -> list[Step]:
    hops = question.metadata["hops"]
    searches = [Step("next" if i else "look up", (query,)) for i, (query, _) in enumerate(hops)]
    strategy = rng.random() if question.kind == "sequential" else 1.0
    if strategy < mixture.wrong_split:
        # The subject of the second hop is not known yet, so it is asked of the question's own subject.
        first, second = hops[0][0], hops[1][0]
        both = (first, f"{' '.join(first.split()[:2])} {second.split()[-1]}")
        if rng.random() < mixture.recover:
            return [Step("split", both), searches[1], Step("found", answer=hops[1][1])]
        return [Step("split", both), Step("guess", answer=hops[0][1])]
    if strategy < mixture.wrong_split + mixture.hasty:
        return [searches[0], Step("guess", answer=hops[0][1])]
    return [*_repeat_one(searches, rng, mixture), Step("found", answer=hops[-1][1])]


def _repeat_one(searches: list[Step], rng: np.random.Generator, mixture: Mixture) -> list[Step]:
    """At times, the last search once more."""
    if rng.random() < mixture.redundant:
        return [*searches, Step("again", searches[-1].queries)]
    return searches


def write_trajectory(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    steps: Sequence[Step],
    passages: Sequence[Sequence[Sequence[Passage] | None]],
    encode: Callable[[str], list[int]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [S] int32 and loss mask [S] bool of a trajectory: prompt, turns, and an observation after every search.

    `passages[i]` are the rankings of the sub-queries of the i-th turn; None where nothing was searched.
    """
    encode = encode or tokenizer.encode_foreign
    ids, mask = list(prompt), [False] * len(prompt)
    for step, rankings in zip(steps, passages, strict=True):
        turn = encode(step.text)
        if not step.queries:
            turn = turn + tokenizer.encode_trusted("<|im_end|>")
        searched = bool(step.queries) and None not in rankings
        observation = render_observation(step.queries, rankings, encode, OBSERVATION_TOKENS) if searched else []
        ids += turn + observation
        mask += [step.taught] * len(turn) + [False] * len(observation)
    return np.asarray(ids, np.int32), np.asarray(mask, bool)


def ordering_exercise(
    tokenizer: Tokenizer, rng: np.random.Generator, verdicts: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [S] int32 and loss mask [S] bool of a few comparisons of years in a row; only the verdicts are taught.

    Whole trajectories hold one comparison in a hundred ids: too few to learn which year comes first.
    """
    ids, mask = [], []
    for _ in range(verdicts):
        first_years = list(ENCYCLOPEDIA.first_year.values())
        first_year = first_years[rng.integers(len(first_years))]
        years = first_year + rng.choice(100, size=2 if rng.random() < 0.6 else 3, replace=False)
        pieces = (f"<think> {_weighed(years)}", f"{ROLES[int(np.argmin(years))]} ", "</think> ")
        for piece, taught in zip(pieces, (False, True, False), strict=True):
            piece_ids = tokenizer.encode_foreign(piece)
            ids += piece_ids
            mask += [taught] * len(piece_ids)
    return np.asarray(ids, np.int32), np.asarray(mask, bool)


def scripted_trajectories(
    questions: Sequence[Question],
    retriever: Retriever,
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    mixture: Mixture,
    topk: int = 3,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """One (ids, mask) per question, as `write_trajectory` gives them, with the retriever's own passages.

    All searches go out in one batch. Plans depend on `rng` alone, so equal arguments give equal ids. With `topk` 0
    nothing is searched and a trajectory ends with its first search: the cheapest exercise in copying names.
    """
    encode = lru_cache(maxsize=1 << 16)(tokenizer.encode_foreign)
    template = load_template("toy")
    if topk == 0:
        mixture = replace(mixture, drill=0.0)  # a drill teaches nothing before the passages
    plans = [plan(question, rng, mixture)[: None if topk else 1] for question in questions]
    queries = list(dict.fromkeys(query for steps in plans for step in steps for query in step.queries))
    found = dict(zip(queries, retriever.search(queries, topk), strict=True)) if topk else dict.fromkeys(queries)
    return [
        write_trajectory(
            tokenizer,
            render_prompt(tokenizer, template, question.text),
            steps,
            [[found[query] for query in step.queries] for step in steps],
            encode,
        )
        for question, steps in zip(questions, plans, strict=True)
    ]


def scripted_trajectory(
    question: Question,
    retriever: Retriever,
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    mixture: Mixture,
    topk: int = 3,
) -> tuple[np.ndarray, np.ndarray]:
    """`scripted_trajectories` of one question."""
    return scripted_trajectories([question], retriever, tokenizer, rng, mixture, topk)[0]

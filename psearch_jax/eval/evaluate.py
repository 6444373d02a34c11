"""Evaluation: the training engine with one sample per question, and what is counted about its trajectories.

Letters: Q questions, R samples per question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from flax import nnx

from psearch_jax.eval.benchmarks import Published, published
from psearch_jax.metrics import mean
from psearch_jax.rollout.collect import Collector, Progress
from psearch_jax.text.answers import exact_match, f1
from psearch_jax.types import KINDS, Kind, Question, RewardParts, Trajectory, Turn

Summary = dict[str, float]
DIGITS = 6  # decimals kept of every figure
LAST_TURN = 6  # of the cumulative share of finished questions
RESAMPLES = 1000
BOOTSTRAP_SEED = 0


def evaluate(
    collector: Collector,
    params: nnx.State,
    questions: Sequence[Question],
    *,
    seed: int,
    step: int,
    temperature: float,
    samples: int = 1,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Q x R trajectories of the policy, all samples of a question together.

    Args:
      collector: also used in training.
      params: the sampling copy of the policy.
      seed, step: named parts of every rollout's key; of no effect at temperature 0.
      temperature: 0 is greedy.
      samples: R.
    """
    return collector.collect(
        params, questions, samples, seed=seed, step=step, temperature=temperature, progress=progress
    )


def summarise(trajectories: Sequence[Trajectory]) -> Summary:
    """Means over trajectories, and `questions`, the number of different ones.

    - em, f1: of the answer (none scores 0);
    - decomposition_ratio: share whose first executed search held two or more sub-queries;
    - searches, sub_queries: run per question; turns: model calls per question (one search and an answer are 2);
    - valid_format: share that kept the grammar.

    Without trajectories only `questions` is there.
    """
    if not trajectories:
        return {"questions": 0}
    figures = {
        "em": mean(_em(t) for t in trajectories),
        "f1": mean(f1(t.answer, t.question.answers) for t in trajectories),
        "decomposition_ratio": mean(t.decomposed for t in trajectories),
        "searches": mean(len(t.executed) for t in trajectories),
        "sub_queries": mean(sum(len(turn.queries) for turn in t.executed) for t in trajectories),
        "turns": mean(t.model_calls for t in trajectories),
        "valid_format": mean(t.well_formed for t in trajectories),
    }
    rounded = {name: round(value, DIGITS) for name, value in figures.items()}
    return rounded | {"questions": len({(t.question.source, t.question.id) for t in trajectories})}


def by_kind(trajectories: Sequence[Trajectory]) -> dict[Kind, Summary]:
    """A summary per kind of question, in the order of `KINDS`; kinds without a trajectory are left out."""
    return {kind: summarise(group) for kind, group in _kinds(trajectories).items()}


def finished_by_turn(trajectories: Sequence[Trajectory], last: int = LAST_TURN) -> list[float]:
    """Share of trajectories that had answered by model call 1, 2, .. last (the paper's cumulative figure)."""
    calls = [t.model_calls if t.status == "answered" else last + 1 for t in trajectories]
    return [round(mean(c <= turn for c in calls), DIGITS) for turn in range(1, last + 1)] if calls else []


def em_interval(
    trajectories: Sequence[Trajectory], resamples: int = RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> tuple[float, float]:
    """Bootstrap 95% interval of EM. Questions are drawn with replacement, each with all its samples.

    Raises:
      ValueError: there is no trajectory.
    """
    if not trajectories:
        raise ValueError("em_interval: no trajectories")
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for t in trajectories:
        scores[t.question.source, t.question.id].append(_em(t))
    right = np.array([sum(s) for s in scores.values()])  # [Q]
    asked = np.array([len(s) for s in scores.values()])  # [Q]
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for i in range(resamples):
        drawn = rng.integers(0, len(right), len(right))
        means[i] = right[drawn].sum() / asked[drawn].sum()
    low, high = np.quantile(means, (0.025, 0.975))
    return round(float(low), DIGITS), round(float(high), DIGITS)


def figures(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """All that is reported of one benchmark, JSON-ready: `all` and `kinds`, {kind: ...}.

    Each is a summary with `em_interval`, [low, high], and `finished_by_turn`.

    Raises:
      ValueError: there is no trajectory.
    """
    kinds = {kind: _detailed(group) for kind, group in _kinds(trajectories).items()}
    return {"all": _detailed(trajectories), "kinds": kinds}


def _detailed(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    more = {"em_interval": list(em_interval(trajectories)), "finished_by_turn": finished_by_turn(trajectories)}
    return summarise(trajectories) | more


def results_table(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of `figures` by benchmark name, with the published rows of the same benchmark below."""
    titles = ("benchmark", "questions", "policy", "EM", "95%", "F1", "split", "searches", "turns", "valid", "n")
    lines = [" | ".join(titles), "|".join(["---"] * len(titles))]
    for name, found in benchmarks.items():
        kinds = found["kinds"]
        only = next(iter(kinds)) if len(kinds) == 1 else None
        subset = only is not None and bool(published(name, only))
        if not only:
            lines.append(_our_line(name, "all", found["all"]))
        if not subset:
            lines += _published_lines(name, "all", published(name))
        for kind, values in kinds.items():
            lines.append(_our_line(name, kind, values))
            lines += _published_lines(name, kind, published(name, kind))
    return "\n".join(f"| {line} |" if " | " in line else f"|{line}|" for line in lines)


def _our_line(name: str, kind: str, values: Mapping[str, Any]) -> str:
    low, high = values["em_interval"]
    keys = ("f1", "decomposition_ratio", "searches", "turns", "valid_format")
    cells = [f"{values['em']:.3f}", f"{low:.3f}-{high:.3f}", *(f"{values[key]:.3f}" for key in keys)]
    return " | ".join([name, kind, "this policy", *cells, str(values["questions"])])


def _published_lines(name: str, kind: str, rows: Sequence[Published]) -> list[str]:
    def split(row: Published) -> str:
        return "" if row.decomposition_ratio is None else f"{row.decomposition_ratio:.3f}"

    return [
        " | ".join(
            [name, kind, f"{row.method}, {row.model} (published)", f"{row.em:.3f}", "", "", split(row)] + [""] * 4
        )
        for row in rows
    ]


def trajectory_row(trajectory: Trajectory, reward: RewardParts | None, step: int) -> dict[str, Any]:
    """One trajectory as it is written to disk, JSON-ready and free of clock times.

    `ids`, `mask` (1: sampled) and `logprobs` have the same length. `reward` holds the four parts and their `total`,
    and is empty when none is given. `source`, `question` and `golden_answers` are there for the reader.
    """
    t, question = trajectory, trajectory.question
    return {
        "question_id": question.id,
        "source": question.source,
        "kind": question.kind,
        "question": question.text,
        "golden_answers": list(question.answers),
        "sample": t.sample,
        "step": step,
        "status": t.status,
        "reward": asdict(reward) | {"total": reward.total} if reward else {},
        "turns": [_turn_row(turn) for turn in t.turns],
        "ids": np.asarray(t.ids).tolist(),
        "mask": np.asarray(t.mask).astype(int).tolist(),
        "logprobs": [round(float(x), DIGITS) if np.isfinite(x) else None for x in t.logprobs],
    }


def _turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "text": turn.text,
        "queries": list(turn.queries),
        "passages": [[{"id": p.id, "title": p.title} for p in found] for found in turn.passages],
        "n_sampled": turn.n_sampled,
    }


def _kinds(trajectories: Sequence[Trajectory]) -> dict[Kind, list[Trajectory]]:
    """The trajectories of every kind that has some, in the order of `KINDS`."""
    groups = {kind: [t for t in trajectories if t.question.kind == kind] for kind in KINDS}
    return {kind: group for kind, group in groups.items() if group}


def _em(trajectory: Trajectory) -> float:
    return float(exact_match(trajectory.answer, trajectory.question.answers))

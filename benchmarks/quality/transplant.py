"""`launch/bench.py transplant`: whether a policy decides to split by the question or by its own first thought.

The policy answers the closed world's minimal pairs. Then each question is asked again with a first thought that is
already written: its own, that of another question of the same type, or that of a question of the other type. A policy
that decides by the question splits as often with each of them. One that decides by what the thought says about the
needed facts follows the thought. The names of a foreign thought fit neither question, so compare the last two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.speed.timing import log, machine, written
from configs.smoke import get_config
from psearch_jax.assembly import build
from psearch_jax.config import Config, from_mapping
from psearch_jax.eval.benchmarks import PAIRS, closed_world_benchmark
from psearch_jax.eval.evaluate import evaluate
from psearch_jax.eval.tables import table
from psearch_jax.runtime import cli
from psearch_jax.runtime.metrics import mean
from psearch_jax.text.tags import THINK_CLOSE
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.monitoring.validation import EVAL_STEP
from psearch_jax.types import Question, Trajectory

THOUGHT_TOKENS = 64  # more context for the prompt, which then holds a thought
THOUGHTS = ("none written", "own", "same type", "other type")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench transplant", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["toy"], help="policies, each as --model of launch/eval.py")
    parser.add_argument("--count", type=int, default=200, help="questions, half of each type")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    cli.configure_jax()
    lines = [line for model in flags.model for line in measured(model, flags.count, flags.temperature)]
    written(flags.json, {"machine": machine(), "arguments": vars(flags), "transplant": lines})
    rows = [["policy", "first thought", "parallel split", "sequential split", "decomposition accuracy"]]
    for line in lines:
        figures = (f"{line[name]:.3f}" for name in ("parallel", "sequential", "accuracy"))
        rows.append([line["policy"], line["thought"], *figures])
    print(table(rows))


def measured(model: str, count: int, temperature: float) -> list[dict[str, Any]]:
    """The share of questions whose first search is split, by type and by the origin of the first thought."""
    config = _with_room(from_mapping(get_config().to_dict()))
    parts = build.from_path(config, model)
    weights = parts.sampling_weights()
    asked = closed_world_benchmark(parts.world, PAIRS, count)
    plain = parts.collector.render

    def answered(asked: Sequence[Question], render: Callable[[Question], list[int]]) -> list[Trajectory]:
        parts.collector.render = render
        return evaluate(parts.collector, weights, asked, seed=1, step=EVAL_STEP, temperature=temperature)

    first = answered(asked, plain)
    thoughts = {t.question.id: thought_of(t, parts.tokenizer) for t in first}
    kept = [q for q in asked if thoughts[q.id]]
    log(f"{model}: {len(kept)} of {len(asked)} questions have a first thought")
    lines = [_line(model, THOUGHTS[0], [t for t in first if thoughts[t.question.id]])]
    for origin in THOUGHTS[1:]:
        donors = donors_of(kept, origin)

        def render(question: Question, donors: Mapping[str, Question] = donors) -> list[int]:
            return plain(question) + thoughts[donors[question.id].id]

        lines.append(_line(model, origin, answered(kept, render)))
    return lines


def donors_of(questions: Sequence[Question], origin: str) -> dict[str, Question]:
    """For each question's id, the question whose thought it gets."""
    donors = {}
    for i, question in enumerate(questions):
        if origin == "own":
            donors[question.id] = question
            continue
        same = origin == "same type"
        others = [q for q in questions if (q.kind == question.kind) == same and q is not question]
        donors[question.id] = others[i % len(others)]
    return donors


def thought_of(trajectory: Trajectory, tokenizer: Tokenizer) -> list[int]:
    """The sampled tokens up to the end of the first thought; empty if the first turn has none."""
    sampled = trajectory.ids[trajectory.prompt_length :].tolist()[: trajectory.turns[0].n_sampled]
    for n in range(1, len(sampled) + 1):
        if tokenizer.decode(sampled[:n]).rstrip().endswith(THINK_CLOSE):
            return sampled[:n]
    return []


def _with_room(config: Config) -> Config:
    rollout = config.rollout
    more = {name: getattr(rollout, name) + THOUGHT_TOKENS for name in ("prompt_tokens", "context_tokens")}
    return replace(config, rollout=replace(rollout, **more))


def _line(model: str, thought: str, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    split = {
        kind: [float(t.decomposed) for t in trajectories if t.question.kind == kind]
        for kind in ("parallel", "sequential")
    }
    shares = {kind: mean(values) for kind, values in split.items()}
    return {
        "policy": model,
        "thought": thought,
        "questions": len(trajectories),
        **shares,
        "accuracy": (shares["parallel"] + 1 - shares["sequential"]) / 2,
    }

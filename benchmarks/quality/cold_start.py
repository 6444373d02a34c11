"""`launch/bench.py cold_start`: skills of a toy policy before reinforcement learning, with known and with new names.

Greedy, by form of question: EM next to its chance level, the recall of an oracle's searches, how often the names in
sub-queries are copied correctly, and the cost. `known` names are like those in the cold start's rows; `new` names
occur in no cold start.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.quality.world import facts_of, finds_all
from configs.smoke import get_config
from psearch_jax.assembly import build
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.closed_world.scripted import oracle
from psearch_jax.closed_world.wordings import FORMS, JUDGED
from psearch_jax.config import Config, from_mapping
from psearch_jax.eval.evaluate import evaluate
from psearch_jax.eval.scores import score
from psearch_jax.eval.tables import share, table
from psearch_jax.runtime import cli
from psearch_jax.runtime.metrics import mean
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.train.monitoring.validation import EVAL_STEP
from psearch_jax.types import KINDS, Question, Trajectory

NAME = re.compile(r"\b[A-Z][a-z]{6}\b")
COLUMNS = ("EM", "chance level", "oracle recall", "names copied", "split", "turns", "valid format")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench cold_start", description=__doc__)
    parser.add_argument("--model", default="toy", help="as for launch/eval.py; several separated by commas")
    parser.add_argument("--count", type=int, default=100, help="questions per form")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    cli.configure_jax()
    report: dict[str, Any] = {}
    for model in flags.model.split(","):
        for names, held_out in (("known", False), ("new", False), ("known", True)):
            title = f"{model}, {names} names" + (", held-out wordings" if held_out else "")
            figures = measured(model, names, held_out, flags.count, flags.temperature)
            report[title] = figures
            print(
                f"{title}: median {figures['median_tokens']:.0f} tokens\n\n{forms_table(figures['forms'])}\n",
                flush=True,
            )
    if flags.json:
        write_atomically(flags.json, json.dumps(report, indent=2) + "\n")


def measured(model: str, names: str, held_out: bool, count: int, temperature: float) -> dict[str, Any]:
    """Figures by form, by kind, and over the forms with two or more answer options (JUDGED)."""
    config: Config = from_mapping(get_config().to_dict())
    config = replace(config, data=replace(config.data, world_names=names))
    parts = build.from_path(config, model)
    world = parts.world
    asked = [
        q
        for name, form in FORMS.items()
        for q in questions(world, "eval", form.kind, count, 1, [name], held_out_wordings=held_out)
    ]
    rolled = evaluate(
        parts.collector, parts.sampling_weights(), asked, seed=1, step=EVAL_STEP, temperature=temperature
    )
    best = dict(
        zip((q.text for q in asked), oracle_retrieves_all(asked, parts.collector.retriever, config), strict=True)
    )

    def figures(group: Iterable[Trajectory]) -> dict[str, float]:
        chosen = list(group)
        scores = [score(t) for t in chosen]
        return {
            "EM": mean(s.em for s in scores),
            "chance level": mean(t.question.metadata["chance"] for t in chosen),
            "oracle recall": mean(best[t.question.text] for t in chosen),
            "names copied": mean(correct for t in chosen for correct in names_copied(t)),
            "split": mean(s.split for s in scores),
            "turns": mean(s.turns for s in scores),
            "valid format": mean(s.valid_format for s in scores),
        }

    groups = {name: [t for t in rolled if t.question.metadata["form"] == name] for name in FORMS}
    groups |= {f"all {kind}": [t for t in rolled if t.question.kind == kind] for kind in KINDS}
    groups["all with answer options"] = [t for t in rolled if t.question.metadata["form"] in JUDGED]
    return {
        "forms": {name: figures(group) for name, group in groups.items()},
        "median_tokens": float(np.median([len(t.ids) for t in rolled])),
    }


def names_copied(trajectory: Trajectory) -> list[bool]:
    """For every executed sub-query with a name, whether all its names occur in the question or in earlier passages."""
    available = set(NAME.findall(trajectory.question.text))
    out = []
    for turn in trajectory.turns:
        for text in turn.queries:
            names = NAME.findall(text)
            if names:
                out.append(set(names) <= available)
        available |= {name for ranking in turn.passages for passage in ranking for name in NAME.findall(passage.text)}
    return out


def oracle_retrieves_all(asked: Sequence[Question], retriever: Any, config: Config) -> list[bool]:
    """For each question, whether an oracle that splits correctly retrieves all facts that it needs."""
    retrieves_all = []
    for question in asked:
        steps = oracle(question)
        passages = [
            p
            for s in steps
            for r in (retriever.search(list(s.queries), config.retrieval.topk) if s.queries else [])
            for p in r
        ]
        retrieves_all.append(finds_all(passages, facts_of(question)) and len(steps) - 1 <= config.rollout.search_turns)
    return retrieves_all


def forms_table(forms: dict[str, dict[str, float]]) -> str:
    rows = [[name, *(share(f[c]) if c != "turns" else f"{f[c]:.2f}" for c in COLUMNS)] for name, f in forms.items()]
    return table([["form", *COLUMNS], *rows])

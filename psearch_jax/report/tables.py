"""Tables of run summaries, for a terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psearch_jax.eval.benchmarks import PAIRS, TOOLS
from psearch_jax.eval.tables import table
from psearch_jax.types import KINDS

COLUMNS = ("decomposition_accuracy", "em", "chance", "f1", "decomposition_ratio", "searches", "turns", "valid_format")
COMPARED = ("decomposition_accuracy", "em", "decomposition_ratio", "turns")
TITLES = {"em": "EM", "f1": "F1", "chance": "chance level", "decomposition_ratio": "split"}
# Minimal pairs come first: their two questions have the same words, so no single word reveals whether to split.
QUESTION_TYPES = (PAIRS, *KINDS, *TOOLS)


def before_and_after(summary: Mapping[str, Any]) -> str:
    """A Markdown table of one run: a row per question type and moment, sampled and (if evaluated) greedy."""
    rows = [["question type", "policy", *(TITLES.get(name, name.replace("_", " ")) for name in COLUMNS)]]
    for kind in QUESTION_TYPES:
        for moment in ("before", "after", "before_greedy", "after_greedy"):
            values = summary.get(moment, {}).get(kind)
            if values:
                cells = (f"{values[name]:.3f}" if name in values else "" for name in COLUMNS)
                rows.append([kind, moment.replace("_", ", "), *cells])
    return table(rows)


def side_by_side(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A Markdown table of several runs: EM, splitting and turns per question type, before -> after."""
    rows = [["run", "question type", *(TITLES.get(name, name.replace("_", " ")) for name in COMPARED)]]
    for run, summary in runs:
        for kind in QUESTION_TYPES:
            before, after = (summary.get(moment, {}).get(kind) for moment in ("before", "after"))
            if before and after:
                cells = (f"{before[name]:.3f} -> {after[name]:.3f}" if name in before else "" for name in COMPARED)
                rows.append([run, kind, *cells])
    return table(rows)

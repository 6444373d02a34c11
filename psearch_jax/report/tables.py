"""Tables of run summaries, for a terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psearch_jax.eval.benchmarks import PAIRS
from psearch_jax.types import KINDS

COLUMNS = (
    ("decomposition_accuracy", "decomposition accuracy"),
    ("em", "EM"),
    ("chance", "chance level"),
    ("f1", "F1"),
    ("decomposition_ratio", "split"),
    ("searches", "searches"),
    ("turns", "turns"),
    ("valid_format", "valid format"),
)


def before_and_after(summary: Mapping[str, Any]) -> str:
    """A Markdown table of one run: a row per kind and moment, sampled and (if evaluated) greedy.

    Minimal pairs come first: their two questions have the same words, so no single word reveals whether to split.
    """
    lines = ["| question type | policy | " + " | ".join(title for _, title in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for kind in (PAIRS, *KINDS):
        for moment in ("before", "after", "before_greedy", "after_greedy"):
            values = summary.get(moment, {}).get(kind)
            if values:
                cells = " | ".join(f"{values[key]:.3f}" if key in values else "" for key, _ in COLUMNS)
                lines.append(f"| {kind} | {moment.replace('_', ', ')} | {cells} |")
    return "\n".join(lines)


def side_by_side(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A Markdown table of several runs: EM, splitting and turns per kind, before -> after."""
    shown = [c for c in COLUMNS if c[0] in ("decomposition_accuracy", "em", "decomposition_ratio", "turns")]
    lines = ["| run | question type | " + " | ".join(title for _, title in shown) + " |"]
    lines.append("|---" * (len(shown) + 2) + "|")
    for name, summary in runs:
        for kind in (PAIRS, *KINDS):
            before, after = (summary.get(moment, {}).get(kind) for moment in ("before", "after"))
            if before and after:
                cells = " | ".join(
                    f"{before[key]:.3f} -> {after[key]:.3f}" if key in before else "" for key, _ in shown
                )
                lines.append(f"| {name} | {kind} | {cells} |")
    return "\n".join(lines)

"""Evaluations as Markdown tables, with the published figures next to ours."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from psearch_jax.eval.benchmarks import Published, find_published
from psearch_jax.eval.scores import LAST_TURN, Score, compare_paired, group_by_kind, group_by_source
from psearch_jax.runtime.metrics import mean
from psearch_jax.types import KINDS, UserError

# The fields of `Score` in which two evaluations are compared, and their titles.
PAIRED = {
    "em": "EM",
    "f1": "F1",
    "split": "split",
    "turns": "turns",
    "tokens": "sampled tokens",
    "valid_format": "valid format",
}

ESCAPED = "\\|"  # a vertical bar inside a cell


def share(value: float | None) -> str:
    """A share as papers print it: `.229`, `1.000`; empty for None."""
    return "" if value is None else f"{value:.3f}".removeprefix("0")


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head. `cells_of` is the inverse for one line."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', ESCAPED) for cell in line)} |" for line in lines)


def cells_of(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip().replace(ESCAPED, "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def results(benchmarks: Mapping[str, Mapping[str, Any]], policy: str) -> str:
    """All tables for `figures` by benchmark name: results, finished by turn, pass@k, splitting."""
    parts = [
        results_table(benchmarks, policy),
        "Cumulative share of trajectories that have answered by each turn:\n\n" + finished_table(benchmarks),
    ]
    if any("pass_at" in report["all"] for report in benchmarks.values()):
        parts.append("With several samples per question:\n\n" + samples_table(benchmarks))
    parts.append("Decomposition of the first search, regardless of the answer:\n\n" + splitting_table(benchmarks))
    return "\n\n".join(parts)


def results_table(benchmarks: Mapping[str, Mapping[str, Any]], policy: str) -> str:
    """A row per benchmark and kind, followed by its chance level and published rows; an average if there are several.

    The sets of a merged benchmark follow it, each with its own published rows. The average counts each set separately.
    """
    head = ["benchmark", "question type", "policy", "EM", "95% interval", "F1", "split", "searches", "turns"]
    rows = [[*head, "sampled tokens", "valid format", "model calls, total", "questions"]]
    averaged: list[Mapping[str, Any]] = []
    for name, report in benchmarks.items():
        sets = report.get("sources", {})
        rows += set_rows(name, name, policy, report)
        for source, values in sets.items():
            rows += set_rows(f"{name}: {source}", source, policy, values)
        averaged += [values["all"] for values in (sets.values() if sets else [report])]
    if len(averaged) > 1:  # with equal weights, as in the paper
        means = {key: mean(values[key] for values in averaged) for key in _AVERAGED}
        totals = {key: sum(values[key] for values in averaged) for key in ("llm_calls", "questions")}
        rows.append(policy_row("average", "", policy, means | totals))
    return table(rows)


_AVERAGED = ("em", "f1", "decomposition_ratio", "searches", "turns", "tokens", "valid_format")


def set_rows(title: str, name: str, policy: str, report: Mapping[str, Any]) -> list[list[str]]:
    """Our rows for one set, labelled `title`, with the rows published for the benchmark `name`."""
    kinds: dict[Any, Any] = dict(report["kinds"])
    only = next(iter(kinds)) if len(kinds) == 1 else None
    everything = report["all"]
    rows = [] if only else [policy_row(title, "all", policy, everything), *chance_rows(title, "all", everything)]
    if only is None or not find_published(name, only):
        rows += published_rows(title, "all", find_published(name))
    for kind, values in kinds.items():
        rows += [policy_row(title, kind, policy, values), *chance_rows(title, kind, values)]
        rows += published_rows(title, kind, find_published(name, kind))
    return rows


def policy_row(name: str, kind: str, policy: str, values: Mapping[str, Any]) -> list[str]:
    interval = "-".join(map(share, values.get("em_interval", ())))
    figures = [share(values["f1"]), share(values["decomposition_ratio"])]
    figures += [f"{values['searches']:.2f}", f"{values['turns']:.2f}", f"{values['tokens']:.0f}"]
    figures += [share(values["valid_format"]), str(values["llm_calls"]), str(values["questions"])]
    return [name, kind, policy, share(values["em"]), interval, *figures]


def chance_rows(name: str, kind: str, values: Mapping[str, Any]) -> list[list[str]]:
    """The EM of random guesses, if it is known for all questions."""
    return [[name, kind, "chance level", share(values["chance"]), *[""] * 9]] if "chance" in values else []


def published_rows(name: str, kind: str, rows: Sequence[Published]) -> list[list[str]]:
    return [
        [name, kind, f"{row.method}, {row.model} (published, arXiv 2508.09303)", share(row.em), "", ""]
        + [share(row.decomposition_ratio), *[""] * 6]
        for row in rows
    ]


def finished_table(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """The cumulative share of trajectories that had answered by each turn."""
    rows = [["benchmark", "question type", *(f"turn {n}" for n in range(1, LAST_TURN + 1))]]
    for name, report in benchmarks.items():
        groups = report["kinds"] if len(report["kinds"]) == 1 else {"all": report["all"], **report["kinds"]}
        rows += [[name, kind, *map(share, values["finished_by_turn"])] for kind, values in groups.items()]
    return table(rows)


def samples_table(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """pass@k."""
    ks = list(next(iter(benchmarks.values()))["all"]["pass_at"])
    rows = [["benchmark", *(f"pass@{k}" for k in ks)]]
    rows += [[name, *(share(report["all"]["pass_at"][k]) for k in ks)] for name, report in benchmarks.items()]
    return table(rows)


def splitting_table(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """How first searches were split, per kind, and decomposition accuracy next to two controls without a model."""
    head = ["benchmark", "question type", "split", "not split", "no search", "accuracy", "precision", "recall"]
    rows = [[*head, "accuracy of never splitting", "accuracy of a word heuristic"]]
    for name, report in benchmarks.items():
        splitting, confusion = report["splitting"], report["splitting"]["confusion"]
        for kind, counts in confusion.items():
            cells = (str(counts[decision]) for decision in ("split", "not_split", "no_search"))
            rows.append([name, kind, *cells, *[""] * 5])
        if sum(kind in confusion for kind in KINDS[:3]) > 1:  # precision of a single kind means nothing
            shares = ("accuracy", "precision", "recall", "never_split", "word_heuristic")
            rows.append([name, "all except mixed", "", "", "", *(share(splitting[figure]) for figure in shares)])
    return table(rows)


def paired_table(
    first: tuple[str, Mapping[str, Sequence[Score]]], second: tuple[str, Mapping[str, Sequence[Score]]]
) -> str:
    """Two evaluations of the same questions: means, differences with 95% intervals and p, and ratios.

    A merged benchmark is followed by its sets, and a set with several kinds by its kinds.

    Raises:
      UserError: they share no benchmark, or a benchmark's questions differ.
    """
    names = [name for name in first[1] if name in second[1]]
    if not names:
        raise UserError(f"{first[0]} and {second[0]}: no benchmark in common, accepted: evaluations of the same")
    head = ["benchmark", "metric", first[0], second[0], "difference", "95% interval", "p"]
    rows = [[*head, "ratio", "95% interval", "questions"]]
    for name in names:
        ours, theirs = (divide(name, scores[name]) for _, scores in (first, second))
        for title, group in ours.items():
            for value, metric in PAIRED.items():
                d = compare_paired(group, theirs.get(title, []), value)
                numbers = [f"{d[key]:.3f}" for key in ("first", "second")] + [f"{d['difference']:+.3f}"]
                spread = [f"{d['low']:+.3f} to {d['high']:+.3f}", f"{d['p']:.4f}"]
                ratio = [f"{d['ratio']:.3f}", f"{d['ratio_low']:.3f}-{d['ratio_high']:.3f}"]
                if math.isnan(d["ratio_low"]):  # the first mean is zero, in the data or in a bootstrap resample
                    ratio = ["", ""]
                rows.append([title, metric, *numbers, *spread, *ratio, str(d["questions"])])
    return table(rows)


def divide(name: str, scores: Sequence[Score]) -> dict[str, Sequence[Score]]:
    """A benchmark's scores, and those of its sets and kinds if it has several of them, by title."""
    sources = group_by_source(scores)
    sets = {f"{name}: {source}": group for source, group in sources.items()} if len(sources) > 1 else {}
    parts: dict[str, Sequence[Score]] = {name: scores}
    for title, group in (sets or parts.copy()).items():
        kinds = group_by_kind(group)
        parts[title] = group
        parts |= {f"{title}, {kind}": part for kind, part in kinds.items()} if len(kinds) > 1 else {}
    return parts

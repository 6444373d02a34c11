"""Evaluations as Markdown tables, with the published figures next to ours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psearch_jax.eval.benchmarks import Published, published, published_average
from psearch_jax.eval.scores import LAST_TURN, Score, by_kind, by_source, paired
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


# The figures of a summary about dependency plans, and their titles.
PLANS = {
    "independent_at_once": "independent pairs searched at once",
    "dependent_in_order": "dependent pairs searched in order",
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
    """All tables for `figures` by benchmark name: results, finished by turn, pass@k, splitting, plans, graphs."""
    parts = [
        results_table(benchmarks, policy),
        "Cumulative share of trajectories that have answered by each turn:\n\n" + finished_table(benchmarks),
    ]
    if any("pass_at" in report["all"] for report in benchmarks.values()):
        parts.append("With several samples per question:\n\n" + samples_table(benchmarks))
    parts.append("Decomposition of the first search, regardless of the answer:\n\n" + splitting_table(benchmarks))
    if any(name in report["all"] for report in benchmarks.values() for name in PLANS):
        parts.append("Searches that follow the question's dependency plan:\n\n" + plans_table(benchmarks))
    loose = [[name, share(report["all"].get("loose_accuracy"))] for name, report in benchmarks.items()]
    if any(value for _, value in loose):
        rows = [["benchmark", "loose accuracy"], *(row for row in loose if row[1])]
        parts.append("Share of the parts of the answer that were given:\n\n" + table(rows))
    if any("graphs" in report for report in benchmarks.values()):
        parts.append("By MuSiQue's reasoning graphs:\n\n" + graphs_table(benchmarks))
    return "\n\n".join(parts)


def results_table(benchmarks: Mapping[str, Mapping[str, Any]], policy: str) -> str:
    """A row per benchmark and kind, followed by its chance level and published rows; averages if there are several.

    The sets of a merged benchmark follow it, each with its own published rows. The average counts each set separately.
    """
    head = ["benchmark", "question type", "policy", "EM", "95% interval", "F1", "split", "searches", "turns"]
    rows = [[*head, "sampled tokens", "valid format", "model calls, total", "questions"]]
    averaged: list[tuple[str, Mapping[str, Any]]] = []
    for name, report in benchmarks.items():
        sets = report.get("sources", {})
        rows += _set_rows(name, name, policy, report)
        for source, values in sets.items():
            rows += _set_rows(f"{name}: {source}", source, policy, values)
        averaged += sets.items() if sets else [(name, report)]
    if len(averaged) > 1:
        rows.append(_average_row(policy, [report["all"] for _, report in averaged]))
        rows += _published_rows("average", "", published_average([name for name, _ in averaged]))
    return table(rows)


def _set_rows(title: str, name: str, policy: str, report: Mapping[str, Any]) -> list[list[str]]:
    """Our rows for one set, labelled `title`, with the rows published for the benchmark `name`."""
    kinds = report["kinds"]
    only = next(iter(kinds)) if len(kinds) == 1 else None
    rows = [] if only else [_our_row(title, "all", policy, report["all"]), *_chance_rows(title, "all", report["all"])]
    if only is None or not published(name, only):
        rows += _published_rows(title, "all", published(name))
    for kind, values in kinds.items():
        rows += [_our_row(title, kind, policy, values), *_chance_rows(title, kind, values)]
        rows += _published_rows(title, kind, published(name, kind))
    return rows


def _our_row(name: str, kind: str, policy: str, values: Mapping[str, Any]) -> list[str]:
    low, high = values["em_interval"]
    return [name, kind, policy, share(values["em"]), f"{share(low)}-{share(high)}", *_middle(values)] + [
        str(values["llm_calls"]),
        str(values["questions"]),
    ]


def _chance_rows(name: str, kind: str, values: Mapping[str, Any]) -> list[list[str]]:
    """The EM of random guesses, if it is known for all questions."""
    return [[name, kind, "chance level", share(values["chance"]), *[""] * 9]] if "chance" in values else []


def _middle(values: Mapping[str, Any]) -> list[str]:
    counts = (f"{values[key]:.2f}" for key in ("searches", "turns"))
    return [share(values["f1"]), share(values["decomposition_ratio"]), *counts, f"{values['tokens']:.0f}"] + [
        share(values["valid_format"])
    ]


def _average_row(policy: str, summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The mean over benchmarks with equal weights, as in the paper."""
    keys = ("f1", "decomposition_ratio", "searches", "turns", "tokens", "valid_format")
    means = {key: mean(values[key] for values in summaries) for key in keys}
    calls, questions = (sum(values[key] for values in summaries) for key in ("llm_calls", "questions"))
    em = share(mean(values["em"] for values in summaries))
    return ["average", "", policy, em, "", *_middle(means), str(calls), str(questions)]


def _published_rows(name: str, kind: str, rows: Sequence[Published]) -> list[list[str]]:
    return [
        [
            name,
            kind,
            f"{row.method}, {row.model} (published, {row.source})",
            share(row.em),
            "",
            "",
            share(row.decomposition_ratio),
        ]
        + [""] * 6
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
    """pass@k and maj@k."""
    ks = list(next(iter(benchmarks.values()))["all"]["pass_at"])
    rows = [["benchmark", *(f"{name}@{k}" for name in ("pass", "maj") for k in ks)]]
    for name, report in benchmarks.items():
        values = report["all"]
        rows.append([name, *(share(values[key][k]) for key in ("pass_at", "maj_at") for k in ks)])
    return table(rows)


def splitting_table(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """How first searches were split, per kind, and decomposition accuracy next to two controls without a model."""
    head = ["benchmark", "question type", "split", "not split", "no search", "accuracy", "precision", "recall"]
    rows = [[*head, "accuracy of never splitting", "accuracy of a word heuristic"]]
    for name, report in benchmarks.items():
        rows += _splitting_rows(name, "", report["splitting"])
        if "labels" in report:
            rows += _splitting_rows(name, " (manual labels)", report["labels"])
    return table(rows)


def _splitting_rows(name: str, note: str, decisions: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [name, kind + note, *(str(counts[key]) for key in ("split", "not_split", "no_search")), *[""] * 5]
        for kind, counts in decisions["confusion"].items()
    ]
    if sum(kind in decisions["confusion"] for kind in KINDS[:3]) > 1:  # precision of a single kind means nothing
        quality = [
            share(decisions[key]) for key in ("accuracy", "precision", "recall", "never_split", "word_heuristic")
        ]
        rows.append([name, f"all except mixed{note}", "", "", "", *quality])
    return rows


def plans_table(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """The share of pairs of entities that were searched as the dependency plans allow, per kind."""
    rows = [["benchmark", "question type", *PLANS.values()]]
    for name, report in benchmarks.items():
        for kind, values in {"all": report["all"], **report["kinds"]}.items():
            shares = [share(values.get(key)) for key in PLANS]
            if any(shares):
                rows.append([name, kind, *shares])
    return table(rows)


def graphs_table(benchmarks: Mapping[str, Mapping[str, Any]]) -> str:
    """MuSiQue: the structure of each graph, and the results."""
    rows = [["benchmark", "graph", "hops", "rounds", "width", "EM", "split", "searches", "questions"]]
    for name, report in benchmarks.items():
        for graph, v in report.get("graphs", {}).items():
            numbers = [str(v[key]) for key in ("hops", "rounds", "width")]
            done = [share(v["em"]), share(v["decomposition_ratio"]), f"{v['searches']:.2f}", str(v["questions"])]
            rows.append([name, graph, *numbers, *done])
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
    pairs = {}
    for name in names:
        pairs[name] = (first[1][name], second[1][name])
        parts = {f"{name}: {source}": group for source, group in _parts(*pairs[name], by_source).items()}
        for one, both in (parts or {name: pairs[name]}).items():
            pairs[one] = both
            pairs |= {f"{one}, {kind}": group for kind, group in _parts(*both, by_kind).items()}
    for name, (a, b) in pairs.items():
        for value, title in PAIRED.items():
            d = paired(a, b, value)
            numbers = [f"{d[key]:.3f}" for key in ("first", "second")] + [f"{d['difference']:+.3f}"]
            spread = [f"{d['low']:+.3f} to {d['high']:+.3f}", f"{d['p']:.4f}"]
            ratio = [f"{d['ratio']:.3f}", f"{d['ratio_low']:.3f}-{d['ratio_high']:.3f}"]
            if math.isnan(d["ratio_low"]):  # the first mean is zero, in the data or in a bootstrap resample
                ratio = ["", ""]
            rows.append([name, title, *numbers, *spread, *ratio, str(d["questions"])])
    return table(rows)


def _parts(
    first: Sequence[Score], second: Sequence[Score], divide: Callable[[Sequence[Score]], Mapping[Any, list[Score]]]
) -> dict[Any, tuple[list[Score], list[Score]]]:
    """The matching parts of two evaluations; {} if there is only one part."""
    ours, theirs = divide(first), divide(second)
    return {name: (ours[name], theirs.get(name, [])) for name in ours} if len(ours) > 1 else {}

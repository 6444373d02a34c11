"""The results of an experiment as Markdown tables: means and intervals over cold starts, not over questions.

Runs of one cold start resemble one another, so its seeds are averaged first. If a record has a single cold start, the
intervals are over its seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments import Experiment
from psearch_jax.eval.scores import permutation_p
from psearch_jax.eval.tables import share, table
from psearch_jax.runtime.metrics import mean

COUNTS = ("turns", "searches", "tokens")  # figures that are not shares
COLD_START, SEED = 0, 1  # the parts of a run's key, "cold start/seed"
UNITS = ("cold starts", "seeds")
# Controls without a policy: their titles, and the figure that they are compared with.
CONTROLS = {"chance": ("chance level", "em"), "word_bigrams": ("words and word bigrams", "decomposition_accuracy")}
Results = Mapping[str, Mapping[str, Any]]  # of one arm, by run


def report(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """The figures of every arm, a table for each question set, and paired differences from the reference."""
    arms = {name: runs for name, runs in group_by_arm(record).items() if name in experiment.arms}
    unit = SEED if len({run.partition("/")[0] for results in arms.values() for run in results}) == 1 else COLD_START
    sets = list(dict.fromkeys(s for results in arms.values() for run in results.values() for s in run["after"]))
    parts = [experiment.claim]
    for asked in sets:
        parts += [f"{asked}:", figures_table(experiment.figures, arms, asked, unit)]
    if experiment.reference in arms and len(arms) > 1:
        parts.append(f"Differences from {experiment.reference}, paired by run; intervals are over {UNITS[unit]}:")
        parts.append(differences_table(experiment, arms, sets, unit))
    return "\n\n".join(parts) + "\n"


def group_by_arm(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The results of each arm that ran by run, in the order of the arms."""
    arms: dict[str, dict[str, Any]] = {name: {} for name in record["arms"]}
    for key, results in record["runs"].items():
        name, _, run = key.partition("/")
        arms.setdefault(name, {})[run] = results
    return {name: results for name, results in arms.items() if results}


def values_of(results: Results, asked: str, figure: str) -> dict[str, float]:
    """A figure on a question set, by run; without the runs that lack it."""
    values = {run: result["after"].get(asked, {}).get(figure) for run, result in results.items()}
    return {run: value for run, value in values.items() if value is not None}


def independent_values(values: Mapping[str, float], unit: int) -> list[float]:
    """One value per cold start, the mean of its seeds; or one per seed."""
    groups: dict[str, list[float]] = {}
    for run, value in values.items():
        groups.setdefault(run.split("/")[unit], []).append(value)
    return [mean(group) for group in groups.values()]


def figures_table(figures: Sequence[str], arms: Mapping[str, Results], asked: str, unit: int) -> str:
    shown = [figure for figure in figures if any(values_of(results, asked, figure) for results in arms.values())]
    rows = [["arm", UNITS[unit], "runs", *(figure.replace("_", " ") for figure in shown)]]
    for control, (title, compared) in CONTROLS.items():
        known = [value for results in arms.values() for value in values_of(results, asked, control).values()]
        if known:
            rows.append([title, "", "", *(share(mean(known)) if figure == compared else "" for figure in shown)])
    for name, results in arms.items():
        values = {figure: independent_values(values_of(results, asked, figure), unit) for figure in shown}
        if any(values.values()):
            counts = [str(max(map(len, values.values()))), str(len(results))]
            rows.append([name, *counts, *(with_interval(values[f], f not in COUNTS) for f in shown)])
    return table(rows)


def with_interval(values: Sequence[float], is_share: bool) -> str:
    """The mean with its 95% interval by Student's t; empty without values."""
    if not values:
        return ""
    centre, low, high = mean_interval(values)
    if not is_share:
        return f"{centre:.2f}" + (f" ({low:.2f}-{high:.2f})" if low != high else "")
    return share(centre) + (f" ({share(max(0.0, low))}-{share(min(1.0, high))})" if low != high else "")


def differences_table(experiment: Experiment, arms: Mapping[str, Results], sets: Sequence[str], unit: int) -> str:
    """If the record has the values of each question, a permutation test over questions, of the means over runs."""
    rows = [["arm", "question set", "metric", UNITS[unit], "runs", "difference", "95% interval"]]
    reference = arms[experiment.reference]
    each = any("each" in figures for run in reference.values() for figures in run["after"].values())
    rows[0] += ["p, over questions"] * each
    for name, results in arms.items():
        if name == experiment.reference:
            continue
        trained = experiment.arms[name].trained, experiment.arms[experiment.reference].trained
        for asked in sets:
            for figure in experiment.figures:
                ours, theirs = (values_of(runs, asked, figure) for runs in (results, reference))
                pairs = pair_runs(ours, theirs, *trained)
                if pairs:
                    values = independent_values({run: ours[a] - theirs[b] for run, (a, b) in pairs.items()}, unit)
                    centre, low, high = mean_interval(values)
                    interval = f"{low:+.3f} to {high:+.3f}" if len(values) > 1 else ""
                    counts = [str(len(values)), str(len(pairs))]
                    rows.append([name, asked, figure.replace("_", " "), *counts, f"{centre:+.3f}", interval])
                    rows[-1] += [p_over_questions(results, reference, asked, figure, pairs.values())] * each
    return table(rows)


def pair_runs(
    runs: Iterable[str], reference: Iterable[str], trained: bool, reference_trained: bool
) -> dict[str, tuple[str, str]]:
    """The runs to compare: of the same cold start and seed, or only cold start if one of the arms is not trained."""
    if trained and reference_trained:
        return {run: (run, run) for run in runs if run in reference}
    return {
        run if trained else other: (run, other)
        for run in runs
        for other in reference
        if run.partition("/")[0] == other.partition("/")[0]
    }


def p_over_questions(
    results: Results, reference: Results, asked: str, figure: str, pairs: Iterable[tuple[str, str]]
) -> str:
    """p of the differences of each question, their mean over the pairs of runs; empty if they are not recorded."""

    def read(run: Mapping[str, Any]) -> np.ndarray:
        return np.array(run["after"][asked].get("each", {}).get(figure, "").split(), float)

    differences = np.mean([read(results[run]) - read(reference[other]) for run, other in pairs], axis=0)
    return f"{permutation_p(differences):.4f}" if len(differences) else ""


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of a few runs and its 95% confidence interval by Student's t; for a single run the mean three times."""
    values = [float(v) for v in values]
    centre = mean(values)
    if len(values) < 2:
        return centre, centre, centre
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return centre, float(centre - half), float(centre + half)

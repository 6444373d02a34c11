"""The results of an experiment as Markdown tables: means and intervals over cold starts, not over questions.

Runs of one cold start resemble one another, so its seeds are averaged first. If a record has a single cold start, the
intervals are over its seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import Evaluation, Experiment
from psearch_jax.eval.benchmarks import PAIRS
from psearch_jax.eval.tables import share, table
from psearch_jax.runtime.metrics import mean, spread

TITLES = {
    "em": "EM",
    "decomposition_accuracy": "decomposition accuracy",
    "decomposition_ratio": "split",
    "turns": "turns",
    "searches": "searches",
    "tokens": "sampled tokens",
    "valid_format": "valid format",
    "independent_at_once": "independent pairs at once",
    "dependent_in_order": "dependent pairs in order",
    "parallel_split": "parallel split",
    "sequential_split": "sequential split",
}
NOT_SHARES = ("turns", "searches", "tokens")
_AFTER, _ALARMS, _METRICS = "after", "alarms", "metrics"
_NOT_MOMENTS = ("wall_s", _ALARMS, _METRICS)
_COLD_START, _SEED = 0, 1  # the parts of a run's key
_UNITS = ("cold starts", "seeds")


def report(experiment: Experiment, record: Mapping[str, Any], controls: Mapping[str, float] | None = None) -> str:
    """All tables: for each set the figures of every arm, paired differences from the reference, each cold start.

    Args:
      controls: as from `controls_of`; they become rows of the tables of the minimal pairs.
    """
    parts = [experiment.claim]
    runs = by_arm(record)
    starts = sorted({run.partition("/")[0] for results in runs.values() for run in results}, key=int)
    unit = _SEED if len(starts) == 1 else _COLD_START
    moments = list(
        dict.fromkeys(m for results in runs.values() for one in results.values() for m in one if m not in _NOT_MOMENTS)
    )
    for moment in moments:
        for where in _places(runs, moment):
            title = where if moment == _AFTER else f"{where}, {moment}"
            shown = controls if controls and _in_default_world(experiment, where) else {}
            parts += [f"{title}:", _figures(experiment, runs, moment, where, shown, unit)]
    others = [name for name in runs if name != experiment.reference]
    if experiment.reference in runs and others:
        title = f"Differences from {experiment.reference}, paired by run; intervals are over {_UNITS[unit]}:"
        parts += [title, _differences(experiment, runs, unit)]
    if len(starts) > 1:
        parts += ["Each cold start (its seeds separated by commas):", _each(experiment, runs, starts)]
    if experiment.metrics:
        parts += ["Means over the steps of training:", _metrics(experiment, runs, unit)]
    if any(_ALARMS in one for results in runs.values() for one in results.values()):
        parts += ["Alarms, the number of runs in which each fired, and the earliest step:", _alarms(runs)]
    return "\n\n".join(parts) + "\n"


def controls_of(file: Path) -> dict[str, float]:
    """The accuracy of controls without a policy on the minimal pairs that the arms are asked; empty without the file.

    Args:
      file: what `launch/bench.py world --json` wrote.
    """
    if not file.is_file():
        return {}
    cues = json.loads(file.read_text(encoding="utf-8"))["cues"]
    return {name: figures["evaluated pairs"] for name, figures in cues.items()}


def _in_default_world(experiment: Experiment, where: str) -> bool:
    """Whether these are the minimal pairs for which the controls were measured, and all of them."""
    name, _, asked = where.partition("/")
    evaluation = experiment.evaluations.get(name)
    own_world = not any("data.world" in argument for argument in getattr(evaluation, "arguments", ()))
    return asked == PAIRS and own_world and getattr(evaluation, "count", 0) == Evaluation.count


def by_arm(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The results of each arm by run (cold start / seed), in the order of the arms."""
    results: dict[str, dict[str, Any]] = {name: {} for name in record["arms"]}
    for run, values in record["runs"].items():
        name, _, rest = run.partition("/")
        results.setdefault(name, {})[rest] = values
    return {name: values for name, values in results.items() if values}


def _places(runs: Mapping[str, Mapping[str, Any]], moment: str) -> list[str]:
    return list(dict.fromkeys(w for results in runs.values() for one in results.values() for w in one.get(moment, {})))


def _of_runs(results: Mapping[str, Any], moment: str, where: str, figure: str) -> dict[str, float]:
    """A figure by run (cold start / seed), of the runs of an arm that have it."""
    values = {run: one.get(moment, {}).get(where, {}).get(figure) for run, one in results.items()}
    return {run: value for run, value in values.items() if value is not None}


def _independent(values: Mapping[str, float], unit: int) -> list[float]:
    """One value per cold start, the mean of its seeds; or one per seed, the mean over cold starts."""
    groups: dict[str, list[float]] = {}
    for run, value in values.items():
        groups.setdefault(run.split("/")[unit], []).append(value)
    return [mean(group) for group in groups.values()]


def _figures(
    experiment: Experiment,
    runs: Mapping[str, Mapping[str, Any]],
    moment: str,
    where: str,
    controls: Mapping[str, float],
    unit: int,
) -> str:
    shown = [f for f in experiment.figures if any(_of_runs(results, moment, where, f) for results in runs.values())]
    rows = [["arm", _UNITS[unit], "runs", *(TITLES.get(name, name) for name in shown)]]

    def control(name: str, figure: str, value: float) -> None:
        if figure in shown:
            rows.append([name, "", "", *(share(value) if other == figure else "" for other in shown)])

    for name, source, figure in (
        ("chance level", "chance", "em"),
        ("never split", "never_split", "decomposition_accuracy"),
    ):
        values = [v for results in runs.values() for v in _of_runs(results, moment, where, source).values()]
        if values:
            control(name, figure, mean(values))
    for name, value in controls.items():
        control(f"control: {name}", "decomposition_accuracy", value)
    for name, results in runs.items():
        values = {figure: _independent(_of_runs(results, moment, where, figure), unit) for figure in shown}
        if any(values.values()):
            count = [str(max(map(len, values.values()))), str(len(results))]
            rows.append([name, *count, *(with_interval(values[f], f not in NOT_SHARES) for f in shown)])
    return table(rows)


def _each(experiment: Experiment, runs: Mapping[str, Mapping[str, Any]], starts: Sequence[str]) -> str:
    """The figures of every run after training, by cold start."""
    rows = [["question set", "metric", "arm", *(f"cold start {start}" for start in starts)]]
    for where in _places(runs, _AFTER):
        for figure in experiment.figures:
            for name, results in runs.items():
                values = sorted(_of_runs(results, _AFTER, where, figure).items())
                if values:
                    own = [[v for run, v in values if run.partition("/")[0] == start] for start in starts]
                    cells = [", ".join(_written(value, figure) for value in group) for group in own]
                    rows.append([where, TITLES.get(figure, figure), name, *cells])
    return table(rows)


def _written(value: float, figure: str) -> str:
    return f"{value:.2f}" if figure in NOT_SHARES else share(value)


def _metrics(experiment: Experiment, runs: Mapping[str, Mapping[str, Any]], unit: int) -> str:
    rows = [["arm", _UNITS[unit], "runs", *experiment.metrics]]
    for name, results in runs.items():
        measured = {run: one[_METRICS] for run, one in results.items() if _METRICS in one}
        if not measured:
            continue
        cells = []
        for metric in experiment.metrics:
            values = _independent({run: one[metric] for run, one in measured.items() if metric in one}, unit)
            centre, low, high = spread(values) if values else (0.0, 0.0, 0.0)
            interval = f" ({low:.3g} to {high:.3g})" if low != high else ""
            cells.append(f"{centre:.3g}{interval}" if values else "")
        count = len({run.split("/")[unit] for run in measured})
        rows.append([name, str(count), str(len(measured)), *cells])
    return table(rows)


def _alarms(runs: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["arm", "runs", "alarms"]]
    for name, results in runs.items():
        monitored = [one[_ALARMS] for one in results.values() if _ALARMS in one]
        fired: dict[str, list[int]] = {}
        for alarms in monitored:
            for alarm, step in alarms.items():
                fired.setdefault(alarm, []).append(step)
        if monitored:
            cells = [f"{alarm} {len(steps)} ({min(steps)})" for alarm, steps in sorted(fired.items())]
            rows.append([name, str(len(monitored)), ", ".join(cells) or "none"])
    return table(rows)


def _reference_runs(run: str, both_trained: bool, reference: Mapping[str, Any]) -> list[str]:
    """The reference's runs to compare a run with: that of its seed, or all of its cold start if an arm has no seed."""
    if both_trained:
        return [run] if run in reference else []
    start = run.partition("/")[0]
    return [other for other in reference if other.partition("/")[0] == start]


def with_interval(values: Sequence[float], is_share: bool) -> str:
    """The mean with its 95% interval by Student's t; empty without values."""
    if not values:
        return ""
    centre, low, high = spread(values)
    if not is_share:
        return f"{centre:.2f}" + (f" ({low:.2f}-{high:.2f})" if low != high else "")
    return share(centre) + (f" ({share(max(0.0, low))}-{share(min(1.0, high))})" if low != high else "")


def _differences(experiment: Experiment, runs: Mapping[str, Mapping[str, Any]], unit: int) -> str:
    rows = [["arm", "question set", "metric", _UNITS[unit], "runs", "difference", "95% interval"]]
    reference = runs[experiment.reference]
    for name, results in runs.items():
        both_trained = experiment.arms[name].trained and experiment.arms[experiment.reference].trained
        for where in _places(runs, _AFTER) if name != experiment.reference else ():
            for figure in experiment.figures:
                differences = {}
                for run, own in _of_runs(results, _AFTER, where, figure).items():
                    others = {other: reference[other] for other in _reference_runs(run, both_trained, reference)}
                    for other, theirs in _of_runs(others, _AFTER, where, figure).items():
                        # Keyed by the run that has a seed; the other one of an untrained arm has none.
                        differences[run if experiment.arms[name].trained else other] = own - theirs
                if differences:
                    values = _independent(differences, unit)
                    centre, low, high = spread(values)
                    interval = f"{low:+.3f} to {high:+.3f}" if len(values) > 1 else ""
                    count = [str(len(values)), str(len(differences))]
                    rows.append([name, where, TITLES.get(figure, figure), *count, f"{centre:+.3f}", interval])
    return table(rows)

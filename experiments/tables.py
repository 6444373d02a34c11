"""The results of an experiment as Markdown tables: means and intervals over runs, not over questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import Experiment
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
}
SHARES = ("em", "decomposition_accuracy", "decomposition_ratio", "valid_format", "f1")
_AFTER, _ALARMS = "after", "alarms"
_NOT_MOMENTS = ("wall_s", _ALARMS)


def report(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """All tables: for each set the figures of every arm, then paired differences from the reference."""
    parts = [experiment.claim]
    runs = by_arm(record)
    moments = list(
        dict.fromkeys(m for results in runs.values() for one in results.values() for m in one if m not in _NOT_MOMENTS)
    )
    for moment in moments:
        for where in _places(runs, moment):
            title = where if moment == _AFTER else f"{where}, {moment}"
            parts += [f"{title}:", _figures(experiment, runs, moment, where)]
    others = [name for name in runs if name != experiment.reference]
    if experiment.reference in runs and others:
        parts += [f"Differences from {experiment.reference}, run by run:", _differences(experiment, runs)]
    if any(_ALARMS in one for results in runs.values() for one in results.values()):
        parts += ["Alarms, the number of runs in which each fired, and the earliest step:", _alarms(runs)]
    return "\n\n".join(parts) + "\n"


def by_arm(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The results of each arm by run (cold start / seed), in the order of the arms."""
    results: dict[str, dict[str, Any]] = {name: {} for name in record["arms"]}
    for run, values in record["runs"].items():
        name, _, rest = run.partition("/")
        results.setdefault(name, {})[rest] = values
    return {name: values for name, values in results.items() if values}


def _places(runs: Mapping[str, Mapping[str, Any]], moment: str) -> list[str]:
    return list(dict.fromkeys(w for results in runs.values() for one in results.values() for w in one.get(moment, {})))


def _values(results: Mapping[str, Any], moment: str, where: str, figure: str) -> list[float]:
    """A figure's values over the runs of an arm that have it."""
    values = (one.get(moment, {}).get(where, {}).get(figure) for one in results.values())
    return [value for value in values if value is not None]


def _figures(experiment: Experiment, runs: Mapping[str, Mapping[str, Any]], moment: str, where: str) -> str:
    shown = [f for f in experiment.figures if any(_values(results, moment, where, f) for results in runs.values())]
    rows = [["arm", "runs", *(TITLES.get(name, name) for name in shown)]]
    chance = [v for results in runs.values() for v in _values(results, moment, where, "chance")]
    if chance:
        rows.append(["chance level", "", *(share(mean(chance)) if name == "em" else "" for name in shown)])
    for name, results in runs.items():
        cells = [with_interval(_values(results, moment, where, figure), figure in SHARES) for figure in shown]
        if any(cells):
            rows.append([name, str(len(results)), *cells])
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


def _reference_runs(run: str, both_trained: bool, reference: Mapping[str, Any]) -> list[Any]:
    """The reference's runs to compare a run with: that of its seed, or all of its cold start if an arm has no seed."""
    if both_trained:
        return [reference[run]] if run in reference else []
    start = run.partition("/")[0]
    return [values for other, values in reference.items() if other.partition("/")[0] == start]


def with_interval(values: Sequence[float], is_share: bool) -> str:
    """A mean over runs with its 95% interval by Student's t; empty without values."""
    if not values:
        return ""
    centre, low, high = spread(values)
    if not is_share:
        return f"{centre:.2f}" + (f" ({low:.2f}-{high:.2f})" if low != high else "")
    return share(centre) + (f" ({share(max(0.0, low))}-{share(min(1.0, high))})" if low != high else "")


def _differences(experiment: Experiment, runs: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["arm", "question set", "metric", "runs", "difference", "95% interval over runs"]]
    reference = runs[experiment.reference]
    for name, results in runs.items():
        both_trained = experiment.arms[name].trained and experiment.arms[experiment.reference].trained
        for where in _places(runs, _AFTER) if name != experiment.reference else ():
            for figure in experiment.figures:
                pairs = [
                    (theirs, own)
                    for run in results
                    if (own := results[run].get(_AFTER, {}).get(where, {}).get(figure)) is not None
                    for other in _reference_runs(run, both_trained, reference)
                    if (theirs := other.get(_AFTER, {}).get(where, {}).get(figure)) is not None
                ]
                if pairs:
                    centre, low, high = spread([own - theirs for theirs, own in pairs])
                    interval = f"{low:+.3f} to {high:+.3f}" if len(pairs) > 1 else ""
                    rows.append([name, where, TITLES.get(figure, figure), str(len(pairs)), f"{centre:+.3f}", interval])
    return table(rows)

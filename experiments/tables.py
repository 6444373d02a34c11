"""The results of an experiment as Markdown tables and as a plot: means and intervals over runs, not over questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import Experiment
from psearch_jax.eval.tables import share, table
from psearch_jax.runtime.metrics import mean, spread

TITLES = {
    "em": "EM",
    "decided": "decided right",
    "decomposition_ratio": "split",
    "turns": "turns",
    "searches": "searches",
    "tokens": "sampled ids",
    "valid_format": "valid",
}
SHARES = ("em", "decided", "decomposition_ratio", "valid_format", "f1")
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
        parts += ["Alarms, in how many runs, and the step of the first:", _alarms(runs)]
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


def _values(found: Mapping[str, Any], moment: str, where: str, figure: str) -> list[float]:
    """A figure's values over the runs of an arm that have it."""
    values = (one.get(moment, {}).get(where, {}).get(figure) for one in found.values())
    return [value for value in values if value is not None]


def _figures(experiment: Experiment, runs: Mapping[str, Mapping[str, Any]], moment: str, where: str) -> str:
    shown = [f for f in experiment.figures if any(_values(results, moment, where, f) for results in runs.values())]
    rows = [["arm", "runs", *(TITLES.get(name, name) for name in shown)]]
    chance = [v for results in runs.values() for v in _values(results, moment, where, "chance")]
    if chance:
        rows.append(["chance", "", *(share(mean(chance)) if name == "em" else "" for name in shown)])
    for name, results in runs.items():
        cells = [with_interval(_values(results, moment, where, figure), figure in SHARES) for figure in shown]
        if any(cells):
            rows.append([name, str(len(results)), *cells])
    return table(rows)


def _alarms(runs: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["arm", "runs", "alarms"]]
    for name, results in runs.items():
        watched = [one[_ALARMS] for one in results.values() if _ALARMS in one]
        rang: dict[str, list[int]] = {}
        for alarms in watched:
            for alarm, step in alarms.items():
                rang.setdefault(alarm, []).append(step)
        if watched:
            cells = [f"{alarm} {len(steps)} ({min(steps)})" for alarm, steps in sorted(rang.items())]
            rows.append([name, str(len(watched)), ", ".join(cells) or "none"])
    return table(rows)


def _beside(run: str, both_trained: bool, reference: Mapping[str, Any]) -> list[Any]:
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
    rows = [["arm", "set", "figure", "runs", "difference", "95% over runs"]]
    reference = runs[experiment.reference]
    for name, results in runs.items():
        both_trained = experiment.arms[name].trained and experiment.arms[experiment.reference].trained
        for where in _places(runs, _AFTER) if name != experiment.reference else ():
            for figure in experiment.figures:
                pairs = [
                    (theirs, own)
                    for run in results
                    if (own := results[run].get(_AFTER, {}).get(where, {}).get(figure)) is not None
                    for other in _beside(run, both_trained, reference)
                    if (theirs := other.get(_AFTER, {}).get(where, {}).get(figure)) is not None
                ]
                if pairs:
                    centre, low, high = spread([own - theirs for theirs, own in pairs])
                    interval = f"{low:+.3f} to {high:+.3f}" if len(pairs) > 1 else ""
                    rows.append([name, where, TITLES.get(figure, figure), str(len(pairs)), f"{centre:+.3f}", interval])
    return table(rows)


def draw(experiment: Experiment, record: Mapping[str, Any], file: Path) -> None:
    """Plots a panel for each of `experiment.drawn`: a dot per run, a mean with interval per arm. SVG or PNG.

    If arms were also evaluated during training, the panels show the figure over the steps.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "psearch_jax"  # the same record gives the same file
    runs, panels = by_arm(record), experiment.drawn
    between = any(arm.steps for arm in experiment.arms.values())
    size = (3.6 * len(panels), 3.0 if between else 1.2 + 0.32 * len(runs))
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=not between, layout="constrained")
    for axis, (where, name) in zip(axes[0], panels, strict=True):
        chance = [v for results in runs.values() for v in _values(results, _AFTER, where, "chance")]
        if between:
            _over_steps(axis, experiment, record, runs, where, name)
        else:
            _by_arm(axis, runs, where, name)
            if name == "em" and chance:
                axis.axvline(mean(chance), color="0.5", linestyle=":")
        axis.set_title(f"{where.partition('/')[2]}: {TITLES.get(name, name)}", fontsize=10)
        axis.grid(alpha=0.3)
        if name in SHARES:
            (axis.set_ylim if between else axis.set_xlim)(-0.02, 1.02)
    if not between:
        axes[0][0].set_yticks(range(len(runs)), list(runs))
        axes[0][0].invert_yaxis()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def _by_arm(axis: Any, runs: Mapping[str, Mapping[str, Any]], where: str, name: str) -> None:
    for y, results in enumerate(runs.values()):
        values = _values(results, _AFTER, where, name)
        if values:
            centre, low, high = spread(values)
            axis.plot(values, [y] * len(values), ".", color="0.7")
            axis.errorbar(centre, y, xerr=[[centre - low], [high - centre]], fmt="o", color="C0", capsize=3)


def _over_steps(
    axis: Any,
    experiment: Experiment,
    record: Mapping[str, Any],
    runs: Mapping[str, Mapping[str, Any]],
    where: str,
    name: str,
) -> None:
    """Lines of the trained arms, starting at the untrained arm; the shade spans the lowest to the highest run."""
    start = [
        v
        for a, results in runs.items()
        if not experiment.arms[a].trained
        for v in _values(results, _AFTER, where, name)
    ]
    for i, (arm, results) in enumerate((a, f) for a, f in runs.items() if experiment.arms[a].trained):
        moments = [(0, start)] if start else []
        moments += [(step, _values(results, f"step {step}", where, name)) for step in experiment.arms[arm].steps]
        moments.append((record["steps"], _values(results, _AFTER, where, name)))
        points = [(step, values) for step, values in moments if values]
        steps = [step for step, _ in points]
        axis.plot(steps, [mean(values) for _, values in points], "o-", color=f"C{i}", label=arm)
        axis.fill_between(
            steps, [min(v) for _, v in points], [max(v) for _, v in points], color=f"C{i}", alpha=0.15, linewidth=0
        )
    axis.set_xlabel("step")

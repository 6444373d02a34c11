"""The charts of training runs: figures from metrics.jsonl (to `charts.DIGITS` digits) and from recorded rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from psearch_jax.eval.benchmarks import PAIRS
from psearch_jax.eval.scores import Score, by_kind, em_interval
from psearch_jax.report.charts import POOLED, SPLIT, Chart, Line, distribution_charts, distributions, short
from psearch_jax.report.runs import RunFiles
from psearch_jax.runtime.metrics import PHASES, mean
from psearch_jax.types import END_STATUSES, KINDS, RewardParts

INTERVALS = 12  # at most this number of EM intervals over the steps; one step has too few questions for one
ENDS = 5  # the first and the last fifth of the steps are compared

_HIDDEN = " With several runs, choose a question kind to see the intervals."

Steps = Mapping[int, Sequence[Score]]  # recorded rollouts by step

# id, section, title, note, key in metrics.jsonl ({} stands for a kind).
_SERIES = (
    ("reward", "Reward", "Reward", "Mean total reward over the rollouts of a step.", "reward"),
    (
        "no_signal",
        "Reward",
        "Zero-advantage groups",
        "Share of groups whose rewards are all equal.",
        "groups_without_signal",
    ),
    ("split", "Search", "Questions split", SPLIT, "split/{}"),
    ("searches", "Search", "Searches", "Mean number of searches that were run.", "searches/{}"),
    ("turns", "Search", "Turns", "Mean number of model calls: a search and an answer are 2.", "turns/{}"),
    ("kl", "Learning", "KL", "Mean divergence from the reference policy, nats per sampled token.", "kl"),
    ("entropy", "Learning", "Entropy", "Mean entropy of the policy, nats per sampled token.", "entropy"),
    (
        "logp_gap",
        "Learning",
        "Log-prob gap",
        "Mean |trainer log-prob - sampler log-prob| per sampled token.",
        "logp_gap",
    ),
    (
        "sample_size",
        "Learning",
        "Effective sample size",
        "Of the importance weights between sampler and trainer, as a share of the sampled tokens.",
        "effective_sample_size",
    ),
    ("staleness", "Learning", "Staleness", "Mean age of the weights that sampled a token, in steps.", "staleness"),
    (
        "likelihood",
        "Learning",
        "Log-likelihood of correct rollouts",
        "Mean log-prob of their sampled tokens under the sampling policy.",
        "logprob_of_correct",
    ),
    (
        "explained",
        "Learning",
        "Explained variance of the critic",
        "Share of the variance of the returns that the critic's values explain.",
        "critic/explained_variance",
    ),
    ("gradient_norm", "Learning", "Gradient norm", "Global norm before clipping.", "gradient_norm"),
    (
        "clip_fraction",
        "Learning",
        "Clip fraction",
        "Share of sampled tokens whose ratio was clipped.",
        "clip_fraction",
    ),
    ("learning_rate", "Learning", "Learning rate", "At the last update of a step.", "learning_rate"),
    ("tokens", "Cost", "Tokens per rollout", "Prompt, sampled tokens and observations.", "tokens_per_trajectory"),
)
_PARTS = {
    "outcome": "Reward for the answer.",
    "format": "Reward for the format of the output.",
    "decomposition": "Reward for the decision to split.",
    "search_count": "Reward for the number of searches.",
    "unfinished": "Penalty of a missing answer.",
}


def training_charts(runs: Sequence[RunFiles], scores: Sequence[Steps]) -> list[Chart]:
    """All charts of training runs that have data, in the order of their sections.

    Args:
      scores: the scores of each run's recorded rollouts, by step.
    """
    charts = [_series_chart(runs, *row) for row in _SERIES]
    charts += [_reward_part(runs, part) for part in RewardParts.__dataclass_fields__]
    charts += [_answers(runs, scores), _validation(runs), _ends(runs), *_behaviour(scores), *_costs(runs)]
    order = ("Reward", "Answers", "Search", "Learning", "Cost")
    return sorted((c for c in charts if c.lines), key=lambda c: order.index(c.section))


def alarms(runs: Sequence[RunFiles]) -> list[dict[str, list[int]]]:
    """For each run, the steps at which an alarm fired (`alarm/NAME` above 0 in metrics.jsonl), by alarm name."""
    alarms_by_run: list[dict[str, list[int]]] = []
    for run in runs:
        fired: dict[str, list[int]] = {}
        for row in run.rows:
            for key, value in row.items():
                if key.startswith("alarm/") and value:
                    fired.setdefault(key.removeprefix("alarm/"), []).append(row["step"])
        alarms_by_run.append(fired)
    return alarms_by_run


def series(run: RunFiles, key: str) -> list[float | None]:
    """The values of a metric at every step of the run."""
    return [short(row.get(key)) for row in run.rows]


def _lines(runs: Sequence[RunFiles], key: str, group: str = "", name: str = "", faint: bool = False) -> list[Line]:
    """A line for every run that has the metric."""
    values = [(i, series(run, key)) for i, run in enumerate(runs)]
    return [Line(i, y, group=group, name=name, faint=faint) for i, y in values if any(v is not None for v in y)]


def _series_chart(runs: Sequence[RunFiles], name: str, section: str, title: str, note: str, key: str) -> Chart:
    if "{}" not in key:
        return Chart(name, section, title, note, _lines(runs, key))
    return Chart(name, section, title, note, [line for kind in KINDS for line in _lines(runs, key.format(kind), kind)])


def _reward_part(runs: Sequence[RunFiles], part: str) -> Chart:
    lines = []
    for kind in KINDS:
        for key, name in (("split", "split"), ("not_split", "not split")):
            lines += _lines(runs, f"reward/{kind}/{key}/{part}", kind, name, faint=key == "not_split")
    lines = [line for line in lines if any(line.y)]  # a part that the reward does not have is always 0
    note = f"{_PARTS.get(part, '')} Mean over rollouts that split; faint: over those that do not."
    return Chart(f"reward_{part}", "Reward", f"Reward: {part.replace('_', ' ')}", note.strip(), lines)


def _answers(runs: Sequence[RunFiles], scores: Sequence[Steps]) -> Chart:
    """EM of every step, and with intervals of the recorded rollouts pooled over several steps."""
    lines = [replace(line, faint=True) for kind in KINDS for line in _lines(runs, f"em/{kind}", kind)]
    widths = []
    for i, steps in enumerate(scores):
        places = sorted(steps)
        width = max(1, math.ceil(len(places) / INTERVALS))
        widths.append(width)
        pools = [places[k : k + width] for k in range(0, len(places), width)]
        for kind in KINDS:
            points = []
            for pool in pools:
                own = by_kind([s for step in pool for s in steps[step]]).get(kind, [])
                if own:
                    points.append((mean(pool), mean(s.em for s in own), *em_interval(own)))
            if points:
                x, y, low, high = (list(map(short, column)) for column in zip(*points, strict=True))
                lines.append(Line(i, y, x, kind, "recorded", low=low, high=high))
    note = "Exact match. Faint: all rollouts of a step; with error bars: the recorded rollouts"
    pooled = max(widths, default=1)
    note += f", pooled over {pooled} steps" if pooled > 1 else ""
    note += ", with a bootstrap 95% interval over questions." + _HIDDEN * (len(runs) > 1)
    return Chart("em", "Answers", "EM", note, lines)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `count` independent trials."""
    from scipy import stats  # slow to import

    interval = stats.binomtest(round(share * count), int(count)).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def _validation(runs: Sequence[RunFiles]) -> Chart:
    """EM of a run's evaluations, one sample per question: before, between steps, and after."""
    lines = []
    for i, run in enumerate(runs):
        moments: list[tuple[int, Mapping[str, Any]]] = [(0, run.before.get("") or run.summary.get("before") or {})]
        for row in run.rows:
            between = {kind: _figures(row, kind) for kind in (*KINDS, PAIRS)}
            moments.append((row["step"] + 1, {kind: values for kind, values in between.items() if "em" in values}))
        if run.summary.get("after"):
            moments = [m for m in moments if m[0] != run.summary["steps"]] + [
                (run.summary["steps"], run.summary["after"])
            ]
        for kind in (*KINDS, PAIRS):
            points = [(step, by[kind]["em"], by[kind]["questions"]) for step, by in moments if kind in by]
            if points:
                bounds = [wilson(em, n) for _, em, n in points]
                low, high = (list(map(short, side)) for side in zip(*bounds, strict=True))
                x, y = [step for step, _, _ in points], [short(em) for _, em, _ in points]
                lines.append(Line(i, y, x, kind, low=low, high=high))
    note = "The run's own evaluations, one sample per question, with Wilson's 95% interval." + _HIDDEN * (
        len(runs) > 1
    )
    return Chart("validation", "Answers", "Validation EM", note, lines)


def _figures(row: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {name: row[f"eval/{kind}/{name}"] for name in ("em", "questions") if f"eval/{kind}/{name}" in row}


def _ends(runs: Sequence[RunFiles]) -> Chart:
    lines = []
    for status in END_STATUSES[1:]:
        own = _lines(runs, f"status/{status}", name=status.replace("_", " "))
        lines += [line for line in own if any(line.y)]
    lines += _lines(runs, "valid_format", name="valid format")
    note = "Shares of rollouts that end without an answer, by reason, and of rollouts in valid format."
    return Chart("status", "Answers", "End status", note, lines)


def _behaviour(scores: Sequence[Steps]) -> list[Chart]:
    """Distribution of searches and share finished by turn, at the start and at the end of training."""
    searches, finished, spans = [], [], []
    for i, steps in enumerate(scores):
        places = sorted(step for step, own in steps.items() if own)  # none are recorded at trajectories_per_step=0
        if not places:
            continue
        part = max(1, len(places) // ENDS)
        ends = {"first": places[:part], "last": places[-part:]} if len(places) > 1 else {"last": places}
        spans.append("; ".join(f"{name} steps {own[0]} to {own[-1]}" for name, own in ends.items()))
        for name, own in ends.items():
            pool = [s for step in own for s in steps[step]]
            counts, by_turn = distributions(i, {POOLED: pool, **by_kind(pool)}, name, faint=name == "first")
            searches += counts
            finished += by_turn
    note = f" Recorded rollouts, {' / '.join(dict.fromkeys(spans))}; the first are faint."
    return distribution_charts(searches, finished, note, pooled=True)


def _costs(runs: Sequence[RunFiles]) -> list[Chart]:
    phases = [line for phase in PHASES for line in _lines(runs, f"{phase}_s", name=phase)]
    totals = []
    for i in range(len(runs)):
        own = [line.y for line in phases if line.run == i]
        if own:
            totals.append(Line(i, [short(sum(v or 0.0 for v in column)) for column in zip(*own, strict=True)]))
    means = []
    for i, run in enumerate(runs):
        own = [(p, [v for v in series(run, f"{p}_s") if v is not None]) for p in (*PHASES, "search", "host")]
        there = [(phase, short(sum(values) / len(run.rows))) for phase, values in own if values]
        if there:
            means.append(Line(i, [value for _, value in there], [phase for phase, _ in there]))
    use = []
    for key, name in (
        ("cost/row_use", "decoded rows that sample a token"),
        ("cost/extend_use", "appended positions that hold a token"),
        ("update_padding", "padding in updates"),
    ):
        use += _lines(runs, key, name=name, faint=key == "update_padding")
    speed = _lines(runs, "sampled_tokens_per_s", name="sampled in rollouts") + _lines(
        runs, "processed_tokens_per_s", name="processed in updates"
    )
    note = "Waiting for passages (search) and for the host is part of the rollout."
    seconds = Chart("seconds", "Cost", "Seconds per step", "Sum over all phases.", totals)
    if len(runs) == 1:
        seconds = Chart("seconds", "Cost", "Seconds per step", "By phase, stacked.", phases, form="stacked")
    return [
        seconds,
        Chart("phases", "Cost", "Seconds by phase", f"Mean over all steps. {note}", means, "category", "bars"),
        Chart(
            "row_use",
            "Cost",
            "Utilization",
            "Utilized shares of device work; faint: the share of padding in updates.",
            use,
        ),
        Chart("speed", "Cost", "Tokens per second", "Mean over the phase.", speed),
    ]

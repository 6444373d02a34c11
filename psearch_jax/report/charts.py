"""The charts of a report, drawn with Plotly."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

from psearch_jax.report.runs import RunFiles
from psearch_jax.types import END_STATUSES, KINDS

COLORS = ("#1f6feb", "#d1492e", "#2a9d5c", "#8a4fbf", "#b7791f", "#0f8b8d", "#c2397b", "#5b6470")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
# Title, and the metrics of metrics.jsonl by the names of their lines; {} stands for a question kind.
SERIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("Reward", {"": "reward"}),
    ("EM", {kind: f"em/{kind}" for kind in KINDS}),
    ("Validation EM", {kind: f"eval/{kind}/em" for kind in (*KINDS, "pairs")}),
    ("Questions split", {kind: f"split/{kind}" for kind in KINDS}),
    ("Searches", {kind: f"searches/{kind}" for kind in KINDS}),
    ("Turns (model calls)", {kind: f"turns/{kind}" for kind in KINDS}),
    ("End status", {status: f"status/{status}" for status in END_STATUSES[1:]} | {"valid format": "valid_format"}),
    ("Groups without signal", {"": "groups_without_signal"}),
    ("KL from the reference, nats per token", {"": "kl"}),
    ("Entropy, nats per token", {"": "entropy"}),
    ("|trainer - sampler| log-prob", {"": "logp_gap"}),
    ("Gradient norm before clipping", {"": "gradient_norm"}),
    ("Clipped share of tokens", {"": "clip_fraction"}),
    ("Tokens per rollout", {"": "tokens_per_trajectory"}),
    ("Seconds per step", {phase: f"{phase}_s" for phase in ("rollout", "reward", "logprobs", "update")}),
)


def draw_training(runs: Sequence[RunFiles]) -> Iterator[Any]:
    """A Plotly figure for each series that a run has. Colours mark runs if there are several, else lines."""
    import plotly.graph_objects as go  # slow to import

    for title, lines in SERIES:
        figure = go.Figure(layout={"title": title})
        for r, run in enumerate(runs):
            for at, (name, metric) in enumerate(lines.items()):
                points = [(row["step"], row[metric]) for row in run.rows if row.get(metric) is not None]
                if not points or (metric.startswith("status/") and not any(value for _, value in points)):
                    continue
                color, dash = (r, at) if len(runs) > 1 else (at, 0)
                figure.add_scatter(
                    x=[step for step, _ in points],
                    y=[value for _, value in points],
                    name=html.escape(" ".join(part for part in (run.name if len(runs) > 1 else "", name) if part)),
                    mode="lines" if len(points) > 1 else "markers",
                    line={"color": COLORS[color % len(COLORS)], "dash": DASHES[dash % len(DASHES)]},
                )
        if figure.data:
            yield figure


def draw_evaluations(runs: Sequence[RunFiles]) -> Iterator[Any]:
    """EM, with its bootstrap interval over questions, and the share of questions split, by benchmark and kind."""
    import plotly.graph_objects as go

    for title, key in (("EM", "em"), ("Questions split", "decomposition_ratio")):
        figure = go.Figure(layout={"title": title})
        for r, run in enumerate(runs):
            bars = {}
            for benchmark, report in run.results["benchmarks"].items():
                bars |= {f"{benchmark} {kind}": values for kind, values in report["kinds"].items()}
            y, bounds = [values[key] for values in bars.values()], [values["em_interval"] for values in bars.values()]
            error = {"array": [high - em for em, (_, high) in zip(y, bounds, strict=True)], "symmetric": False}
            error["arrayminus"] = [em - low for em, (low, _) in zip(y, bounds, strict=True)]
            style = {"marker": {"color": COLORS[r % len(COLORS)]}, "error_y": error if key == "em" else None}
            figure.add_bar(x=[html.escape(name) for name in bars], y=y, name=html.escape(run.name), **style)
        yield figure

"""The data of the page's charts: a chart is a title and lines. The page's JavaScript decides how they are drawn.

The charts of training runs are in training.py, those of evaluations here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from psearch_jax.eval.scores import LAST_TURN, Score, finished_by_turn
from psearch_jax.report.runs import RunFiles

POOLED = "all"  # the group of lines over all kinds
DIGITS = 6  # significant digits
SPLIT = "Share of rollouts whose first search has two or more sub-queries."


@dataclass(frozen=True)
class Line:
    """One line, or one set of bars. Lists have the same length; None is a gap."""

    run: int
    y: list[float | None]
    x: list[Any] | None = None  # None: the run's steps
    group: str = ""  # a question kind or a benchmark; the page can be filtered by it
    name: str = ""  # distinguishes it from the other lines of its run and group
    faint: bool = False
    low: list[float | None] | None = None
    high: list[float | None] | None = None


@dataclass(frozen=True)
class Chart:
    """`axis`: step, turn or category. `form`: lines, stacked (areas) or bars."""

    id: str
    section: str
    title: str
    note: str
    lines: list[Line] = field(default_factory=list)
    axis: str = "step"
    form: str = "lines"
    pooled: bool = False  # shown for all questions together unless the page is filtered by a group
    full_width: bool = False  # bars of one run never share an x position, so each takes the full width

    def as_json(self) -> dict[str, Any]:
        out = asdict(self)
        out["lines"] = [
            {k: v for k, v in line.items() if k == "run" or isinstance(v, list) or v} for line in out["lines"]
        ]
        return out


def short(value: Any) -> float | None:
    """A number with `DIGITS` significant digits; None for anything else."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, int | float) else None


def distributions(
    run: int, groups: Mapping[str, Sequence[Score]], name: str, faint: bool = False
) -> tuple[list[Line], list[Line]]:
    """Lines of (share by number of searches, share finished by turn), one per group each."""
    searches, finished = [], []
    for group, pool in groups.items():
        counts = Counter(s.searches for s in pool)
        x = list(range(max(counts, default=0) + 1))
        searches.append(Line(run, [short(counts[n] / len(pool)) for n in x], [str(n) for n in x], group, name, faint))
        by_turn = [short(v) for v in finished_by_turn(pool)]
        finished.append(Line(run, by_turn, list(range(1, LAST_TURN + 1)), group, name, faint))
    return searches, finished


def distribution_charts(searches: list[Line], finished: list[Line], note: str, pooled: bool) -> list[Chart]:
    """The charts of the lines from `distributions`. `note` is appended to their notes."""
    return [
        Chart(
            "search_counts",
            "Search",
            "Searches per rollout",
            f"Share of rollouts by the number of searches.{note}",
            searches,
            "category",
            "bars",
            pooled,
        ),
        Chart(
            "finished",
            "Search",
            "Answered by turn",
            f"Cumulative share of rollouts that have answered by each turn (model call), as in the paper.{note}",
            finished,
            "turn",
            pooled=pooled,
        ),
    ]


def evaluation_charts(runs: Sequence[RunFiles], scores: Sequence[Mapping[str, Sequence[Score]]]) -> list[Chart]:
    """All charts of evaluations. Groups are benchmarks.

    Args:
      scores: the scores of each evaluation, by benchmark.
    """
    em, split, searches, finished = [], [], [], []
    for i, (run, by_benchmark) in enumerate(zip(runs, scores, strict=True)):
        for benchmark, report in run.results["benchmarks"].items():
            rows = {"": report["all"]} if len(report["kinds"]) > 1 else {}
            rows |= report["kinds"]
            x = [f"{benchmark} {kind}".strip() for kind in rows]
            bounds = [values["em_interval"] for values in rows.values()]
            low, high = ([b[side] for b in bounds] for side in (0, 1))
            em.append(Line(i, [v["em"] for v in rows.values()], x, benchmark, low=low, high=high))
            split.append(Line(i, [v["decomposition_ratio"] for v in rows.values()], x, benchmark))
        counts, by_turn = distributions(i, by_benchmark, "")
        searches += counts
        finished += by_turn
    note = "With the bootstrap 95% interval over questions."
    return [
        Chart("em", "Answers", "EM", note, em, "category", "bars", full_width=True),
        Chart("split", "Search", "Questions split", SPLIT, split, "category", "bars", full_width=True),
        *distribution_charts(searches, finished, "", pooled=False),
    ]

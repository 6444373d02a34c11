"""Evaluation metrics: means with intervals, pass@k, the decision to split, paired differences.

Everything is computed from `Score`s, one per trajectory, which evaluations write to disk and read back.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import numpy as np

from psearch_jax.eval.plans import plan_counts
from psearch_jax.eval.surface import looks_parallel
from psearch_jax.runtime.metrics import mean
from psearch_jax.text.answers import exact_match, f1, normalise
from psearch_jax.types import KINDS, EndStatus, Kind, Trajectory, UserError

DIGITS = 6  # decimals kept of every figure
LAST_TURN = 6  # last column of the cumulative share of finished questions
RESAMPLES = 10_000
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class Score:
    """The metrics of one trajectory, without clock times."""

    source: str
    id: str
    sample: int
    kind: Kind
    status: EndStatus
    answer: str | None  # normalised
    em: float
    f1: float
    searches: int  # searches that were run
    sub_queries: int  # sub-queries that were run, over all searches
    first_sub_queries: int  # sub-queries of the first search; 0: no search
    turns: int  # model calls: one search and an answer are 2
    tokens: int  # sampled tokens
    context: int  # all tokens: prompt, sampled, observations
    valid_format: bool
    label: str | None = None  # how the question's facts depend on one another, labelled manually
    chance: float | None = None  # EM of a random guess among the question's possible answers, if known
    looks_parallel: bool = False  # by a heuristic on the question's words (surface.py)
    # Pairs of entities in the question's dependency plan, and those searched as the plan allows (plans.py).
    independent: int = 0
    at_once: int = 0
    dependent: int = 0
    in_order: int = 0

    @property
    def split(self) -> bool:
        """Whether the first search had two or more sub-queries."""
        return self.first_sub_queries >= 2

    @property
    def question(self) -> tuple[str, str]:
        """(source, id)."""
        return self.source, self.id


def score(t: Trajectory) -> Score:
    """The metrics of one trajectory."""
    question = t.question
    return Score(
        source=question.source,
        id=question.id,
        sample=t.sample,
        kind=question.kind,
        status=t.status,
        answer=None if t.answer is None else normalise(t.answer),
        em=float(exact_match(t.answer, question.answers)),
        f1=round(f1(t.answer, question.answers), DIGITS),
        searches=len(t.executed),
        sub_queries=sum(len(turn.queries) for turn in t.executed),
        first_sub_queries=len(t.executed[0].queries) if t.executed else 0,
        turns=t.model_calls,
        tokens=sum(turn.n_sampled for turn in t.turns),
        context=len(t.ids),
        valid_format=t.well_formed,
        label=question.metadata.get("dependency"),
        chance=question.metadata.get("chance"),
        looks_parallel=looks_parallel(question.text),
        **asdict(plan_counts(t)),
    )


# ---- figures of one set ----


def summarise(scores: Sequence[Score]) -> dict[str, float]:
    """Means over trajectories; `llm_calls` is the sum of all turns, `questions` the number of distinct questions.

    `decomposition_ratio`: share whose first search had two or more sub-queries. `decomposition_accuracy`: see
    `judge_splitting`, absent if no question counts. `independent_at_once`, `dependent_in_order`: the share of pairs of
    entities that were searched as the question's dependency plan allows (plans.py), absent without such pairs.
    `chance`: EM of a random guess, absent unless known for every score. Without scores only `questions` is present.
    """
    if not scores:
        return {"questions": 0}
    names = ("em", "f1", "searches", "sub_queries", "turns", "tokens", "context", "valid_format")
    figures = {name: mean(getattr(s, name) for s in scores) for name in names}
    figures["decomposition_ratio"] = mean(s.split for s in scores)
    accuracy = judge_splitting(scores)["accuracy"]
    if accuracy is not None:
        figures["decomposition_accuracy"] = accuracy
    for name, pairs, followed in (
        ("independent_at_once", "independent", "at_once"),
        ("dependent_in_order", "dependent", "in_order"),
    ):
        if total := sum(getattr(s, pairs) for s in scores):
            figures[name] = sum(getattr(s, followed) for s in scores) / total
    if all(s.chance is not None for s in scores):
        figures["chance"] = mean(s.chance for s in scores)
    rounded = {name: round(value, DIGITS) for name, value in figures.items()}
    return rounded | {"llm_calls": sum(s.turns for s in scores), "questions": len({s.question for s in scores})}


def group_by_kind(scores: Iterable[Score]) -> dict[Kind, list[Score]]:
    """The scores by kind, in the order of `KINDS`; kinds without scores are left out."""
    scores = list(scores)
    groups: dict[Kind, list[Score]] = {kind: [s for s in scores if s.kind == kind] for kind in KINDS}
    return {kind: group for kind, group in groups.items() if group}


def group_by_source(scores: Iterable[Score]) -> dict[str, list[Score]]:
    """The scores by source, in order of first appearance."""
    groups: dict[str, list[Score]] = {}
    for s in scores:
        groups.setdefault(s.source, []).append(s)
    return groups


def figures(scores: Sequence[Score], ks: Sequence[int] = ()) -> dict[str, Any]:
    """The report on one benchmark, JSON-serialisable.

    Keys: `all` and `kinds` ({kind: ...}), each a summary with `em_interval` [low, high], `finished_by_turn`,
    `not_finite` (trajectories with non-finite logits; they count as not answered), and for every k in `ks` `pass_at`
    and `maj_at`; `splitting`, see `judge_splitting`; `labels`, if there are manual labels; `sources`, if the questions
    come from several sets: `all` and `kinds` of each.

    Raises:
      ValueError: there are no scores.
    """
    report = report_by_kind(scores, ks) | {"splitting": judge_splitting(scores)}
    sources = group_by_source(scores)
    if len(sources) > 1:
        report["sources"] = {source: report_by_kind(group, ks) for source, group in sources.items()}
    labelled = [s for s in scores if s.label]
    if labelled:
        report["labels"] = judge_splitting(labelled, manual_labels=True)
    return report


def report_by_kind(scores: Sequence[Score], ks: Sequence[int]) -> dict[str, Any]:
    kinds = {kind: summarise_in_detail(group, ks) for kind, group in group_by_kind(scores).items()}
    return {"all": summarise_in_detail(scores, ks), "kinds": kinds}


def summarise_in_detail(scores: Sequence[Score], ks: Sequence[int]) -> dict[str, Any]:
    more: dict[str, Any] = {"em_interval": em_interval(scores), "finished_by_turn": share_finished(scores)}
    more["not_finite"] = sum(s.status == "not_finite" for s in scores)
    if ks:
        more["pass_at"] = {str(k): pass_at(scores, k) for k in ks}
        more["maj_at"] = {str(k): majority_at(scores, k) for k in ks}
    return summarise(scores) | more


def share_finished(scores: Sequence[Score], last: int = LAST_TURN) -> list[float]:
    """Share of trajectories that had answered by model call 1, 2, .. last (the paper's cumulative figure)."""
    calls = [s.turns if s.status == "answered" else last + 1 for s in scores]
    return [round(mean(c <= turn for c in calls), DIGITS) for turn in range(1, last + 1)] if calls else []


def em_interval(scores: Sequence[Score]) -> list[float]:
    """Bootstrap 95% interval of EM. Questions are resampled with replacement, each with all its samples.

    Raises:
      ValueError: there are no scores.
    """
    if not scores:
        raise ValueError("em_interval: no scores")
    return bootstrap_interval(np.mean, np.array([mean(s.em for s in g) for g in group_by_question(scores).values()]))


def pass_at(scores: Sequence[Score], k: int) -> float:
    """Unbiased pass@k: mean over questions of 1 - C(n - right, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""

    def of_question(group: Sequence[Score]) -> float:
        right = sum(s.em > 0 for s in group)
        return 1 - math.comb(len(group) - right, k) / math.comb(len(group), k)

    return round(mean(of_question(group) for group in group_by_question(scores).values()), DIGITS)


def majority_at(scores: Sequence[Score], k: int) -> float:
    """EM of the most common normalised answer among the first k samples; ties go to the earliest answer."""

    def of_question(group: Sequence[Score]) -> float:
        first = [s for s in sorted(group, key=lambda s: s.sample)[:k] if s.answer is not None]
        if not first:
            return 0.0
        ((winner, _),) = Counter(s.answer for s in first).most_common(1)
        return next(s.em for s in first if s.answer == winner)

    return round(mean(of_question(group) for group in group_by_question(scores).values()), DIGITS)


# ---- the decision to split ----


def judge_splitting(scores: Sequence[Score], manual_labels: bool = False) -> dict[str, Any]:
    """Whether the first search was split when it should be, regardless of the answer; JSON-serialisable.

    `confusion` counts per kind: `split`, `not_split` (one query), `no_search`. A decision is correct if a parallel
    question is split, or a sequential or single one is not. `accuracy`, `precision` and `recall` of splitting are over
    those three kinds, None if nothing counts. Mixed questions, which can be split in part, are excluded.
    `never_split` and `word_heuristic` are the accuracies of two controls: never splitting, and splitting if
    `surface.looks_parallel`.

    Args:
      manual_labels: use the manual labels instead of the set's kinds.
    """
    confusion: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        group = [s for s in scores if (s.label if manual_labels else s.kind) == kind]
        if group:
            split, no_search = sum(s.split for s in group), sum(s.first_sub_queries == 0 for s in group)
            not_split = len(group) - split - no_search
            confusion[kind] = {"split": split, "not_split": not_split, "no_search": no_search}
    kinds = [(s.label if manual_labels else s.kind, s) for s in scores]
    counted = [(kind == "parallel", s) for kind, s in kinds if kind in ("parallel", "sequential", "single")]
    right = sum(s.split for parallel, s in counted if parallel)
    return {
        "confusion": confusion,
        "accuracy": share_of(sum(s.split == parallel for parallel, s in counted), len(counted)),
        "precision": share_of(right, sum(s.split for _, s in counted)),
        "recall": share_of(right, sum(parallel for parallel, _ in counted)),
        "never_split": share_of(sum(not parallel for parallel, _ in counted), len(counted)),
        "word_heuristic": share_of(sum(s.looks_parallel == parallel for parallel, s in counted), len(counted)),
    }


# ---- two methods over the same questions ----


def compare_paired(first: Sequence[Score], second: Sequence[Score], value: str = "em") -> dict[str, float]:
    """The second's mean of a field of `Score` minus the first's, paired by question.

    `low`, `high`: bootstrap 95% interval of the difference, questions resampled with replacement. `p`: two-sided
    paired permutation test (random sign flips). `ratio`: second mean / first mean (NaN if the first is 0), with its
    own bootstrap interval `ratio_low`, `ratio_high`.

    Raises:
      UserError: the two do not cover the same questions.
    """
    from scipy import stats  # slow to import

    means = [
        {key: mean(getattr(s, value) for s in group) for key, group in group_by_question(s).items()}
        for s in (first, second)
    ]
    if means[0].keys() != means[1].keys() or not means[0]:
        only = len(means[0].keys() ^ means[1].keys())
        raise UserError(
            f"comparison: {only} questions are in one evaluation only, accepted: the same questions in both"
        )
    a = np.array(list(means[0].values()))
    b = np.array([means[1][key] for key in means[0]])

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = b.mean(axis) / a.mean(axis)
        return np.where(np.isfinite(quotient), quotient, np.nan)

    low, high = bootstrap_interval(np.mean, b - a)
    ratio_low, ratio_high = bootstrap_interval(ratio, a, b)
    options = {"permutation_type": "samples", "n_resamples": RESAMPLES, "batch": batch_rows(len(a))}
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    p = stats.permutation_test((b - a,), np.mean, rng=rng, **options).pvalue if len(a) > 1 else 1.0
    statistics = {
        "first": a.mean(),
        "second": b.mean(),
        "difference": (b - a).mean(),
        "low": low,
        "high": high,
        "p": p,
        "ratio": ratio(a, b),
        "ratio_low": ratio_low,
        "ratio_high": ratio_high,
    }
    return {name: round(float(number), DIGITS) for name, number in statistics.items()} | {"questions": len(a)}


def bootstrap_interval(statistic: Callable[..., np.ndarray], *values: np.ndarray) -> list[float]:
    """Percentile bootstrap 95% interval of a statistic of (paired) values; NaN if it is undefined for a resample."""
    from scipy import stats

    if len(values[0]) < 2:
        return [round(float(statistic(*values)), DIGITS)] * 2
    options = {"method": "percentile", "n_resamples": RESAMPLES, "batch": batch_rows(len(values[0])), "axis": 0}
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # all resamples are equal: an interval of width 0
        interval = stats.bootstrap(values, statistic, paired=True, rng=rng, **options).confidence_interval
    return [round(float(bound), DIGITS) for bound in interval]


def batch_rows(size: int) -> int:
    """Resamples of `size` numbers that are made at a time, at most 4 million numbers."""
    return max(1, 4_000_000 // size)


def group_by_question(scores: Sequence[Score]) -> dict[tuple[str, str], list[Score]]:
    groups: dict[tuple[str, str], list[Score]] = defaultdict(list)
    for s in scores:
        groups[s.question].append(s)
    return groups


def share_of(part: int, total: int) -> float | None:
    return round(part / total, DIGITS) if total else None


# ---- rows on disk ----


def to_row(s: Score) -> dict[str, Any]:
    """A JSON-serialisable row; `from_row` is the inverse."""
    return asdict(s)


def from_row(row: Mapping[str, Any]) -> Score:
    """A score from a row, which may have other fields too, and lack those that have defaults."""
    return Score(**{f.name: row[f.name] for f in fields(Score) if f.name in row or f.default is MISSING})

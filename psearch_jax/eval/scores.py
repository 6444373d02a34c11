"""Evaluation metrics: means with intervals, pass@k, the decision to split, paired differences.

Everything is computed from `Score`s, one per trajectory, which evaluations write to disk and read back.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from psearch_jax.rl.rewards import evidence_recall
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
    chance: float | None = None  # EM of a random guess among the question's possible answers, if known
    looks_parallel: bool = False  # by a heuristic on the question's words
    evidence: float | None = None  # `evidence_recall`; None in older rows

    @property
    def split(self) -> bool:
        """Whether the first search had two or more sub-queries."""
        return self.first_sub_queries >= 2

    @property
    def decomposed_correctly(self) -> bool:
        """Whether the first search splits a parallel question, or has one query for any other kind."""
        return self.first_sub_queries > 0 and self.split == (self.kind == "parallel")

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
        sub_queries=sum(len(turn.executed) for turn in t.executed),
        first_sub_queries=len(t.executed[0].executed) if t.executed else 0,
        turns=t.model_calls,
        tokens=sum(turn.n_sampled for turn in t.turns),
        context=len(t.ids),
        valid_format=t.well_formed,
        chance=question.metadata.get("chance"),
        looks_parallel=looks_parallel(question.text),
        evidence=round(evidence_recall(t), DIGITS),
    )


# ---- figures of one set ----


def summarise(scores: Sequence[Score]) -> dict[str, float]:
    """Means over trajectories; `llm_calls` is the sum of all turns, `questions` the number of distinct questions.

    `decomposition_ratio`: share whose first search had two or more sub-queries. `decomposition_accuracy`: see
    `judge_splitting`, absent if no question counts. `chance`: EM of a random guess; `evidence`: share of the evidence
    that the searches showed; both are absent unless known for every score. Without scores only `questions` is present.
    """
    if not scores:
        return {"questions": 0}
    names = ("em", "f1", "searches", "sub_queries", "turns", "tokens", "context", "valid_format")
    figures = {name: mean(getattr(s, name) for s in scores) for name in names}
    figures["decomposition_ratio"] = mean(s.split for s in scores)
    accuracy = judge_splitting(scores)["accuracy"]
    if accuracy is not None:
        figures["decomposition_accuracy"] = accuracy
    figures["answered"] = mean(s.status == "answered" for s in scores)
    for name in ("chance", "evidence"):
        if all(getattr(s, name) is not None for s in scores):
            figures[name] = mean(getattr(s, name) for s in scores)
    rounded = {name: round(value, DIGITS) for name, value in figures.items()}
    return rounded | {"llm_calls": sum(s.turns for s in scores), "questions": len({s.question for s in scores})}


def group_by_kind(scores: Iterable[Score]) -> dict[Kind, list[Score]]:
    """The scores by kind, in the order of `KINDS`; kinds without scores are left out."""
    groups = _group(scores, "kind")
    return {kind: groups[kind] for kind in KINDS if kind in groups}


def group_by_source(scores: Iterable[Score]) -> dict[str, list[Score]]:
    """The scores by source, in order of first appearance."""
    return _group(scores, "source")


def _group(scores: Iterable[Score], field: str) -> dict[Any, list[Score]]:
    groups: dict[Any, list[Score]] = defaultdict(list)
    for s in scores:
        groups[getattr(s, field)].append(s)
    return dict(groups)


def figures(scores: Sequence[Score], ks: Sequence[int] = ()) -> dict[str, Any]:
    """The report on one benchmark with at least one score, JSON-serialisable.

    Keys: `all` and `kinds` ({kind: ...}), each a summary with `em_interval` [low, high], `finished_by_turn`,
    `not_finite` (trajectories with non-finite logits; they count as not answered), and `pass_at` for every k in `ks`;
    `splitting`, see `judge_splitting`; `sources`, if the questions come from several sets: `all` and `kinds` of each.
    """
    report = report_by_kind(scores, ks) | {"splitting": judge_splitting(scores)}
    sources = group_by_source(scores)
    if len(sources) > 1:
        report["sources"] = {source: report_by_kind(group, ks) for source, group in sources.items()}
    return report


def report_by_kind(scores: Sequence[Score], ks: Sequence[int]) -> dict[str, Any]:
    kinds = {kind: summarise_in_detail(group, ks) for kind, group in group_by_kind(scores).items()}
    return {"all": summarise_in_detail(scores, ks), "kinds": kinds}


def summarise_in_detail(scores: Sequence[Score], ks: Sequence[int]) -> dict[str, Any]:
    more: dict[str, Any] = {"em_interval": em_interval(scores), "finished_by_turn": share_finished(scores)}
    more["not_finite"] = sum(s.status == "not_finite" for s in scores)
    if ks:
        more["pass_at"] = {str(k): pass_at(scores, k) for k in ks}
    return summarise(scores) | more


def share_finished(scores: Sequence[Score]) -> list[float]:
    """Share of trajectories that had answered by model call 1, 2, .. `LAST_TURN` (the paper's cumulative figure)."""
    calls = [s.turns if s.status == "answered" else math.inf for s in scores]
    return [round(mean(c <= turn for c in calls), DIGITS) for turn in range(1, LAST_TURN + 1)]


def em_interval(scores: Sequence[Score]) -> list[float]:
    """Bootstrap 95% interval of EM. Questions are resampled with replacement, each with all its samples."""
    return bootstrap_interval(np.mean, np.array(list(question_means(scores, "em").values())))


def pass_at(scores: Sequence[Score], k: int) -> float:
    """Unbiased pass@k: mean over questions of 1 - C(n - right, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    groups = _group(scores, "question").values()
    counts = [(len(group), sum(s.em > 0 for s in group)) for group in groups]
    return round(mean(1 - math.comb(n - right, k) / math.comb(n, k) for n, right in counts), DIGITS)


# ---- the decision to split ----


# Words of comparison, or two capitalised names joined by "and".
_COMPARISON = re.compile(
    r"\b(?:or|both|either|neither|same|different|between)\b|[A-Z]\S*,? and (?:the |the film )?[A-Z0-9\"]"
)


def looks_parallel(question: str) -> bool:
    """Whether the words of a question suggest a comparison: a control, without a model, for the decision to split.

    If this rule decides as well as a policy on some set, the policy may have learned no more than such words.
    """
    return _COMPARISON.search(question) is not None


def judge_splitting(scores: Sequence[Score]) -> dict[str, Any]:
    """Whether the first search was split when it should be, regardless of the answer; JSON-serialisable.

    `confusion` counts per kind: `split`, `not_split` (one query), `no_search`. A decision is correct if a parallel
    question is split, or a sequential or single one is searched without a split. `accuracy`, `precision` and `recall`
    of splitting are over those three kinds, None if nothing counts. Mixed questions, which can be split in part, are
    excluded. `never_split` and `word_heuristic` are the accuracies of two controls: one query, and splitting if
    `looks_parallel`.
    """
    confusion: dict[str, dict[str, int]] = {}
    for kind, group in group_by_kind(scores).items():
        split, no_search = sum(s.split for s in group), sum(s.first_sub_queries == 0 for s in group)
        confusion[kind] = {"split": split, "not_split": len(group) - split - no_search, "no_search": no_search}
    counted = [s for s in scores if s.kind != "mixed"]
    parallel = [s for s in counted if s.kind == "parallel"]
    split = [s for s in counted if s.split]
    return {
        "confusion": confusion,
        "accuracy": share_of(sum(s.decomposed_correctly for s in counted), len(counted)),
        "precision": share_of(sum(s.kind == "parallel" for s in split), len(split)),
        "recall": share_of(sum(s.split for s in parallel), len(parallel)),
        "never_split": share_of(len(counted) - len(parallel), len(counted)),
        "word_heuristic": share_of(sum(s.looks_parallel == (s.kind == "parallel") for s in counted), len(counted)),
    }


# ---- two evaluations of the same questions ----


def compare_paired(first: Sequence[Score], second: Sequence[Score], value: str = "em") -> dict[str, float]:
    """The second's mean of a field of `Score` minus the first's, paired by question.

    `low`, `high`: bootstrap 95% interval of the difference, questions resampled with replacement. `p`: two-sided
    paired permutation test (random sign flips). `ratio`: second mean / first mean (NaN if the first is 0), with its
    own bootstrap interval `ratio_low`, `ratio_high`.

    Raises:
      UserError: the two do not cover the same questions.
    """
    means = [question_means(scores, value) for scores in (first, second)]
    only = len(means[0].keys() ^ means[1].keys())
    if only or not means[0]:
        raise UserError(
            f"comparison: {only} questions are in one evaluation only, accepted: the same questions in both"
        )
    a = np.array(list(means[0].values()))
    b = np.array([means[1][question] for question in means[0]])

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = b.mean(axis) / a.mean(axis)
        return np.where(np.isfinite(quotient), quotient, np.nan)

    statistics = {"first": a.mean(), "second": b.mean(), "difference": (b - a).mean(), "ratio": ratio(a, b)}
    statistics["p"] = permutation_p(b - a)
    statistics["low"], statistics["high"] = bootstrap_interval(np.mean, b - a)
    statistics["ratio_low"], statistics["ratio_high"] = bootstrap_interval(ratio, a, b)
    return {name: round(float(number), DIGITS) for name, number in statistics.items()} | {"questions": len(a)}


def permutation_p(differences: np.ndarray) -> float:
    """Two-sided paired permutation test of [Q] differences between two means of each question: random sign flips."""
    from scipy import stats  # slow to import

    if len(differences) < 2:
        return 1.0
    options = resampling(len(differences))
    return float(stats.permutation_test((differences,), np.mean, permutation_type="samples", **options).pvalue)


def bootstrap_interval(statistic: Callable[..., np.ndarray], *values: np.ndarray) -> list[float]:
    """Percentile bootstrap 95% interval of a statistic of (paired) values; NaN if it is undefined for a resample."""
    from scipy import stats

    if len(values[0]) < 2:
        return [round(float(statistic(*values)), DIGITS)] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # all resamples are equal: an interval of width 0
        options = {"method": "percentile", "paired": True, "axis": 0, **resampling(len(values[0]))}
        interval = stats.bootstrap(values, statistic, **options).confidence_interval
    return [round(float(bound), DIGITS) for bound in interval]


def resampling(size: int) -> dict[str, Any]:
    """SciPy's options for resamples of `size` numbers, of which at most 4 million are made at a time."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    return {"n_resamples": RESAMPLES, "batch": max(1, 4_000_000 // size), "rng": rng}


def question_means(scores: Iterable[Score], value: str) -> dict[tuple[str, str], float]:
    """The mean of a field of `Score` over the samples of every question."""
    groups = _group(scores, "question")
    return {question: mean(getattr(s, value) for s in group) for question, group in groups.items()}


def share_of(part: int, total: int) -> float | None:
    return round(part / total, DIGITS) if total else None


def from_row(row: Mapping[str, Any]) -> Score:
    """A score from a row of its fields, which may have others too, and lack those that have defaults."""
    return Score(**{f.name: row[f.name] for f in fields(Score) if f.name in row or f.default is MISSING})

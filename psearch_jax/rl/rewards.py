"""The reward of a rollout: a sum of terms (ParallelSearch, arXiv 2508.09303).

`TERMS` declares the built-in ones. Four are published: whether the answer is correct (`outcome`), whether the grammar
is valid (`format`), whether the question was split exactly when it should be (`decomposition`), and whether the number
of searches matches its kind (`search_count`). The last two read the labelled kind of the question; `critical_path` can
replace them without labels. The others are off by default. Terms see a rollout as the profile parses it: here by its
actions, in compat.py by its text. own_terms.py loads the terms that `reward.terms` adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psearch_jax.config import RewardSection
from psearch_jax.text.answers import exact_match, f1
from psearch_jax.text.evidence import find_support, rounds_of, states
from psearch_jax.types import Kind, RewardParts, Trajectory

MAX_BONUS = 0.5  # maximum of the relative shortening of the critical path


@dataclass(frozen=True)
class Parsed:
    """A rollout as a profile of the reward parses it."""

    trajectory: Trajectory
    worth: float  # of the answer, from 0 (wrong) to 1 (right)
    answered: bool
    well_formed: bool
    decomposed: bool  # whether the first search had two or more sub-queries
    searches: int


def parse_actions(trajectory: Trajectory, reward: RewardSection) -> Parsed:
    """The published profile: searches of sampled turns that were executed, and the answer of the last turn."""
    answer, golds = trajectory.answer, trajectory.question.answers
    worth = float(exact_match(answer, golds)) if reward.outcome == "em" else f1(answer, golds)
    searches = len(trajectory.executed)
    return Parsed(trajectory, worth, answer is not None, trajectory.well_formed, trajectory.decomposed, searches)


@dataclass(frozen=True)
class Term:
    """One term: `compute(parsed, reward)` returns its value for a `Parsed`, times its weight.

    With `needs_group` it returns the N values for a list of N, in complete groups.
    """

    name: str  # in metrics, trajectories and reports
    compute: Callable[[Any, RewardSection], Any]
    needs_group: bool = False
    bonus: bool = False  # bonuses are added to each other first, which decides the last bit of the total
    identity: str = ""  # of a term that `reward.terms` names: weight and contents, which a resumed run must keep

    def values(self, parsed: Sequence[Parsed], reward: RewardSection) -> list[float]:
        """The N values for N rollouts, in complete groups."""
        return self.compute(parsed, reward) if self.needs_group else [self.compute(p, reward) for p in parsed]


class Reward:
    """The sum of `TERMS` and of further ones, for rollouts as `parse(trajectory, section)` sees them."""

    def __init__(
        self, section: RewardSection, parse: Callable[..., Parsed] = parse_actions, further: Sequence[Term] = ()
    ):
        self._section, self._parse, self._terms = section, parse, (*TERMS, *further)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[RewardParts]:
        """The rewards of N trajectories, in complete groups."""
        parsed = [self._parse(t, self._section) for t in trajectories]
        columns = [term.values(parsed, self._section) for term in self._terms]
        return [self._add_up(values) for values in zip(*columns, strict=True)]

    def _add_up(self, values: Sequence[float]) -> RewardParts:
        total, bonuses, by_name = 0.0, 0.0, dict[str, float]()
        for term, value in zip(self._terms, values, strict=True):
            by_name[term.name] = value
            if term.bonus:
                bonuses += value
            else:
                total, bonuses = total + bonuses + value, 0.0
        return RewardParts(by_name, total + bonuses)


def never_pays_for_splitting(kinds: Iterable[Kind], reward: RewardSection) -> bool:
    """Whether the reward has a bonus for splitting that no question of these kinds can earn."""
    labelled = not reward.critical_path and reward.decomposition > 0
    return labelled and all(kind != "parallel" for kind in kinds)


def format_term(parsed: Parsed, reward: RewardSection) -> float:
    """The format term: a deduction from a correct answer, a bonus for an incorrect one.

    Correct: 0, or -format when ill-formed. Incorrect: format when well-formed, final_format for an ill-formed answer,
    0 for no answer. A `worth` between 0 and 1 interpolates linearly.
    """
    if parsed.well_formed:
        return (1 - parsed.worth) * reward.format
    return (1 - parsed.worth) * (reward.final_format if parsed.answered else 0.0) - parsed.worth * reward.format


def decomposition_term(parsed: Parsed, reward: RewardSection) -> float:
    """3 * weight for splitting a parallel question, weight for not splitting any other, else 0."""
    if parsed.trajectory.question.kind == "parallel":
        earned = 3 * reward.decomposition if parsed.decomposed else 0.0
    else:
        earned = 0.0 if parsed.decomposed else reward.decomposition
    return _paid(earned, parsed, reward)


def search_count_term(parsed: Parsed, reward: RewardSection) -> float:
    """weight * (1 - distance), minus the price of the sub-queries that were run.

    The distance is max(0, 2 - searches) for dependent searches, else |searches - 1|.
    """
    dependent = parsed.trajectory.question.kind in ("sequential", "mixed")
    distance = max(0, 2 - parsed.searches) if dependent else abs(parsed.searches - 1)
    price = reward.sub_query_penalty * sum(len(turn.executed) for turn in parsed.trajectory.executed)
    return _paid(reward.search_count * (1 - distance), parsed, reward) - price


def _paid(bonus: float, parsed: Parsed, reward: RewardSection) -> float:
    """What is paid of a bonus: nothing next to `critical_path`; with `gated` as much of it as the answer is worth.

    A negative one is not gated: a wrong answer after many searches would earn more than a right one.
    """
    if reward.critical_path:
        return 0.0
    if not reward.gated or bonus < 0:
        return bonus
    return parsed.worth * bonus if parsed.searches else 0.0


def critical_path_term(parsed: Sequence[Parsed], reward: RewardSection) -> list[float]:
    """The bonus of reward.critical_path: right answers earn more, the shorter their critical path.

    The critical path is the number of model turns: sub-queries of one search run at once, searches in different turns
    do not. A right answer gets weight * clip(1 - turns / mean, -MAX_BONUS, MAX_BONUS). The mean is over the right
    answers to its question. No label of the question is read. Wrong answers neither get a bonus nor count towards the
    mean, so that answering early does not pay. Centring and clipping are as in P-GRPO (arXiv 2512.07843).
    """
    trajectories, out, groups = [p.trajectory for p in parsed], [0.0] * len(parsed), dict[bytes, list[int]]()
    if not reward.critical_path:
        return out
    for i, trajectory in enumerate(trajectories):
        if exact_match(trajectory.answer, trajectory.question.answers):
            groups.setdefault(trajectory.question.identity, []).append(i)
    for rows in groups.values():
        mean = sum(trajectories[i].model_calls for i in rows) / len(rows)
        for i in rows:
            shortened = 1.0 - trajectories[i].model_calls / mean
            out[i] = reward.critical_path * min(max(shortened, -MAX_BONUS), MAX_BONUS)
    return out


def no_search_term(parsed: Parsed, reward: RewardSection) -> float:
    """The penalty of an answer without a search."""
    t = parsed.trajectory
    return -reward.no_search_penalty * (t.status == "answered" and not t.executed)


TERMS = (
    Term("outcome", lambda p, _: p.worth),
    Term("format", format_term),
    Term("decomposition", decomposition_term, bonus=True),
    Term("search_count", search_count_term, bonus=True),
    Term("critical_path", critical_path_term, bonus=True, needs_group=True),
    Term("unfinished", lambda p, reward: -reward.unfinished_penalty * (p.trajectory.status != "answered")),
    Term("evidence", lambda p, reward: reward.evidence and reward.evidence * evidence_recall(p.trajectory)),
    Term("no_search", no_search_term),
)


def evidence_recall(trajectory: Trajectory) -> float:
    """The share of the question's evidence triples that the model was shown, after David-GRPO (arXiv 2601.21699).

    Only passages of its own searches count, up to where they were cut. Without triples it is `answer_recall`.
    """
    facts = {fact for facts in rounds_of(trajectory.question) for fact in facts}
    if not facts:
        return answer_recall(trajectory)
    seen = [(p.title, text) for turn in trajectory.executed for p, text in turn.seen]
    return sum(any(states(title, text, fact) for title, text in seen) for fact in facts) / len(facts)


def answer_recall(trajectory: Trajectory) -> float:
    """1 if the model's own searches showed it an answer, else 0 (the retrieval reward studied in arXiv 2505.15117)."""
    return float(bool(find_support(trajectory.executed, trajectory.question.answers)))

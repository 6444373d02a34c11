"""The reward of a trajectory, from its parsed actions (ParallelSearch, arXiv 2508.09303).

The published one has four parts: whether the answer is correct (`outcome`), whether the grammar is valid (`format`),
whether the question was split exactly when it should be (`decomposition`), and whether the number of searches matches
its kind (`search_count`). The last two read the labelled kind of the question. `with_critical_path` can replace them
without labels. `with_shared_parts` adds evidence recall and penalties, which are off by default. `PaperReward` is all
of them as a function of a step's rollouts. No text is parsed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from psearch_jax.config import RewardSection
from psearch_jax.text.answers import exact_match, f1
from psearch_jax.text.evidence import find_support, rounds_of, states
from psearch_jax.types import Kind, RewardParts, Trajectory

MAX_BONUS = 0.5  # maximum of the relative shortening of the critical path


class Reward(Protocol):
    """The rewards of rollouts."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[RewardParts]:
        """The rewards of N trajectories, in complete groups."""
        ...


class PaperReward:
    """The published reward, or the one for a short critical path.

    Args:
      section: the weights and options.
    """

    def __init__(self, section: RewardSection):
        self._section = section

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[RewardParts]:
        parts = [paper_reward(t, self._section) for t in trajectories]
        if self._section.critical_path:
            parts = with_critical_path(parts, trajectories, self._section.critical_path)
        return with_shared_parts(parts, trajectories, self._section)


def paper_reward(trajectory: Trajectory, reward: RewardSection) -> RewardParts:
    """The published rule, applied to the parsed actions rather than to rendered text.

    Args:
      trajectory: only searches of sampled turns that were executed count; the answer is that of the last turn.
      reward: the weights and options; its defaults are the published ones.
    """
    question = trajectory.question
    right = exact_match(trajectory.answer, question.answers)
    worth = float(right) if reward.outcome == "em" else f1(trajectory.answer, question.answers)
    form = format_part(worth, trajectory.answer is not None, trajectory.well_formed, reward)
    penalty = reward.sub_query_penalty * sum(len(turn.queries) for turn in trajectory.executed)
    if reward.critical_path:
        return RewardParts(worth, form, 0.0, -penalty)
    decomposition = decomposition_part(question.kind, trajectory.decomposed, reward.decomposition)
    count = count_part(question.kind, len(trajectory.executed), reward.search_count)
    if reward.gated:
        paid = worth if trajectory.executed else 0.0
        decomposition, count = paid * decomposition, paid * count
    return RewardParts(worth, form, decomposition, count - penalty)


def never_pays_for_splitting(kinds: Iterable[Kind], reward: RewardSection) -> bool:
    """Whether the reward has a bonus for splitting that no question of these kinds can earn."""
    labelled = not reward.critical_path and reward.decomposition > 0
    return labelled and all(kind != "parallel" for kind in kinds)


def format_part(worth: float, answered: bool, well_formed: bool, reward: RewardSection) -> float:
    """The format part: a deduction from a correct answer, a bonus for an incorrect one.

    Correct: 0, or -format when ill-formed. Incorrect: format when well-formed, final_format for an ill-formed answer,
    0 for no answer. A `worth` between 0 and 1 interpolates linearly.
    """
    if well_formed:
        return (1 - worth) * reward.format
    return (1 - worth) * (reward.final_format if answered else 0.0) - worth * reward.format


def decomposition_part(kind: Kind, decomposed: bool, weight: float) -> float:
    """3 * weight for splitting a parallel question, weight for not splitting a sequential or single one, else 0."""
    if kind == "parallel":
        return 3 * weight if decomposed else 0.0
    return 0.0 if decomposed else weight


def count_part(kind: Kind, searches: int, weight: float) -> float:
    """weight * (1 - distance); distance is max(0, 2 - searches) for dependent searches, else |searches - 1|."""
    distance = max(0, 2 - searches) if kind in ("sequential", "mixed") else abs(searches - 1)
    return weight * (1 - distance)


def with_critical_path(
    parts: Sequence[RewardParts], trajectories: Sequence[Trajectory], weight: float
) -> list[RewardParts]:
    """Adds the bonus of reward.critical_path: right answers earn more, the shorter their critical path.

    The critical path is the number of model turns: sub-queries of one search run at once, searches in different turns
    do not. A right answer gets weight * clip(1 - turns / mean, -MAX_BONUS, MAX_BONUS). The mean is over the right
    answers to its question. No label of the question is read. Wrong answers neither get a bonus nor count towards the
    mean, so that answering early does not pay. Centring and clipping are as in P-GRPO (arXiv 2512.07843).

    Args:
      parts: N, of the trajectories.
      trajectories: N, in complete groups.
    """
    groups: dict[bytes, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        if exact_match(trajectory.answer, trajectory.question.answers):
            groups.setdefault(trajectory.question.identity, []).append(i)
    out = list(parts)
    for rows in groups.values():
        mean = sum(trajectories[i].model_calls for i in rows) / len(rows)
        for i in rows:
            shortened = 1.0 - trajectories[i].model_calls / mean
            out[i] = replace(parts[i], critical_path=weight * min(max(shortened, -MAX_BONUS), MAX_BONUS))
    return out


def with_shared_parts(
    parts: Sequence[RewardParts], trajectories: Sequence[Trajectory], reward: RewardSection
) -> list[RewardParts]:
    """Adds the parts of both profiles: evidence recall, and the penalties of no search and of no answer."""
    out = []
    for part, t in zip(parts, trajectories, strict=True):
        answered = t.status == "answered"
        evidence = reward.evidence * evidence_recall(t) if reward.evidence else 0.0
        no_search = -reward.no_search_penalty * (answered and not t.executed)
        unfinished = -reward.unfinished_penalty * (not answered)
        out.append(replace(part, evidence=evidence, no_search=no_search, unfinished=unfinished))
    return out


def evidence_recall(trajectory: Trajectory) -> float:
    """The share of the question's evidence triples that the model was shown, after David-GRPO (arXiv 2601.21699).

    Only passages of its own searches count, up to where they were cut. Without triples it is 1 if an answer is in one
    of them, else 0, as the retrieval reward studied with Search-R1 (arXiv 2505.15117).
    """
    facts = {fact for facts in rounds_of(trajectory.question) for fact in facts}
    if not facts:
        return float(bool(find_support(trajectory.executed, trajectory.question.answers)))
    seen = [(p.title, text) for turn in trajectory.executed for p, text in turn.seen]
    return sum(any(states(title, text, fact) for title, text in seen) for fact in facts) / len(facts)

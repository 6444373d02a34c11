"""The reward of a trajectory, from its parsed actions (ParallelSearch, arXiv 2508.09303).

Four parts: was the answer right (`outcome`), was the grammar kept (`format`), was the question split when it should
be (`decomposition`), and were the searches as few as its kind needs (`search_count`). No text is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psearch_jax.config import RewardSection
from psearch_jax.text.answers import exact_match, f1
from psearch_jax.types import Kind, RewardParts, Trajectory


@dataclass(frozen=True)
class RewardWeights:
    """The published weights. `final_format` is paid for a wrong answer in a broken grammar (Search-R1: 0.1)."""

    format: float = 0.1
    final_format: float = 0.0
    decomposition: float = 0.15
    search_count: float = 0.35
    search_price: float = 0.0  # not published: subtracted for every search that was run


def paper_reward(
    trajectory: Trajectory,
    weights: RewardWeights,
    mixed: Literal["sequential", "parallel"] = "sequential",
    gate_bonus_on_outcome: bool = False,
    outcome: Literal["em", "f1"] = "em",
) -> RewardParts:
    """The published rule on what was done, not on how it was rendered.

    Args:
      trajectory: searches count when they were executed by a sampled turn; the answer is that of the last turn.
      weights: the weight of each part.
      mixed: the kind as which a `mixed` question is rewarded.
      gate_bonus_on_outcome: pay the last two parts for right answers only.
      outcome: what the answer is worth: exact match, as published, or its F1.
    """
    question = trajectory.question
    kind: Kind = mixed if question.kind == "mixed" else question.kind
    right = exact_match(trajectory.answer, question.answers)
    worth = float(right) if outcome == "em" else f1(trajectory.answer, question.answers)
    form = format_part(worth, trajectory.answer is not None, trajectory.well_formed, weights)
    searches = len(trajectory.executed)
    price = weights.search_price * searches
    if gate_bonus_on_outcome and not right:
        return RewardParts(worth, form, 0.0, -price)
    decomposition = decomposition_part(kind, trajectory.decomposed, weights.decomposition)
    return RewardParts(worth, form, decomposition, count_part(kind, searches, weights.search_count) - price)


def format_part(worth: float, answered: bool, well_formed: bool, weights: RewardWeights) -> float:
    """What the grammar adds to the outcome: a deduction from a right answer, a consolation for any other.

    Right: 0, or -format when ill-formed. Wrong: format when well-formed, final_format for an ill-formed answer, 0 for
    no answer at all. In between by the answer's worth.
    """
    if well_formed:
        return (1 - worth) * weights.format
    return (1 - worth) * (weights.final_format if answered else 0.0) - worth * weights.format


def decomposition_part(kind: Kind, decomposed: bool, weight: float) -> float:
    """3 * weight for splitting a parallel question, weight for not splitting a sequential or single one, else 0."""
    if kind == "parallel":
        return 3 * weight if decomposed else 0.0
    return 0.0 if decomposed else weight


def count_part(kind: Kind, searches: int, weight: float) -> float:
    """weight * (1 - distance), in searches: from exactly one, or up to at least two for a sequential question."""
    distance = max(0, 2 - searches) if kind == "sequential" else abs(searches - 1)
    return weight * (1 - distance)


def length_penalty(trajectory: Trajectory, reward: RewardSection, penalise_unfinished: bool, context: int) -> float:
    """What a trajectory without an answer, or one that nearly fills its context, is charged: 0 to unfinished_penalty.

    The second is the soft overlong punishment of arXiv 2503.14476 eq. 13, over the last `overlong_tokens` ids.

    Args:
      context: ids that a trajectory can hold.
    """
    if penalise_unfinished and trajectory.status != "answered":
        return reward.unfinished_penalty
    if not reward.overlong_tokens:
        return 0.0
    over = len(trajectory.ids) - (context - reward.overlong_tokens)
    return reward.unfinished_penalty * min(max(over / reward.overlong_tokens, 0.0), 1.0)

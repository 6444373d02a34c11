"""The reward of a trajectory, from its parsed actions (ParallelSearch, arXiv 2508.09303).

It has four parts: whether the answer is correct (`outcome`), whether the grammar is valid (`format`), whether the
question was split exactly when it should be (`decomposition`), and whether the number of searches matches its kind
(`search_count`). The last two read the labelled kind of the question. `with_critical_path` can replace them without
labels. No text is parsed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from psearch_jax.config import RewardSection
from psearch_jax.text.answers import exact_match, f1
from psearch_jax.types import Kind, RewardParts, Trajectory

MAX_BONUS = 0.5  # maximum of the relative shortening of the critical path


def paper_reward(trajectory: Trajectory, reward: RewardSection) -> RewardParts:
    """The published rule, applied to the parsed actions rather than to rendered text.

    Args:
      trajectory: only searches of sampled turns that were executed count; the answer is that of the last turn.
      reward: the weights and options; its defaults are the published ones.
    """
    question = trajectory.question
    kind: Kind = reward.mixed if question.kind == "mixed" else question.kind
    right = exact_match(trajectory.answer, question.answers)
    worth = float(right) if reward.outcome == "em" else f1(trajectory.answer, question.answers)
    form = format_part(worth, trajectory.answer is not None, trajectory.well_formed, reward)
    searches = len(trajectory.executed)
    sub_queries = sum(len(turn.queries) for turn in trajectory.executed)
    penalty = reward.search_penalty * searches + reward.sub_query_penalty * sub_queries
    if reward.parallelism == "critical_path" or (reward.gate_bonus_on_outcome and not right):
        return RewardParts(worth, form, 0.0, -penalty)
    decomposition = decomposition_part(kind, trajectory.decomposed, reward.decomposition)
    return RewardParts(worth, form, decomposition, count_part(kind, searches, reward.search_count) - penalty)


def never_pays_for_splitting(kinds: Iterable[Kind], reward: RewardSection) -> bool:
    """Whether the reward has a bonus for splitting that no question of these kinds can earn."""
    labelled = reward.parallelism == "labelled" and reward.decomposition > 0
    return labelled and all((reward.mixed if kind == "mixed" else kind) != "parallel" for kind in kinds)


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
    """weight * (1 - distance); distance is |searches - 1|, or max(0, 2 - searches) for a sequential question."""
    distance = max(0, 2 - searches) if kind == "sequential" else abs(searches - 1)
    return weight * (1 - distance)


def with_critical_path(
    parts: Sequence[RewardParts], trajectories: Sequence[Trajectory], reward: RewardSection, step: int
) -> list[RewardParts]:
    """Adds the bonus of reward.parallelism=critical_path: right answers earn more, the shorter their critical path.

    The critical path is the number of model turns: sub-queries of one search run at once, searches in different turns
    do not. A right answer gets w * clip(1 - turns / mean, -MAX_BONUS, MAX_BONUS). The mean is over the right answers
    to its question; w is reward.critical_path, which falls linearly to 0 over `critical_path_steps` steps. No label of
    the question is read. Wrong answers neither get a bonus nor count towards the mean, so that answering early does
    not pay. Centring and clipping are as in P-GRPO (arXiv 2512.07843), the annealing as in PARL (arXiv 2602.02276).

    Args:
      parts: N, of the trajectories.
      trajectories: N, in complete groups.
      step: training steps taken before.

    Returns:
      N rewards; the given ones with parallelism=labelled.
    """
    if reward.parallelism == "labelled":
        return list(parts)
    steps = reward.critical_path_steps
    weight = reward.critical_path * (max(0.0, 1.0 - step / steps) if steps else 1.0)
    groups: dict[bytes, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        if exact_match(trajectory.answer, trajectory.question.answers):
            groups.setdefault(trajectory.question.identity, []).append(i)
    out = list(parts)
    for rows in groups.values():
        mean = sum(trajectories[i].model_calls for i in rows) / len(rows)
        for i in rows:
            shortened = 1.0 - trajectories[i].model_calls / mean
            bonus = weight * min(max(shortened, -MAX_BONUS), MAX_BONUS)
            out[i] = replace(parts[i], critical_path=bonus)
    return out


def length_penalty(trajectory: Trajectory, reward: RewardSection, penalise_unfinished: bool, context: int) -> float:
    """Penalty, from 0 to unfinished_penalty, for a missing answer or for nearly filling the context.

    The latter is the soft overlong punishment of arXiv 2503.14476 eq. 13, over the last `overlong_tokens` tokens.

    Args:
      context: maximum number of tokens of a trajectory.
    """
    if penalise_unfinished and trajectory.status != "answered":
        return reward.unfinished_penalty
    if not reward.overlong_tokens:
        return 0.0
    over = len(trajectory.ids) - (context - reward.overlong_tokens)
    return reward.unfinished_penalty * min(max(over / reward.overlong_tokens, 0.0), 1.0)

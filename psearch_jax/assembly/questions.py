"""The training and evaluation questions of a config."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import calculated_forms, kind_counts, questions
from psearch_jax.config import Config, best_metric
from psearch_jax.data.held_out import hold_out, pick
from psearch_jax.data.prepared import count_kinds, find_overlap, open_questions
from psearch_jax.eval.benchmarks import CLOSED_WORLD, PAIRS, TOOLS, closed_world_benchmark
from psearch_jax.rl.rewards import never_pays_for_splitting
from psearch_jax.rollout.calculator import CALCULATOR
from psearch_jax.types import KINDS, Kind, Question, UserError

log = logging.getLogger("psearch_jax")

WORLD_SHARES: dict[Kind, float] = {"parallel": 0.5, "sequential": 0.4}  # the rest: single


def make_world(config: Config) -> ClosedWorld | None:
    """The closed world that the questions come from; None if they come from elsewhere."""
    if config.data.source != CLOSED_WORLD:
        return None
    return ClosedWorld.make(config.data.world_seed, names=config.data.world_names)


def load_questions(config: Config, world: ClosedWorld | None) -> tuple[Sequence[Question], list[Question]]:
    """Training questions, and at most eval.questions_per_kind evaluation questions of each kind.

    Without a closed world, evaluation questions come from data.validation or data.validation_share, if set.
    """
    data = config.data
    if world is None:
        train: Sequence[Question] = open_questions(data.source)
        if never_pays_for_splitting(count_kinds(train), config.reward):
            log.warning(
                f"{data.source}: no question is parallel (metadata.type), so the reward never pays for splitting"
            )
        held: Sequence[Question] = []
        if data.validation_share:
            train, held = hold_out(train, data.validation_share)
        elif data.validation:
            held = open_questions(data.validation)
        asked = pick(held, config.eval.questions_per_kind)
        if asked:
            log.info(
                "%d training questions; %d of %d validation questions are used", len(train), len(asked), len(held)
            )
        if data.validation and isinstance(train, list):  # a prepared directory is not read just for this
            leaked = len(find_overlap(asked, train))
            if leaked:
                log.warning("%d of the %d validation questions are also training questions", leaked, len(asked))
        check_best_metric(config, asked)
        return train, asked
    train = training_questions(config, world)
    count = config.eval.questions_per_kind
    names = (PAIRS, *KINDS, *(TOOLS if _has_calculator(config) else ()))
    return train, [q for name in names for q in closed_world_benchmark(world, name, count)] if count else []


def check_best_metric(config: Config, asked: Sequence[Question]) -> None:
    """Raises `UserError` if the best checkpoint is chosen by a kind of which there is no validation question."""
    kind, _ = best_metric(config.eval.best_metric)
    if config.eval.every_steps and kind not in ("all", *(q.kind for q in asked)):
        kinds = ", ".join(dict.fromkeys(q.kind for q in asked))
        raise UserError(
            f"config.eval.best_metric: found {config.eval.best_metric!r}, but no validation question is of that "
            f"kind, accepted: a metric over all questions, or over one of {kinds}"
        )


def training_questions(config: Config, world: ClosedWorld) -> list[Question]:
    """The closed world's training questions, in the proportions of `WORLD_SHARES`.

    With the calculator among the tools, half of the parallel and half of the sequential questions need it.
    """
    data, made = config.data, list[Question]()
    calculator = _has_calculator(config)
    for kind, count in kind_counts(data.world_questions, WORLD_SHARES).items():
        forms = calculated_forms(kind) if calculator else []
        half = count // 2 if forms else 0
        made += questions(world, "train", kind, count - half, data.world_seed)
        made += questions(world, "train", kind, half, data.world_seed, forms) if half else []
    return made


def _has_calculator(config: Config) -> bool:
    return CALCULATOR.name in map(str.strip, config.rollout.tools.split(","))

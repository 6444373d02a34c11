"""The definition of an experiment: arms that differ in a few config fields, and their evaluations.

Every other file of this directory except running.py and tables.py defines one; `launch/experiment.py NAME` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """One call of launch/eval.py, greedy unless `arguments` say otherwise."""

    sets: tuple[str, ...]  # of the closed world
    count: int = 200  # questions of each set
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transplant:
    """One call of launch/bench.py transplant, sampled: the minimal pairs with first thoughts of other questions.

    Only for arms without `arguments`, because it uses the prompt and the limits of configs/smoke.py.
    """

    count: int = 200  # questions, half of each type


@dataclass(frozen=True)
class Arm:
    """One of the compared settings."""

    fields: Mapping[str, Any] = field(default_factory=dict)  # config fields by their dotted names
    config: str = "smoke"  # a file of configs/
    trained: bool = True  # False: evaluate the cold start itself
    arguments: tuple[str, ...] = ()  # additional arguments of launch/eval.py for this arm
    steps: tuple[int, ...] = ()  # training steps after which it is evaluated as well
    corpus: int | None = None  # train with the passages of another closed world, made with this seed


@dataclass(frozen=True)
class Experiment:
    """A claim, and the runs that test it."""

    claim: str  # one sentence
    arms: Mapping[str, Arm]
    evaluations: Mapping[str, Evaluation | Transplant]
    reference: str  # the arm that the others are compared with, run by run
    figures: tuple[str, ...] = (
        "em",
        "decomposition_accuracy",
        "decomposition_ratio",
        "turns",
    )  # of `scores.summarise`
    metrics: tuple[str, ...] = ()  # of metrics.jsonl, recorded as means over a run's steps


MAIN = Evaluation(("pairs", "parallel", "sequential", "single"))
MANY = Evaluation(("many",))

"""What an experiment is: arms trained alike but for a few fields, cold starts and seeds, and what they are asked.

Every other file of this directory but running.py and tables.py declares one; `launch/experiment.py NAME` runs it.
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
class Arm:
    """One setting of what is compared."""

    fields: Mapping[str, Any] = field(default_factory=dict)  # of the config, by their dotted names
    config: str = "smoke"  # of configs/
    trained: bool = True  # else the cold start itself is evaluated
    arguments: tuple[str, ...] = ()  # of launch/eval.py, for this arm alone
    steps: tuple[int, ...] = ()  # also evaluated behind so many steps of training
    corpus: int | None = None  # the seed of another closed world, whose passages training finds instead


@dataclass(frozen=True)
class Experiment:
    """A claim, and the runs that can speak for or against it."""

    claim: str  # one sentence
    arms: Mapping[str, Arm]
    evaluations: Mapping[str, Evaluation]
    reference: str  # the arm that the others are compared with, run by run
    figures: tuple[str, ...] = ("em", "decided", "decomposition_ratio", "turns")  # of `scores.summarise`
    drawn: tuple[tuple[str, str], ...] = ()  # (evaluation/set, figure): the panels of the picture


MAIN = Evaluation(("pairs", "parallel", "sequential", "single"))
MANY = Evaluation(("many",))

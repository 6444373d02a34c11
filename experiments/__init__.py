"""The definition of an experiment: arms that differ in a few config fields, and their evaluations.

baselines.py and critical_path.py define one each; `launch/experiment.py NAME` runs it.
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
    """One of the compared settings, as changes of configs/smoke.py with the training of running.py."""

    fields: Mapping[str, Any] = field(default_factory=dict)  # config fields by their dotted names
    trained: bool = True  # False: evaluate the cold start itself
    arguments: tuple[str, ...] = ()  # additional arguments of launch/eval.py for this arm


@dataclass(frozen=True)
class Experiment:
    """A claim, and the runs that test it."""

    claim: str  # one sentence
    arms: Mapping[str, Arm]
    evaluations: Mapping[str, Evaluation]
    reference: str  # the arm that the others are compared with, run by run
    figures: tuple[str, ...] = ("em", "decomposition_accuracy", "decomposition_ratio", "turns")  # of `summarise`


MAIN = Evaluation(("pairs", "parallel", "sequential", "single"))
MANY = Evaluation(("many",))

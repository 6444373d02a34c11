"""The definition of an experiment: arms that differ in a few config fields, and their evaluations.

baselines.py, critical_path.py and real.py define one each; `launch/experiment.py NAME` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The training of every arm in the closed world, in place of the shorter one of the demo (configs/smoke.py).
TRAINING = {
    "train.prompts": 24,
    "learning.mini_batch_rollouts": 192,
    "learning.learning_rate": 3e-4,
    "learning.decay_ratio": 0.0,
    "learning.kl_coefficient": 0.001,
}
DATA = "{data}"  # in values and arguments: the directory of --data


@dataclass(frozen=True)
class Evaluation:
    """One call of launch/eval.py, greedy unless `arguments` say otherwise."""

    sets: tuple[str, ...]  # of the closed world; with --data, patterns of names in it
    count: int = 200  # questions of each set; 0: all of a file
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One of the compared settings, as changes of the experiment's config and training."""

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
    config: str = "smoke"  # the name of a file in configs/
    training: Mapping[str, Any] = field(default_factory=lambda: TRAINING)  # config fields of every arm
    needs_data: bool = False  # asks questions of --data, not of the closed world


MAIN = Evaluation(("pairs", "parallel", "sequential", "single"))
MANY = Evaluation(("many",))

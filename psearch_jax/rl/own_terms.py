"""The terms that `reward.terms` adds to the reward: functions of a user's file or module, and `OPTIONAL` ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import FunctionType

import numpy as np

from psearch_jax.config import Config
from psearch_jax.rl.rewards import TERMS, Parsed, Term, answer_recall
from psearch_jax.runtime import processes
from psearch_jax.runtime.own_code import describe_error, load_module
from psearch_jax.text.answers import f1
from psearch_jax.types import Trajectory, UserError

OPTIONAL = {"answer_recall": answer_recall, "f1": lambda t: f1(t.answer, t.question.answers)}
_ACCEPTED = f"FILE.py:FUNCTION=WEIGHT, MODULE:FUNCTION=WEIGHT, {'=WEIGHT, '.join(OPTIONAL)}=WEIGHT"
_SPEC = re.compile(r"(?:(.+):)?([^\W\d]\w*)=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def load_terms(config: Config) -> list[Term]:
    """The terms that `config.reward.terms` names, in order. Runs the code of the files and modules.

    Raises:
      UserError: the field cannot be parsed, a file cannot be loaded, or two terms have the same name.
    """
    terms: list[Term] = []
    for spec in config.reward.terms.split(",") if config.reward.terms else ():
        field, match = f"config.reward.terms={spec}", _SPEC.fullmatch(spec.strip())
        if not match or not (match[1] or match[2] in OPTIONAL):
            raise UserError(f"{field}: accepted: {_ACCEPTED}")
        source, name, weight = match[1], match[2], float(match[3])
        if name in {"total", *(term.name for term in (*TERMS, *terms)), *(OPTIONAL if source else ())}:
            raise UserError(f"{field}: another term is named {name!r}, accepted: a function with a name of its own")
        module, digest = load_module(source, "config.reward.terms") if source else (None, "")
        function = getattr(module, name, None) if source else OPTIONAL[name]
        if not inspect.isfunction(function):
            raise UserError(f"{field}: {source} has no function {name!r}, accepted: one that takes a trajectory")
        terms.append(Term(name, _weighted(function, weight, field), True, identity=f"{name}={weight} {digest}"))
    return terms


def _weighted(function: FunctionType, weight: float, field: str) -> Callable[[Sequence[Parsed], object], list[float]]:
    """`Term.compute` of a function of a trajectory; or of all of them, if its parameter is named `trajectories`.

    The first process calls it, so that all train on the same values if it is not deterministic.
    """
    by_group, file = "trajectories" in inspect.signature(function).parameters, function.__code__.co_filename

    def call(rollouts: list[Trajectory]) -> list[float]:
        try:
            results = list(function(rollouts)) if by_group and rollouts else [function(t) for t in rollouts]
            values = weight * np.asarray(results, np.float64)
        except Exception as error:
            raise UserError(f"{field}: cannot be computed: {describe_error(error, file)}") from error
        if values.shape != (len(rollouts),):
            raise UserError(f"{field}: returned values of shape {values.shape}, accepted: {len(rollouts)} numbers")
        for i in np.flatnonzero(~np.isfinite(values))[:1]:
            asked = rollouts[i].question.id
            raise UserError(f"{field}: returned {results[i]!r} for question {asked}, accepted: a finite number")
        return values.tolist()

    return lambda parsed, _: processes.broadcast(lambda: call([p.trajectory for p in parsed]))

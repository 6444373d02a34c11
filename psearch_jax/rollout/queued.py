"""Rollouts without a slot of the sampler: those that wait for their first one, and those between two policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from psearch_jax.rollout.sampler_state import Status
from psearch_jax.rollout.turns import Rollout
from psearch_jax.types import Question


@dataclass(frozen=True)
class Waiting:
    """A rollout that waits for a slot."""

    order: int  # the question's index is order // samples
    question: Question
    sample: int
    prompt: list[int]
    key: np.ndarray  # [2] uint32


@dataclass(frozen=True)
class Suspended:
    """A rollout that was taken out of its slot in the middle of a turn, with everything that continues it."""

    rollout: Rollout
    ids: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool
    logprobs: np.ndarray  # [n] float32
    key: np.ndarray  # [2] uint32
    turn_left: int
    automaton: int


def sampler_rows(placed: Mapping[int, Suspended], rows: int, positions: int) -> dict[str, np.ndarray]:
    """The sampler's state of suspended rollouts by slot, except the cache; the other slots are empty."""
    known = {"ids": np.int32, "mask": bool, "logprobs": np.float32}
    out: dict[str, np.ndarray] = {name: np.zeros((rows, positions), kind) for name, kind in known.items()}
    out |= {name: np.zeros(rows, np.int32) for name in ("length", "turn_left", "automaton", "status")}
    out["key"] = np.zeros((rows, 2), np.uint32)
    for slot, one in placed.items():
        n = out["length"][slot] = len(one.ids)
        for name in known:
            out[name][slot, :n] = getattr(one, name)
        out["turn_left"][slot], out["automaton"][slot] = one.turn_left, one.automaton
        out["key"][slot], out["status"][slot] = one.key, Status.RUNNING
    return out

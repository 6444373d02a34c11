"""Decode steps of a training run, simulated from the lengths of rollouts, without a model.

The simulation follows the rules of the sampler (when `generate` yields), the scheduler (which rollouts get a slot) and
the stream (when a batch is complete), so for the same lengths it counts the same decode steps as they do, with
`rollout.after_eos=end`: otherwise lengths do not say which replies were followed by another turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from psearch_jax.types import Trajectory


@dataclass(frozen=True)
class Lengths:
    """What a rollout costs to sample."""

    turns: tuple[int, ...]  # the tokens sampled in each turn
    waits_at_end: bool = False  # its last turn stops like one that continues, and only the host ends the rollout

    @classmethod
    def of(cls, trajectory: Trajectory, context_tokens: int) -> Lengths:
        t = trajectory
        # The sampler knows no limit of turns, and does not know that passages will not fit.
        cut_by_host = t.status == "truncated" and len(t.ids) < context_tokens
        turns = tuple(turn.n_sampled for turn in t.turns if turn.n_sampled)
        return cls(turns, t.status == "out_of_turns" or cut_by_host)


@dataclass
class _Live:
    batch: int
    turns: deque[int]  # of the turns that are not complete, the tokens still to sample
    waits_at_end: bool
    tokens: int = 0  # sampled so far


@dataclass(frozen=True)
class SampledStep:
    """What sampling costs in one training step."""

    decode_steps: int
    row_steps: int  # sum over the slots of the decode steps in which the slot's row was running
    continued_tokens: int  # sampled tokens of rollouts that were suspended before: their keys are computed again


def scaled(lengths: Sequence[Lengths], mean: float, turn_tokens: int) -> list[Lengths]:
    """The same rollouts with turns longer or shorter by one factor, so that they sample `mean` tokens on average."""
    factor = mean / np.mean([sum(one.turns) for one in lengths])
    return [
        replace(one, turns=tuple(min(turn_tokens, max(1, round(n * factor))) for n in one.turns)) for one in lengths
    ]


def simulate(
    batches: Sequence[Sequence[Lengths]], slots: int, staleness: int, yield_share: float, first: int = 0
) -> list[SampledStep]:
    """The cost of every step that learns from one of `batches`, except the last `staleness` ones.

    Args:
      batches: the rollouts of each step, in the order in which they are admitted.
      slots, yield_share: as in the config's section `rollout`.
      staleness: as `train.staleness`.
      first: the first step whose cost is returned; earlier ones fill the pipeline.
    """
    waiting: deque[_Live] = deque()
    live: list[_Live] = []
    left: dict[int, int] = {}  # batch -> rollouts that have not ended
    added, out = 0, []
    for step in range(len(batches) - staleness):
        while added <= step + staleness:
            waiting.extend(_Live(added, deque(one.turns), one.waits_at_end) for one in batches[added])
            left[added] = len(batches[added])
            added += 1
        continued = sum(one.tokens for one in live)
        decode_steps = row_steps = 0
        while left[step]:
            while waiting and len(live) < slots:
                live.append(waiting.popleft())
            waits = [len(one.turns) > 1 or one.waits_at_end or bool(waiting) for one in live]
            n = _until_yield([one.turns[0] for one in live], waits, yield_share)
            decode_steps += n
            for one in live:
                sampled = min(n, one.turns[0])
                row_steps += sampled
                one.tokens += sampled
                one.turns[0] -= sampled
                if not one.turns[0]:
                    one.turns.popleft()
            for one in [one for one in live if not one.turns]:
                live.remove(one)
                left[one.batch] -= 1
        if step >= first:
            out.append(SampledStep(decode_steps, row_steps, continued))
    return out


def _until_yield(remaining: Sequence[int], waits: Sequence[bool], yield_share: float) -> int:
    """Decode steps until `generate` returns.

    Args:
      remaining: tokens left in each row's turn.
      waits: whether the row waits for the host after that, rather than leaving an empty slot that nobody wants.
    """
    for n in sorted(set(remaining)):
        running = sum(r > n for r in remaining)
        waiting = sum(r <= n and waits for r, waits in zip(remaining, waits, strict=True))
        if not running or waiting >= yield_share * (running + waiting):
            return n
    raise AssertionError("no row is left to decode")

"""How many decode steps a rule of yielding takes, counted on the host: `launch/bench.py rollout --simulate` prints it.

The rows are those of a run of the published recipe: 2,560 rollouts over 128 slots, 1 to 5 turns of 115 ids on average
and 500 at most. At a yield, parked rows get their passages and go on, and the slots of finished rows are filled again;
with `overlap` they are searched for while the others decode, and go on at the next yield.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

SLOTS, ROLLOUTS = 128, 2560
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
RULES = ("parked", "parked or finished")  # the rows that are counted as waiting
PIECE = 16  # rows of one extension, where it is about the parked rows alone


def simulate(rule: str, share: float, overlap: bool = False, seed: int = 0) -> dict[str, Any]:
    """Yields when the waiting rows are `share` of the waiting and running ones.

    Returns:
      Row use, decode steps, yields with parked rows, and rows that were extended: when each call is about all slots,
      and when it is about pieces of `PIECE` parked rows.
    """
    rng, spread = np.random.default_rng(seed), 0.8
    turns = rng.integers(1, 6, ROLLOUTS)
    draws = rng.lognormal(np.log(115) - spread**2 / 2, spread, (ROLLOUTS, turns.max()))
    lengths = np.minimum(np.maximum(1, draws), 500).round().astype(int)
    waiting = deque(range(ROLLOUTS))
    rollout, turn, left = (np.zeros(SLOTS, int) for _ in range(3))
    live, away = np.zeros(SLOTS, bool), np.zeros(SLOTS, bool)  # holds a rollout that is not over; is searched for
    steps = sampled = calls = whole = pieces = 0
    while True:
        for b in np.flatnonzero(~live):
            if waiting:
                rollout[b], turn[b], live[b] = waiting.popleft(), 0, True
                left[b] = lengths[rollout[b], 0]
        if not live.any():
            break
        # Rows stop in the order of what is left of their turns; the first at which enough wait ends this call.
        there = live & ~away
        order = np.flatnonzero(there)[np.argsort(left[there], kind="stable")]
        ends = turn[order] + 1 == turns[rollout[order]]
        counted = ~ends if rule == "parked" or not waiting else np.ones(len(order), bool)
        stopped = np.cumsum(counted)
        running = len(order) - 1 - np.arange(len(order))
        enough = (running == 0) | (stopped >= share * (running + stopped))
        taken = left[order[np.argmax(enough)]] if len(order) else 0
        steps += taken
        sampled += int(np.minimum(left[order], taken).sum())
        left[order] -= np.minimum(left[order], taken)
        over = order[(left[order] == 0) & ends]
        parked = order[(left[order] == 0) & ~ends]
        live[over] = False
        if overlap:
            back, away[:] = np.flatnonzero(away), False
            away[parked] = True
            parked = back
        turn[parked] += 1
        left[parked] = lengths[rollout[parked], turn[parked]]
        calls += bool(len(parked))
        whole += SLOTS * bool(len(parked))
        pieces += PIECE * -(-len(parked) // PIECE)
    extended = int((turns - 1).sum())
    return {
        "rule": rule,
        "share": share,
        "overlap": overlap,
        "row_use": round(sampled / int(steps * SLOTS), 3),
        "decode_steps": int(steps),
        "extend_calls": calls,
        "extend_cost_all_slots": round(whole / extended, 2),  # rows computed per row extended
        "extend_cost_parked": round(pieces / extended, 2),
    }


def table_of_rules() -> list[dict[str, Any]]:
    rules = [(rule, share, False) for rule in RULES for share in SHARES]
    return [simulate(*rule) for rule in (*rules, *((RULES[1], share, True) for share in SHARES[2:]))]

"""Simulates on the host how many decode steps a yielding rule takes: `launch/bench.py rollout --simulate`.

The rows are those of the published recipe: 2,560 rollouts over 128 slots, with 1 to 5 turns of 115 tokens on average
and at most 500. At a yield, parked rows get their passages and continue, and the slots of finished rows are refilled.
With `overlap` the searches of parked rows run while the others decode, and the rows continue at the next yield.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

SLOTS, ROLLOUTS = 128, 2560
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
RULES = ("parked", "parked or finished")  # the rows that count as waiting
PIECE = 16  # rows per extend call, if only parked rows are extended


def simulate(rule: str, share: float, overlap: bool = False, seed: int = 0) -> dict[str, Any]:
    """Yields when the waiting rows are at least `share` of the waiting and running ones.

    Returns:
      Row use, decode steps, yields with parked rows, and rows computed per row extended: if each call extends all
      slots, and if it extends `PIECE` parked rows.
    """
    rng, spread = np.random.default_rng(seed), 0.8
    turns = rng.integers(1, 6, ROLLOUTS)
    draws = rng.lognormal(np.log(115) - spread**2 / 2, spread, (ROLLOUTS, turns.max()))
    lengths = np.minimum(np.maximum(1, draws), 500).round().astype(int)
    waiting = deque(range(ROLLOUTS))
    rollout, turn, left = (np.zeros(SLOTS, int) for _ in range(3))
    live, searching = np.zeros(SLOTS, bool), np.zeros(SLOTS, bool)  # has an unfinished rollout; waits for a search
    steps = sampled = calls = all_rows = pieces = 0
    while True:
        for b in np.flatnonzero(~live):
            if waiting:
                rollout[b], turn[b], live[b] = waiting.popleft(), 0, True
                left[b] = lengths[rollout[b], 0]
        if not live.any():
            break
        # Rows stop in the order of the remaining lengths of their turns. The call ends when enough rows wait.
        decoding = live & ~searching
        order = np.flatnonzero(decoding)[np.argsort(left[decoding], kind="stable")]
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
            returned, searching[:] = np.flatnonzero(searching), False
            searching[parked] = True
            parked = returned
        turn[parked] += 1
        left[parked] = lengths[rollout[parked], turn[parked]]
        calls += bool(len(parked))
        all_rows += SLOTS * bool(len(parked))
        pieces += PIECE * -(-len(parked) // PIECE)
    extended = int((turns - 1).sum())
    return {
        "rule": rule,
        "share": share,
        "overlap": overlap,
        "row_use": round(sampled / int(steps * SLOTS), 3),
        "decode_steps": int(steps),
        "extend_calls": calls,
        "extend_cost_all_slots": round(all_rows / extended, 2),  # rows computed per row extended
        "extend_cost_parked": round(pieces / extended, 2),
    }


def table_of_rules() -> list[dict[str, Any]]:
    rules = [(rule, share, False) for rule in RULES for share in SHARES]
    return [simulate(*rule) for rule in (*rules, *((RULES[1], share, True) for share in SHARES[2:]))]

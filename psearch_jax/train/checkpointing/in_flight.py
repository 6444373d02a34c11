"""Rollouts in flight (train.staleness) in a checkpoint, so that a resumed run continues them as if it had not stopped.

They are saved as those of all processes together. A run with another number of processes takes them up as well: the
groups are dealt out again.
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from psearch_jax.rollout.rollouts import Rollout, Suspended, Waiting
from psearch_jax.rollout.stream import InFlight
from psearch_jax.runtime import processes
from psearch_jax.train.rollout_files import (
    Arrays,
    describe,
    pack,
    parse_question,
    parse_trajectory,
    parse_turn,
    unpack,
)


def saved(own: InFlight, samples: int) -> dict[str, Any]:
    """The rollouts in flight of all processes, JSON-ready. All processes must call this.

    Args:
      own: those of this process.
      samples: rollouts per question.
    """
    parts = processes.allgather(lambda: own)
    rows = [
        ({**row, "order": _global(row["order"], samples, process, len(parts))}, arrays)
        for process, part in enumerate(parts)
        for row, arrays in _rows(part)
    ]
    batches = [
        [sum(part.batches[i].start for part in parts), sum(part.batches[i].stop for part in parts)]
        for i in range(len(own.batches))
    ]
    content = pack(rows, added=sum(part.added for part in parts), batches=batches)
    return {"rollouts": base64.b64encode(content).decode()}


def restored(record: dict[str, Any], samples: int) -> InFlight:
    """This process's part of the rollouts that `saved` returned.

    Raises:
      ValueError: the record is damaged.
    """
    rows, facts = unpack(base64.b64decode(record["rollouts"]))
    count, me = jax.process_count(), jax.process_index()
    waiting: list[Waiting] = []
    suspended: list[Suspended] = []
    results = {}
    for row, arrays in rows:
        group, sample = divmod(row["order"], samples)
        if group % count != me:
            continue
        order = group // count * samples + sample
        if row["state"] == "ended":
            results[order] = parse_trajectory(row, arrays)
            continue
        key = np.asarray(row["key"], np.uint32)
        question, prompt_length = parse_question(row["question"]), row["prompt_length"]
        if row["state"] == "waiting":
            waiting.append(Waiting(order, question, sample, arrays[0].tolist(), key))
            continue
        turns, versions = list(map(parse_turn, row["turns"])), [(int(at), int(v)) for at, v in row["versions"]]
        rollout = Rollout(order, question, sample, prompt_length, row["turn_start"], turns, versions)
        suspended.append(Suspended(rollout, *arrays, key, row["turn_left"], row["automaton"]))
    waiting.sort(key=lambda one: one.order)  # with fewer processes than before, the order of several is merged
    batches = tuple(range(start // count, stop // count) for start, stop in facts["batches"])
    return InFlight(facts["added"] // count, batches, tuple(waiting), tuple(suspended), results)


def _global(order: int, samples: int, process: int, count: int) -> int:
    """The order among the rollouts of all processes, whose groups alternate as in `processes.in_order`."""
    group, sample = divmod(order, samples)
    return (group * count + process) * samples + sample


def _rows(part: InFlight) -> list[tuple[dict[str, Any], Arrays]]:
    rows: list[tuple[dict[str, Any], Arrays]] = []
    for one in part.waiting:
        n = len(one.prompt)
        row = {"question": asdict(one.question), "prompt_length": n, "key": one.key.tolist()}
        arrays = np.asarray(one.prompt, np.int32), np.zeros(n, bool), np.zeros(n, np.float32)
        rows.append(({**row, "state": "waiting", "order": one.order}, arrays))
    for suspended in part.suspended:
        live = suspended.rollout
        row = {"question": asdict(live.question), "prompt_length": live.prompt_length, "key": suspended.key.tolist()}
        row |= {"turns": [asdict(turn) for turn in live.turns], "versions": live.versions}
        row |= {"turn_start": live.turn_start, "turn_left": suspended.turn_left, "automaton": suspended.automaton}
        arrays = suspended.ids, suspended.mask, suspended.logprobs
        rows.append(({**row, "state": "suspended", "order": live.order}, arrays))
    for order, trajectory in part.results.items():
        arrays = trajectory.ids, trajectory.mask, trajectory.logprobs
        rows.append(({**describe(trajectory), "state": "ended", "order": order}, arrays))
    return rows

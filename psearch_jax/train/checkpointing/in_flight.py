"""Rollouts in flight (train.staleness) in a checkpoint, so that a resumed run continues them as if it had not stopped.

They are saved as those of all processes together. A run with another number of processes takes them up as well: the
groups are dealt out again.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from psearch_jax.rollout.stream import InFlight
from psearch_jax.runtime import processes
from psearch_jax.train.serialise import deserialise, serialise


def gather_in_flight(local: InFlight, samples: int) -> dict[str, Any]:
    """The rollouts in flight of all processes, JSON-ready. All processes must call this.

    Args:
      local: those of this process.
      samples: rollouts per question.
    """
    parts = processes.allgather(lambda: local)
    count = len(parts)

    def renumber(part: InFlight, process: int) -> InFlight:
        """With the order among all processes, whose groups alternate as in `processes.in_order`."""
        return _renumber(part, lambda order: (order // samples * count + process) * samples + order % samples)

    renumbered = [renumber(part, process) for process, part in enumerate(parts)]
    together = InFlight(
        added=sum(part.added for part in parts),
        batches=tuple(
            range(sum(b.start for b in ranges), sum(b.stop for b in ranges))
            for ranges in zip(*(part.batches for part in parts), strict=True)
        ),
        waiting=sum((part.waiting for part in renumbered), ()),
        suspended=sum((part.suspended for part in renumbered), ()),
        results={order: trajectory for part in renumbered for order, trajectory in part.results.items()},
    )
    return {"rollouts": base64.b64encode(serialise(together)).decode()}


def restore_in_flight(record: dict[str, Any], samples: int) -> InFlight:
    """This process's part of the rollouts that `gather_in_flight` returned.

    Raises:
      ValueError: the record is damaged.
    """
    together = deserialise(InFlight, base64.b64decode(record["rollouts"]))
    count, process = jax.process_count(), jax.process_index()

    def local(order: int) -> int | None:
        group, sample = divmod(order, samples)
        return group // count * samples + sample if group % count == process else None

    part = _renumber(together, local)
    return replace(
        part,
        added=together.added // count,
        batches=tuple(range(batch.start // count, batch.stop // count) for batch in together.batches),
        waiting=tuple(sorted(part.waiting, key=lambda waiting: waiting.order)),  # of fewer processes than before
    )


def _renumber(part: InFlight, number: Callable[[int], int | None]) -> InFlight:
    """The same rollouts with other orders, without those that have none."""
    waiting, suspended = (
        tuple(replace(rollout, order=n) for rollout in rollouts if (n := number(rollout.order)) is not None)
        for rollouts in (part.waiting, part.suspended)
    )
    return replace(
        part,
        waiting=waiting,
        suspended=suspended,
        results={n: t for order, t in part.results.items() if (n := number(order)) is not None},
    )

"""How a run hears of SIGTERM, and what it keeps so that it can give up a step at any moment."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np

from psearch_jax import processes
from psearch_jax.train.state import TrainState
from retrieval.memory import available_memory

_EVERY_S = 1.0  # how often several processes ask each other; one looks at its own request every time
_MEMORY_SHARE = 0.5  # of the host memory that is free now, how much a copy of the state may take


class Interrupted(Exception):
    """SIGTERM arrived; everything is saved."""


class StopRequest:
    """SIGTERM, which asks a run to save and end.

    Attributes:
      arrived: whether it has, in this process.
    """

    arrived = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within it SIGTERM is a request."""
        before = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "arrived", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def check(self) -> None:
        """Raises Interrupted when it has arrived in this process."""
        if self.arrived:
            raise Interrupted("SIGTERM arrived")

    def watch(self) -> Callable[[], None]:
        """A function to call between pieces of device work, by all processes between the same pieces.

        It raises Interrupted in all of them when one was asked. They exchange that at the first call and then about
        every second: each call to come is an exchange or none by what all of them said at the last one.
        """
        if jax.process_count() == 1:
            return self.check
        skip, calls, last = 0, 0, float("-inf")

        def look() -> None:
            nonlocal skip, calls, last
            calls += 1
            if calls <= skip:
                return
            each = (time.monotonic() - last) / calls
            heard = processes.together(lambda: (self.arrived, each))
            if any(arrived for arrived, _ in heard):
                raise Interrupted("SIGTERM arrived")
            slowest = max(seconds for _, seconds in heard)
            skip, calls, last = int(_EVERY_S / max(slowest, 1e-3)), 0, time.monotonic()

        return look


class HostCopy:
    """This process's part of a state, in host memory: an update donates the arrays that it starts from."""

    def __init__(self, state: TrainState):
        leaves, self._structure = jax.tree.flatten(state)
        self._leaves = [
            (x.shape, x.sharding, {str(s.index): np.array(s.data) for s in _distinct_shards(x)}) for x in leaves
        ]

    def state(self) -> TrainState:
        """The state again, each array in its place."""
        leaves = [
            jax.make_array_from_callback(shape, sharding, lambda index, parts=parts: parts[str(index)])
            for shape, sharding, parts in self._leaves
        ]
        return jax.tree.unflatten(self._structure, leaves)


def room_for_copy(state: TrainState) -> bool:
    """Whether the host of every process has memory for a `HostCopy`. All processes must call it at the same point."""
    size = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in _distinct_shards(x))
    told = processes.together(lambda: (socket.gethostname(), size, available_memory()))
    hosts = {host for host, _, _ in told}
    return all(_fits([(n, free) for other, n, free in told if other == host]) for host in hosts)


def _fits(on_one_host: Sequence[tuple[int, int]]) -> bool:
    """Whether all processes of a host find room, by the bytes that each needs and those that it finds available."""
    return sum(n for n, _ in on_one_host) <= _MEMORY_SHARE * min(free for _, free in on_one_host)


def _distinct_shards(x: jax.Array) -> list:
    return list({str(s.index): s for s in x.addressable_shards}.values())

"""SIGTERM and Ctrl-C, and a host copy of the state so that a step can be abandoned at any moment."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np

from psearch_jax.runtime import processes
from psearch_jax.train.state import TrainState
from retrieval.memory import available_memory

_EVERY_S = 1.0  # interval between exchanges of several processes; a single process checks at every call
_MEMORY_SHARE = 0.5  # of the available host memory that copies of the state may take


class Interrupted(Exception):
    """SIGTERM or Ctrl-C arrived. Raised by a training run, its message is `saved_after` the last saved step."""


def saved_after(step: int | None) -> str:
    """What is on disk and what the same command does, for messages; 0 or None: nothing is saved."""
    if step:
        return f"saved after step {step}; the same command resumes"
    return "nothing is saved yet; the same command starts again"


class StopRequest:
    """A request by SIGTERM, or by the SIGINT of Ctrl-C, to save and exit.

    Attributes:
      arrived: whether this process has received it.
      by_user: whether it was Ctrl-C.
    """

    arrived = by_user = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside the block, SIGTERM and the first SIGINT set `arrived` instead of ending the process."""

        def note(number: int, _: object) -> None:
            self.arrived = True
            if number == signal.SIGINT:
                self.by_user = True
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # Not `print`: it fails if the signal arrives while the same stream is being written.
                os.write(2, b"stopping as soon as the run is saved; Ctrl-C again stops without saving\n")

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def check(self) -> None:
        """Raises Interrupted if this process has been asked to stop."""
        if self.arrived:
            raise Interrupted("asked to stop")

    def checker(self) -> Callable[[], None]:
        """A function for all processes to call between the same pieces of device work.

        It raises Interrupted in all processes once one has been asked to stop. They exchange this at the first call
        and then about every second: each exchange sets the number of calls to skip, the same in all processes.
        """
        if jax.process_count() == 1:
            return self.check
        skip, calls, last = 0, 0, float("-inf")

        def check() -> None:
            nonlocal skip, calls, last
            calls += 1
            if calls <= skip:
                return
            interval = (time.monotonic() - last) / calls
            reports = processes.allgather(lambda: (self.arrived, interval))
            if any(arrived for arrived, _ in reports):
                raise Interrupted("asked to stop")
            slowest = max(seconds for _, seconds in reports)
            skip, calls, last = int(_EVERY_S / max(slowest, 1e-3)), 0, time.monotonic()

        return check


class HostCopy:
    """A host-memory copy of this process's shards of a state, whose device arrays the update donates.

    The transfers of all shards start at once and run next to other work. `wait` must be called before the donation.
    """

    def __init__(self, state: TrainState):
        leaves, self._structure = jax.tree.flatten(state)
        self._leaves = [(x.shape, x.sharding, {str(s.index): s.data for s in _distinct_shards(x)}) for x in leaves]
        for _, _, parts in self._leaves:
            for part in parts.values():
                part.copy_to_host_async()

    def wait(self) -> None:
        """Waits for the transfers, and lets go of the device arrays."""
        for _, _, parts in self._leaves:
            for index, part in parts.items():
                parts[index] = np.array(part)

    def state(self) -> TrainState:
        """The state on the devices, with its original shardings."""
        leaves = [
            jax.make_array_from_callback(shape, sharding, lambda index, parts=parts: parts[str(index)])
            for shape, sharding, parts in self._leaves
        ]
        return jax.tree.unflatten(self._structure, leaves)


def room_for_copy(state: TrainState) -> bool:
    """Whether every host has memory for its processes' `HostCopy`s. All processes must call it at the same point."""
    size = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in _distinct_shards(x))
    reports = processes.allgather(lambda: (socket.gethostname(), size, available_memory()))
    hosts = {host for host, _, _ in reports}
    return all(_fits([(n, free) for other, n, free in reports if other == host]) for host in hosts)


def _fits(on_one_host: Sequence[tuple[int, int]]) -> bool:
    """Whether the copies of one host's processes fit, from (bytes needed, bytes available) of each."""
    return sum(n for n, _ in on_one_host) <= _MEMORY_SHARE * min(free for _, free in on_one_host)


def _distinct_shards(x: jax.Array) -> list:
    return list({str(s.index): s for s in x.addressable_shards}.values())

"""SIGTERM and Ctrl-C: a run is asked to save and exit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from psearch_jax.runtime import processes

_EVERY_S = 1.0  # interval between exchanges of several processes; a single process checks at every call


class Interrupted(Exception):
    """SIGTERM or Ctrl-C arrived. Raised by a training run, its message is `describe_saved` the last saved step."""


def describe_saved(step: int | None) -> str:
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
    def listen(self) -> Iterator[None]:
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

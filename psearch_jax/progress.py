"""Progress of work that takes longer than a few seconds, on stderr: a line that is rewritten, or lines in a log.

A program shows it (`show`, in launching.run); the library reports it wherever it works, and nothing comes of that in
tests and notebooks. One step is shown at a time, the innermost.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

FIRST_S = 0.4  # on a terminal a step is shown from then on
PATIENT_S = 20.0  # the same for what is repeated and mostly short, such as the parts of a training step
TERMINAL_S, LOG_S = 0.2, 4.0  # seconds between two lines; in a log each interval is twice the last, up to
LOG_MOST_S = 120.0
CLEAR = "\r\x1b[2K"


@dataclass
class _Step:
    name: str
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        counted = f" {self.done} of {self.total}," if self.total else ""
        return f"{self.name}:{counted} {time.monotonic() - self.began:.0f} s"


_steps: list[_Step] = []  # that are under way, the innermost last
_lock = threading.Lock()
_stream: IO[str] | None = None
_drawn = False  # the terminal's last line is a step's


def show(stream: IO[str] | None = None) -> None:
    """Shows steps from now on, by default on stderr."""
    global _stream
    with _lock:
        _stream = stream or sys.stderr


@contextmanager
def step(name: str, total: int = 0, patient: bool = False) -> Iterator[None]:
    """Shows that the block is under way, and for how long; with `total`, also how much of it `advance` has counted.

    A `patient` step is shown only when it takes longer than most do.
    """
    began = _Step(name, total=total)
    over = threading.Event()
    with _lock:
        _steps.append(began)
        stream = _stream
    if stream is not None:
        threading.Thread(target=_report, args=(began, over, stream, patient), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        with _lock:
            _steps.remove(began)
            _clear()


def advance(count: int = 1) -> None:
    """Counts `count` more of what the innermost step consists of."""
    with _lock:
        if _steps:
            _steps[-1].done += count


def reach(count: int) -> None:
    """Sets what the innermost step has done to `count`."""
    with _lock:
        if _steps:
            _steps[-1].done = count


def _report(shown: _Step, over: threading.Event, stream: IO[str], patient: bool) -> None:
    """Writes the step's line until it is over, except while a step inside it is under way."""
    global _drawn
    terminal, interval = stream.isatty(), LOG_S
    wait = PATIENT_S if patient else FIRST_S if terminal else LOG_S
    while not over.wait(wait):
        wait = TERMINAL_S if terminal else interval
        interval = min(2 * interval, LOG_MOST_S)
        with _lock:
            if over.is_set() or _steps[-1] is not shown or _stream is not stream:
                continue
            stream.write(f"{CLEAR}{shown}" if terminal else f"{shown}\n")
            stream.flush()
            _drawn = terminal


def _clear() -> None:
    """Removes a step's line from the terminal; with the lock held."""
    global _drawn
    if _drawn and _stream is not None:
        _stream.write(CLEAR)
        _stream.flush()
    _drawn = False

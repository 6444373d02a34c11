"""Progress of work that takes longer than a few seconds: one rewritten line on a terminal, or lines in a log.

The library reports progress everywhere, but it is shown only after `show`, which cli.run calls; tests and
notebooks stay silent. Only the innermost step is shown.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

FIRST_S = 0.4  # seconds before a step is shown on a terminal
PATIENT_S = 20.0  # the same for steps that are repeated and mostly short, such as the parts of a training step
TERMINAL_S, LOG_S = 0.2, 4.0  # seconds between two lines; in a log, the interval doubles up to LOG_MOST_S
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
        seconds = time.monotonic() - self.began
        left = seconds * (self.total - self.done) / self.done if 0 < self.done < self.total else 0.0
        return f"{self.name}:{counted} {seconds:.0f} s" + (f", about {left:.0f} s left" if left else "")


_steps: list[_Step] = []  # the steps in progress, the innermost last
_lock = threading.Lock()
_stream: IO[str] | None = None
_drawn = False  # whether the last line on the terminal shows a step


def show(stream: IO[str] | None = None) -> None:
    """Enables the display of steps, by default on stderr."""
    global _stream
    with _lock:
        _stream = stream or sys.stderr


@contextmanager
def step(name: str, total: int = 0, patient: bool = False) -> Iterator[None]:
    """Shows that the block is running, and for how long; with `total`, also the count of `advance` and `reach`.

    A `patient` step is shown only after PATIENT_S seconds.
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
    """Adds `count` to the finished units of the innermost step."""
    with _lock:
        if _steps:
            _steps[-1].done += count


def reach(count: int) -> None:
    """Sets the finished units of the innermost step to `count`."""
    with _lock:
        if _steps:
            _steps[-1].done = count


def _report(current: _Step, over: threading.Event, stream: IO[str], patient: bool) -> None:
    """Writes the line of the step until the step ends, except while a step inside it is running."""
    global _drawn
    terminal, interval = stream.isatty(), LOG_S
    wait = PATIENT_S if patient else FIRST_S if terminal else LOG_S
    while not over.wait(wait):
        wait = TERMINAL_S if terminal else interval
        interval = min(2 * interval, LOG_MOST_S)
        with _lock:
            if over.is_set() or _steps[-1] is not current or _stream is not stream:
                continue
            stream.write(f"{CLEAR}{current}" if terminal else f"{current}\n")
            stream.flush()
            _drawn = terminal


def _clear() -> None:
    """Removes the line of a step from the terminal. The caller holds the lock."""
    global _drawn
    if _drawn and _stream is not None:
        _stream.write(CLEAR)
        _stream.flush()
    _drawn = False

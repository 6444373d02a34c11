"""Progress of slow steps: lines in a log, one line that is rewritten on a terminal, or nothing."""

import io
import re
import time

import pytest

from psearch_jax.runtime import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    """Steps appear after milliseconds, on the stream that a test passes to `show`; afterwards nothing is shown."""
    for name in ("FIRST_S", "TERMINAL_S", "LOG_S"):
        monkeypatch.setattr(progress, name, 0.02)
    monkeypatch.setattr(progress, "_stream", None)


def wait_for(stream, text):
    until = time.monotonic() + 20
    while text not in stream.getvalue():
        assert time.monotonic() < until, stream.getvalue()
        time.sleep(0.005)


def test_a_log_gets_lines_with_counts_and_seconds(quick):
    """A log gets lines with counts and seconds; only the innermost step is shown, and nothing after the end."""
    log = io.StringIO()
    progress.show(log)
    with progress.step("loading weights", 3):
        progress.advance(2)
        wait_for(log, "loading weights: 2 of 3, 0 s, about ")
        with pytest.raises(ZeroDivisionError), progress.step("inner"):
            wait_for(log, "inner")
            raise ZeroDivisionError
    before, _, _ = log.getvalue().partition("inner")
    assert all(
        re.fullmatch(r"loading weights: [02] of 3, \d+ s(, about \d+ s left)?", line) for line in before.splitlines()
    )
    assert not progress._steps


def test_a_log_of_hours_stays_short_and_short_steps_stay_out_of_it(quick, monkeypatch):
    """Short patient steps are not logged, and the interval between lines doubles."""
    monkeypatch.setattr(progress, "PATIENT_S", 0.1)
    log = io.StringIO()
    progress.show(log)
    for _ in range(3):
        with progress.step("update", 2, patient=True):
            progress.reach(1)
    with progress.step("rollouts", 48, patient=True):
        progress.reach(7)
        wait_for(log, "rollouts: 7 of 48, 0 s, about ")
        time.sleep(1.0)
    assert "update" not in log.getvalue() and 3 <= log.getvalue().count("\n") <= 8


def test_a_terminal_keeps_one_line_that_is_gone_at_the_end(quick):
    """A terminal shows one line that is rewritten and removed at the end."""
    terminal = Terminal()
    progress.show(terminal)
    with progress.step("starting"):
        wait_for(terminal, "starting: 0 s")
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith(progress.CLEAR)

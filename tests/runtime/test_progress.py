"""Progress of slow steps: lines in a log, one line that is rewritten on a terminal, or nothing."""

import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from programs import ROOT

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
    """A log that stays silent for the minutes that loading large weights takes, or fills with carriage returns."""
    log = io.StringIO()
    progress.show(log)
    with progress.step("loading weights", 3):
        progress.advance(2)
        wait_for(log, "loading weights: 2 of 3, 0 s\n")
    assert all(re.fullmatch(r"loading weights: [02] of 3, \d+ s", line) for line in log.getvalue().splitlines())


def test_a_log_of_hours_stays_short_and_short_steps_stay_out_of_it(quick, monkeypatch):
    """Two lines for every one-second training step, or a line every four seconds in a step of ten minutes."""
    monkeypatch.setattr(progress, "PATIENT_S", 0.1)
    log = io.StringIO()
    progress.show(log)
    for _ in range(3):
        with progress.step("update", 2, patient=True):
            progress.reach(1)
    with progress.step("rollouts", 48, patient=True):
        progress.reach(7)
        wait_for(log, "rollouts: 7 of 48, 0 s\n")
        time.sleep(1.0)
    assert "update" not in log.getvalue() and 3 <= log.getvalue().count("\n") <= 8


def test_a_terminal_keeps_one_line_that_is_gone_at_the_end(quick):
    """A terminal that fills with progress lines, or a last line that stays in front of the answer."""
    terminal = Terminal()
    progress.show(terminal)
    with progress.step("starting"):
        wait_for(terminal, "starting: 0 s")
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith(progress.CLEAR)


def test_only_the_innermost_step_is_shown(quick):
    """Two steps that alternately overwrite each other's lines."""
    log = io.StringIO()
    progress.show(log)
    with progress.step("outer"):
        wait_for(log, "outer")
        with progress.step("inner"):
            wait_for(log, "inner")
            assert "outer" not in log.getvalue().partition("inner")[2]


def test_nothing_is_shown_unless_a_program_asks_for_it(quick, capfd):
    """A library that writes to the stderr of tests and notebooks, or a failed step that stays active."""
    with pytest.raises(ZeroDivisionError), progress.step("loading"):
        time.sleep(0.1)
        raise ZeroDivisionError
    progress.advance()
    assert capfd.readouterr() == ("", "") and not progress._steps


def test_a_user_at_a_terminal_sees_that_the_policy_is_being_loaded():
    """A terminal that stays empty for more than a few seconds looks like a program that hangs."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "launch/ask.py", "What is the setting of Gamudol?"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    program = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the program has closed its end
            break
        if not chunk:
            break
        output += chunk
    assert program.wait(600) == 0 and b"answer: " in program.stdout.read()
    assert b"starting: " in output or b"compiling: " in output, output

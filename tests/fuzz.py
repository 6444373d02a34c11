"""Fuzzes one property test, guided by code coverage: `python tests/fuzz.py FILE::TEST [libFuzzer flags]`.

    .venv/bin/python tests/fuzz.py tests/hostile/test_hostile.py::test_corpora_are_read_or_refused -max_total_time=600

Hypothesis samples examples without feedback. atheris mutates the bytes that examples are made from, and keeps those
that reach new lines of psearch_jax and retrieval. The test gets its fixtures from pytest. Fuzzing runs until a limit
is reached (`-runs=`, `-max_total_time=` in seconds) or the test fails. On a failure the exit code is 77, and the bytes
are saved to a file whose name is printed: `python tests/fuzz.py FILE::TEST THAT_FILE` reproduces the failure.
"""

import functools
import inspect
import sys
from pathlib import Path

import atheris
import pytest


class Fuzz:
    """Runs the one collected property test on inputs from atheris."""

    def __init__(self, flags: list[str]):
        self._flags = flags

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Refuses anything but one property test."""
        if len(items) != 1 or not hasattr(items[0].obj, "hypothesis"):
            raise pytest.UsageError(f"{len(items)} tests found, accepted: one that hypothesis draws for")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> None:
        """Does not return: libFuzzer ends the process."""
        drawn_for = pyfuncitem.obj.hypothesis
        test = drawn_for.inner_test
        fixtures = {n: value for n, value in pyfuncitem.funcargs.items() if n in inspect.signature(test).parameters}

        @functools.wraps(test)
        def with_fixtures(*args, **drawn):
            test(*args, **fixtures, **drawn)

        drawn_for.inner_test, pyfuncitem.obj.__signature__ = with_fixtures, inspect.Signature()
        # Inputs shorter than the test consumes give no example, so lengths must not start at one byte. No limit of
        # memory: libFuzzer compares it with the peak that Linux reports, which a process inherits from its parent.
        atheris.Setup([sys.argv[0], "-len_control=0", "-rss_limit_mb=0", *self._flags], drawn_for.fuzz_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for configs/, as `python -m pytest` does
    with atheris.instrument_imports(include=["psearch_jax", "retrieval"]):
        sys.exit(pytest.main([sys.argv[1], "-q", "-s", "-p", "no:cacheprovider"], [Fuzz(sys.argv[2:])]))

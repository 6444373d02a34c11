"""Fuzzes one property test, led by the code that is reached: `python tests/fuzz.py FILE::TEST [libFuzzer's flags]`.

    .venv/bin/python tests/fuzz.py tests/test_hostile.py::test_corpora_are_read_or_refused -max_total_time=600

Where hypothesis draws examples blindly, atheris changes the bytes that examples are made of, and keeps those that
reach lines of psearch_jax and retrieval that no other did. The test gets its fixtures from pytest. It goes on until a
limit is reached (`-runs=`, `-max_total_time=`: seconds) or the test fails; then the exit code is 77, and the bytes lie
in a file that is named, with which the failure comes again: `python tests/fuzz.py FILE::TEST THAT_FILE`.
"""

import functools
import inspect
import sys
from pathlib import Path

import atheris
import pytest


class Fuzz:
    """Calls the one property test that was collected with what atheris draws."""

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
        # Of fewer bytes than a test draws from comes no example: their number is not to grow from one on.
        atheris.Setup([sys.argv[0], "-len_control=0", *self._flags], drawn_for.fuzz_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for configs/, as `python -m pytest` does
    with atheris.instrument_imports(include=["psearch_jax", "retrieval"]):
        sys.exit(pytest.main([sys.argv[1], "-q", "-s", "-p", "no:cacheprovider"], [Fuzz(sys.argv[2:])]))

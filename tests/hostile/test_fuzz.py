"""`tests/fuzz.py`: the property tests under atheris, in separate processes."""

import re
import subprocess
import sys

import pytest
from programs import ROOT

pytest.importorskip("atheris", reason="atheris is not installed: it has wheels for x86-64 Linux alone")
pytestmark = pytest.mark.slow

PLANTED = """
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.text import tags


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "<search>", "</search>", "Ada"]), max_size=9))
def test_nobody_ever_answers(parts):
    assert tags.parse_turn(" ".join(parts)).kind != "answer"
"""


def fuzz(test, *flags, cwd):
    command = [sys.executable, ROOT / "tests" / "fuzz.py", test, *flags]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_a_planted_fault_is_found_and_comes_again(tmp_path):
    """A fuzzer whose inputs never reach the code, or whose failures cannot be reproduced, always passes."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    crash = fuzz("test_planted.py", "-runs=200000", "-seed=1", cwd=tmp_path)
    assert crash.returncode == 77 and "AssertionError" in crash.stderr + crash.stdout
    (crash_file,) = tmp_path.glob("crash-*")
    again = fuzz("test_planted.py", crash_file.name, cwd=tmp_path)
    assert again.returncode == 77 and "AssertionError" in again.stderr + again.stdout
    no_runs = fuzz("test_planted.py", "-runs=0", cwd=tmp_path)
    assert no_runs.returncode == 0


def test_fixtures_come_from_pytest_and_lines_of_ours_lead(tmp_path):
    """Without coverage of the package, fuzzing is the same as hypothesis, only slower."""
    test = f"{ROOT}/tests/hostile/test_hostile.py::test_corpora_are_read_or_refused"
    done = fuzz(test, "-runs=300", "-seed=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done 300 runs" in done.stderr and int(re.findall(r"cov: (\d+)", done.stderr)[-1]) > 20


def test_what_hypothesis_does_not_draw_for_is_refused(tmp_path):
    """A test that does not use hypothesis would be called once, and pass."""
    (tmp_path / "test_plain.py").write_text("def test_something():\n    pass\n")
    refused = fuzz("test_plain.py", "-runs=1", cwd=tmp_path)
    assert refused.returncode == 4 and "accepted: one that hypothesis draws for" in refused.stderr

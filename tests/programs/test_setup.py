"""setup.py, tests/lock.txt and the Makefile: requirements, the versions last tested with, and what is installed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from programs import ROOT, copied, tracked

LOCKED = [
    Requirement(line.split(" #")[0])
    for line in (ROOT / "tests" / "lock.txt").read_text().splitlines()
    if line and not line.startswith((" ", "#"))
]


@pytest.fixture
def arguments(monkeypatch) -> dict[str, Any]:
    """What setup.py passes to setuptools."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", passed.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return passed


@pytest.fixture
def asked(arguments) -> list[Requirement]:
    """The requirements of setup.py for running the tests."""
    return [Requirement(line) for line in (*arguments["install_requires"], *arguments["extras_require"]["test"])]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_holds_what_is_asked_for(asked, python):
    """A dependency added, or its bound raised, without updating the versions of `make test LOCKED=1`."""
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    environment |= {"platform_machine": "x86_64", "platform_python_implementation": "CPython", "extra": ""}
    locked: dict[str, str] = {}
    for one in LOCKED:
        if one.marker is None or one.marker.evaluate(environment):
            (pin,) = one.specifier
            assert pin.operator == "==" and locked.setdefault(canonicalize_name(one.name), pin.version) == pin.version
    applicable = [one for one in asked if one.marker is None or one.marker.evaluate(environment)]
    assert len(applicable) > 40
    for one in applicable:
        assert Version(locked[canonicalize_name(one.name)]) in one.specifier, one


def test_the_lock_names_no_place():
    """A file or an index of the machine where the lock was made, which exists nowhere else."""
    assert all(one.url is None for one in LOCKED) and len(LOCKED) > 150


def test_a_release_has_one_version(arguments):
    """The citation or the changelog names another version than the one that is installed."""
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    changed = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert cited == changed == arguments["version"]


@pytest.mark.parametrize(
    ("target", "installed"),
    [("demo", ["."]), ("controls", ["."]), ("lint", [".", ".[test]"]), ("test", [".", ".[test]"])],
)
@pytest.mark.parametrize("locked", [False, True])
def test_a_user_does_not_install_the_test_packages(target, installed, locked, tmp_path):
    """`make demo` installs gigabytes of test packages, `make test` lacks them, or LOCKED=1 ignores the lock."""
    copied(["Makefile", "setup.py", "tests/lock.txt"], tmp_path)
    words = ["make", "--dry-run", target, *(["LOCKED=1"] if locked else [])]
    # Not the environment of a `make test` that runs this test.
    done = subprocess.run(words, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    constraint = r"-c tests/lock\.txt " if locked else ""
    assert re.findall(rf"/pip install --quiet +{constraint}-e '?([^'\s]+)", done.stdout) == installed, done.stdout


# ---- an installation without the checkout ----


@pytest.fixture(scope="module")
def installation(tmp_path_factory) -> Path:
    """The project as pip installs it, without its requirements."""
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("installation")
    parts = ("configs/", "launch/", "psearch_jax/", "retrieval/", "setup.py", "pyproject.toml", "README.md")
    copied((name for name in tracked() if name.startswith(parts)), copy)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, f"--target={target}", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return target


def run_command(installation: Path, words: Sequence[str], code: Path, folder: Path) -> subprocess.CompletedProcess:
    """Runs a command in `folder` with the code in `code`: the installation, or a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(code)}
    command = [str(installation / "bin" / words[0]), *words[1:]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_an_installation_is_complete(installation):
    """A template, a page or py.typed is missing from package_data, or a program has no command."""
    names = [name for name in tracked() if name.startswith(("psearch_jax/", "retrieval/"))]
    assert len(names) > 150 and not [name for name in names if not (installation / name).is_file()]
    programs = {path.stem for path in (ROOT / "launch").glob("*.py")} - {"bench", "experiment"}
    commands = {f"psearch-{name.replace('_', '-')}" for name in programs}
    assert {path.name for path in (installation / "bin").iterdir()} == commands


@pytest.mark.parametrize("place", ["installed", "checkout"])
def test_a_command_has_the_flags_of_its_program(installation, place, tmp_path):
    """The program is not found, or absl takes another module for the program: its flags are not listed or accepted."""
    code = installation if place == "installed" else ROOT
    printed = run_command(installation, ["psearch-build-index", "--help"], code, tmp_path).stdout
    assert "--corpus" in printed and "launch/build_index.py" in printed
    words = ["psearch-build-index", "--corpus=absent.jsonl", "--encoder=hashing", "--out=index"]
    refused = run_command(installation, words, code, tmp_path)
    assert refused.returncode == 2 and refused.stderr.startswith("build_index: absent.jsonl"), refused.stderr[-2000:]


@pytest.mark.slow
def test_a_command_answers_without_the_checkout(installation, tmp_path):
    """The toy policy's recipe is looked up in a checkout, so that the command works only there."""
    question = "Are the setting of Gamudol and the rival of Pujazas the same?"
    done = run_command(installation, ["psearch-ask", "--json", question], installation, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["status"] == "answered"

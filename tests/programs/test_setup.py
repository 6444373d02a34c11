"""setup.py and tests/lock.txt: the requirements, and the versions that the tests last passed with."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKED = [
    Requirement(line.split(" #")[0])
    for line in (ROOT / "tests" / "lock.txt").read_text().splitlines()
    if line and not line.startswith((" ", "#"))
]


@pytest.fixture
def asked(monkeypatch) -> list[Requirement]:
    """The requirements of setup.py for running the tests."""
    arguments: dict = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
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

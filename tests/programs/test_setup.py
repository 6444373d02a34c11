"""setup.py and the Makefile: what is installed for whom, and that an installation works without the checkout."""

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
from programs import ROOT, copied, refusal, tracked


@pytest.fixture
def arguments(monkeypatch) -> dict[str, Any]:
    """What setup.py passes to setuptools."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", passed.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return passed


def test_a_release_has_one_version(arguments):
    """Citation, changelog and setup.py name the same version."""
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    changed = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert cited == changed == arguments["version"]


def test_the_image_contains_what_its_command_needs():
    """The Dockerfile copies only folders that .dockerignore keeps, and starts a program with flags that it accepts."""
    text = (ROOT / "launch" / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    sources = {line.split()[1] for line in text.splitlines() if line.startswith("COPY ")}
    kept = {rule[1:] for rule in (ROOT / ".dockerignore").read_text().splitlines() if rule.startswith("!")}
    assert sources == kept == {"setup.py", "configs", "retrieval", "psearch_jax", "launch"}
    command = json.loads(re.search(r"^CMD (\[.*\])", text, re.MULTILINE)[1])
    assert command[0] == "python" and refusal(command[1:]) == ""


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
    """Templates, pages and py.typed are installed, and every program has a command."""
    names = [name for name in tracked() if name.startswith(("psearch_jax/", "retrieval/"))]
    assert len(names) > 150 and not [name for name in names if not (installation / name).is_file()]
    programs = {path.stem for path in (ROOT / "launch").glob("*.py")} - {"bench", "experiment"}
    commands = {f"psearch-{name.replace('_', '-')}" for name in programs}
    assert {path.name for path in (installation / "bin").iterdir()} == commands


@pytest.mark.parametrize("place", ["installed", "checkout"])
def test_a_command_has_the_flags_of_its_program(installation, place, tmp_path):
    """A command lists and accepts the flags of its program."""
    code = installation if place == "installed" else ROOT
    printed = run_command(installation, ["psearch-build-index", "--help"], code, tmp_path).stdout
    assert "--corpus" in printed and "launch/build_index.py" in printed
    words = ["psearch-build-index", "--corpus=absent.jsonl", "--encoder=hashing", "--out=index"]
    refused = run_command(installation, words, code, tmp_path)
    assert refused.returncode == 2 and refused.stderr.startswith("build_index: absent.jsonl"), refused.stderr[-2000:]


@pytest.mark.slow
def test_a_command_answers_without_the_checkout(installation, tmp_path):
    """The toy policy answers without a checkout."""
    question = "Are the setting of Gamudol and the rival of Pujazas the same?"
    done = run_command(installation, ["psearch-ask", "--json", question], installation, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["status"] == "answered"

"""An installation works without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from programs import ROOT, copied, tracked


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


def run_command(installation: Path, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess:
    """Runs an installed command in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(installation)}
    command = [str(installation / "bin" / words[0]), *words[1:]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_an_installation_is_complete(installation):
    """Templates, pages and py.typed are installed, and every program has a command."""
    names = [name for name in tracked() if name.startswith(("psearch_jax/", "retrieval/"))]
    assert len(names) > 150 and not [name for name in names if not (installation / name).is_file()]
    programs = {path.stem for path in (ROOT / "launch").glob("*.py")} - {"bench", "experiment"}
    commands = {f"psearch-{name.replace('_', '-')}" for name in programs}
    assert {path.name for path in (installation / "bin").iterdir()} == commands


def test_a_command_has_the_flags_of_its_program(installation, tmp_path):
    words = ["psearch-build-index", "--corpus=absent.jsonl", "--encoder=hashing", "--out=index"]
    refused = run_command(installation, words, tmp_path)
    assert refused.returncode == 2 and refused.stderr.startswith("build_index: absent.jsonl"), refused.stderr[-2000:]


@pytest.mark.slow
def test_a_command_answers_without_the_checkout(installation, tmp_path):
    """The toy policy answers without a checkout."""
    question = "Are the setting of Gamudol and the rival of Pujazas the same?"
    done = run_command(installation, ["psearch-ask", "--json", question], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["status"] == "answered"

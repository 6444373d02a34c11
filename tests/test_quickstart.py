"""docs/quickstart.md as a newcomer meets it: typed from top to bottom, in a clone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from programs import ROOT, copied, tracked

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
QUICK = {
    "train.steps": 1,
    "train.prompts": 6,
    "rollout.slots": 48,
    "learning.mini_batch_rollouts": 48,
    "eval.questions_per_kind": 8,
}


@pytest.mark.slow
def test_the_newcomers_path(tmp_path):
    """From the clone to an export and a question to it: a step that needs what an earlier one did not leave.

    The demo takes one step instead of sixty; all else is typed as it stands.
    """
    clone = tmp_path / "clone"
    copied(tracked(), clone)
    python = clone / ".venv" / "bin" / "python"  # this one, as if `make` had installed all of it
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (clone / ".venv" / ".installed").touch()
    environment = {**os.environ, "PYTHONPATH": str(clone)}

    def typed(kind: str, block: str) -> str:
        commands = [["bash", "-c", line] for line in block.replace("\\\n", "").splitlines()]
        commands = [[sys.executable, "-c", block]] if kind == "python" else commands
        said = ""
        for command in commands:
            done = subprocess.run(
                command, cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-4000:])
            said += done.stdout
        return said

    demo, asked, own, trained, _ = BLOCKS
    typed(demo[0], f"{demo[1].strip()} ARGS='{' '.join(f'--config.{name}={value}' for name, value in QUICK.items())}'")
    assert "search_r1:" in typed(*asked)
    typed(*own)
    assert len((clone / "corpus.jsonl").read_text().splitlines()) == 20 == len(list((clone / "texts").iterdir()))
    said = typed(*trained)
    assert re.search(r"^answer: (Vivifor|Nuhojun)$", said, re.MULTILINE), said[-2000:]
    (found,) = json.loads((clone / "results" / "results.json").read_text())["benchmarks"].values()
    assert found["all"]["em"] > 0.6, found  # a guess between two: .5 of 45, and nothing of the 10 years
    assert (clone / "report.html").stat().st_size > 1e6

"""docs/own.md: every code block for a user's own data, prompt, reward or retriever works as described."""

import json
import os
import re
import subprocess
import sys

import pytest
from programs import ROOT, completed

PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_every_block_runs(tmp_path, wordy_policy):
    """A user's corpus, questions, prompt, reward or retriever is refused, or accepted and not used."""
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"note_{i}.txt").write_text(f"The note {i} was written by Ada.")
    script = "\n".join(PYTHON).replace('settings("MODEL")', f'settings("{wordy_policy}")')
    assert str(wordy_policy) in script and len(PYTHON) == 4
    check = """
from psearch_jax.types import UserError
run = build.training_run(replace(given, retrieval=replace(given.retrieval, corpus="corpus.jsonl")))
run.settings["reward.own"] = "another price"
try:
    trainer.train(run, "runs/priced")
    raise SystemExit("a resume with another reward was not refused")
except UserError as refused:
    assert "reward.own" in str(refused), refused
"""
    (tmp_path / "own.py").write_text(script + check)
    done = subprocess.run(
        [sys.executable, "own.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "corpus.jsonl").read_text().splitlines()) == 20
    for name in ("priced", "titles"):
        rows = [json.loads(line) for line in open(tmp_path / "runs" / name / "trajectories" / "000000.jsonl")]
        assert len(rows) == 8 and all("librarian" in row["prompt"] for row in rows if "prompt" in row)


def test_the_index_is_built_as_the_page_says(tmp_path):
    """The first command that users run on their own corpus fails."""
    row = {"id": "note_1", "title": "note 1", "text": "The note 1 was written by Ada."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row) + "\n")
    command = next(line for line in PAGE.splitlines() if line.startswith("python launch/build_index.py")).split()[1:]
    words = [
        w.replace("=corpus.jsonl", f"={tmp_path}/corpus.jsonl").replace("=index", f"={tmp_path}/index")
        for w in command
    ]
    done = completed([sys.executable, *words])
    assert done.returncode == 0 and (tmp_path / "index" / "manifest.json").is_file(), done.stderr[-2000:]

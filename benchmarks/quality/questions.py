"""`launch/bench.py questions`: time and memory of a large question set, as a file and as a prepared directory.

It measures preparing the set, and loading it up to a training run's first batch, each in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psearch_jax.runtime.paths import write_atomically

ROOT = Path(__file__).resolve().parents[2]
PREPARE = """
from psearch_jax.data.prepared import prepare

prepare([("set", sys.argv[1])], "train", sys.argv[2])
"""
FIRST_BATCH = """
from psearch_jax.data.loader import QuestionLoader
from psearch_jax.data.prepared import open_questions

questions = open_questions(sys.argv[1])
next(QuestionLoader(questions, 512, 0, fingerprint=getattr(questions, "fingerprint", None)))
"""
HEAD = "import json, resource, sys, time\nstart = time.perf_counter()\n"
TAIL = """
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": round(time.perf_counter() - start, 1), "peak_mb": round(peak)}))
"""


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench questions", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of questions")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        file, prepared = f"{folder}/questions.jsonl", f"{folder}/prepared"
        with open(file, "w", encoding="utf-8") as out:
            for row in range(flags.rows):
                out.write(json.dumps(_question(row)) + "\n")
        figures = {
            "rows": flags.rows,
            "prepare": _measure(PREPARE, file, prepared),
            "first batch, prepared": _measure(FIRST_BATCH, prepared),
            "first batch, file": _measure(FIRST_BATCH, file),
        }
    print(json.dumps(figures))
    if flags.json:
        write_atomically(Path(flags.json), json.dumps(figures, indent=2) + "\n")


def _question(row: int) -> dict[str, Any]:
    metadata = {"type": ("comparison", "bridge")[row % 2], "level": "hard", "titles": [f"t {row}", f"t {row + 1}"]}
    text = f"Which of person {row} and person {row * 7 % 999_983} was born first, and where was the other one?"
    return {"id": f"train_{row}", "question": text, "golden_answers": [f"person {row}"], "metadata": metadata}


def _measure(program: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", HEAD + program + TAIL, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])

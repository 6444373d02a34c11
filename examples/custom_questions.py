"""Writes the files that a run on your own texts needs: passages, questions and a prompt.

    python examples/custom_questions.py --texts=texts --out=data

Each text file becomes one passage. Replace QUESTIONS and PROMPT with your own.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

# Question, accepted answers, type. The reward pays for splitting a `parallel` question only.
QUESTIONS = [
    ("Who wrote the note of Monday?", ["Ada", "Ada Lovelace"], "single"),
    ("Who wrote the note of Tuesday?", ["Alan"], "single"),
    ("Did one person write the notes of Monday and Tuesday?", ["no"], "parallel"),
    ("Where was the author of the note of Monday born?", ["London"], "sequential"),
]

# `{question}` is the place of the question. The text must explain the tags that the policy writes and reads.
PROMPT = """\
Answer as a librarian would. Search with <search> one query ## another query </search>; the passages come back in \
<information> </information>. Think in <think> </think> before each step, and end with <answer> </answer>.
{question}"""


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def passages(texts: Path) -> list[dict]:
    """One passage per file. Cut documents of more than about a hundred words into several."""
    return [
        {"id": file.stem, "title": file.stem.replace("_", " "), "text": file.read_text(encoding="utf-8")}
        for file in sorted(texts.glob("*.txt"))
    ]


def questions() -> list[dict]:
    return [
        {"id": str(i), "question": question, "golden_answers": answers, "metadata": {"type": kind}}
        for i, (question, answers, kind) in enumerate(QUESTIONS)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes corpus.jsonl, questions.jsonl and prompt.txt.")
    parser.add_argument("--texts", type=Path, required=True, help="directory of .txt files")
    parser.add_argument("--out", type=Path, required=True, help="directory for the three files")
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    write_rows(flags.out / "corpus.jsonl", passages(flags.texts))
    write_rows(flags.out / "questions.jsonl", questions())
    (flags.out / "prompt.txt").write_text(PROMPT, encoding="utf-8")

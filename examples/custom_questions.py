"""Writes the files that a run on your own texts needs: passages, questions and a prompt.

    python examples/custom_questions.py --texts=texts --out=data

Copy this file and replace QUESTIONS and PROMPT with your own. Every text file becomes one or more passages.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

WORDS = 100  # of a passage, as in the published corpus
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
    """The files' texts in pieces of at most WORDS words, each with the name of its file as the title."""
    rows = []
    for file in sorted(texts.glob("*.txt")):
        words = file.read_text(encoding="utf-8").split()
        for i in range(0, len(words), WORDS):
            text = " ".join(words[i : i + WORDS])
            rows.append({"id": f"{file.stem}-{i // WORDS}", "title": file.stem.replace("_", " "), "text": text})
    return rows


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
    corpus = passages(flags.texts)
    if not corpus:
        parser.error(f"--texts={flags.texts}: no .txt files found")
    flags.out.mkdir(parents=True, exist_ok=True)
    write_rows(flags.out / "corpus.jsonl", corpus)
    write_rows(flags.out / "questions.jsonl", questions())
    (flags.out / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    print(f"{len(corpus)} passages, {len(QUESTIONS)} questions and a prompt are in {flags.out}")

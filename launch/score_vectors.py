"""Scores transcripts and compares with the scores in the file: `score_vectors.py FILE.jsonl [--profile=compat|paper]`.

A row has prompt, response, golden_answers, kind, weights and score. The last line printed is `mismatches: N`, with a
tolerance of 1e-6. `compat` reproduces the public code. `paper` scores the response's parsed actions, so it differs
wherever the public code has a quirk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from psearch_jax.rl.compat import compat_score, parse_transcript
from psearch_jax.rl.rewards import RewardWeights, paper_reward
from psearch_jax.runtime import cli
from psearch_jax.types import KINDS, Question, RewardParts, UserError

PROFILE = flags.DEFINE_enum(
    "profile", "compat", ["compat", "paper"], "Which reward to compare with the file's scores."
)
FIELDS = {"prompt": str, "response": str, "golden_answers": list, "kind": str, "weights": dict, "score": (int, float)}
TOLERANCE = 1e-6
SHOWN = 5


def read_rows(file: Path) -> Iterator[tuple[int, dict]]:
    """Yields (line number, row) of every non-blank line; `UserError` names the line and the field that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 in a text does not end a line
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}, line {number}: not JSON ({error})") from error
        for name, kind in FIELDS.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise UserError(f"{file}, line {number}: field {name} is missing or of the wrong type")
        if row["kind"] not in KINDS:
            raise UserError(f"{file}, line {number}: kind {row['kind']!r} found, accepted: {', '.join(KINDS)}")
        yield number, row


def score_row(row: dict, profile: str) -> RewardParts:
    """The reward of one row by `profile`. Raises `UserError` for an unknown weight."""
    try:
        weights = RewardWeights(**row["weights"])
    except TypeError as error:
        raise UserError(f"weights: {row['weights']} found, accepted: {RewardWeights()}") from error
    golds = tuple(row["golden_answers"])
    if profile == "compat":
        return compat_score(row["prompt"], row["response"], golds, row["kind"], weights)
    question = Question("vectors", "", row.get("question", ""), golds, row["kind"])
    return paper_reward(parse_transcript(question, row["response"]), weights)


def run(file: Path, profile: str) -> int:
    """Print the first mismatches and return their number. Raises `UserError` for an empty file."""
    rows = mismatches = 0
    for number, row in read_rows(file):
        rows += 1
        try:
            parts = score_row(row, profile)
        except UserError as error:
            raise UserError(f"{file}, line {number}: {error}") from error
        if abs(parts.total - row["score"]) > TOLERANCE:
            mismatches += 1
            if mismatches <= SHOWN:
                print(f"line {number}: {row['kind']}, file {row['score']:.6g}, {profile} {parts.total:.6g} = {parts}")
    if not rows:
        raise UserError(f"{file}: no rows found, at least one is needed")
    print(f"rows: {rows}\nmismatches: {mismatches}")
    return mismatches


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise UserError(f"arguments: {len(argv) - 1} files given, accepted: one (score_vectors.py FILE.jsonl)")
    run(Path(argv[1]), PROFILE.value)


if __name__ == "__main__":
    cli.run(main, positional=True)

"""Reads directories of training runs and evaluations for a report: metrics of every step, rollouts block by block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from psearch_jax.eval.benchmarks import file_name
from psearch_jax.eval.scores import Score, from_row
from psearch_jax.runtime.paths import locate, read_json
from psearch_jax.text.answers import exact_match, f1, normalise
from psearch_jax.text.tags import parse_turn
from psearch_jax.types import UserError

T = TypeVar("T")

BLOCK_ROWS = 64  # rollouts of an evaluation that are kept or left out together; in training a block is one step


@dataclass(frozen=True)
class Block:
    """Consecutive rollouts of a file: those of one step, or `BLOCK_ROWS` of a benchmark."""

    file: Path
    step: int | None  # training runs only
    benchmark: str  # evaluations only, else ""
    start: int = 0  # index of the first line in the file
    lines: Sequence[bytes] | None = None  # None: the entire file, read lazily

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rollouts as they were written. Raises `UserError`, with file and line, for one that is not JSON."""
        lines = self.file.read_bytes().splitlines() if self.lines is None else self.lines
        for number, line in enumerate(lines, self.start + 1):
            yield _object(line, f"{self.file}:{number}")

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """The scores of its rows. Raises `UserError` as `convert` does."""
        return self.convert(rows, from_row if self.step is None else score_of)

    def convert(self, rows: Sequence[Mapping[str, Any]], function: Callable[[Mapping[str, Any]], T]) -> list[T]:
        """`function` of its rows. Raises `UserError`, with file and line, for a missing or malformed field."""
        converted = []
        for number, row in enumerate(rows, self.start + 1):
            try:
                converted.append(function(row))
            except (KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{self.file}:{number}: field {error} not found or of another type, accepted: the rows that "
                    "launch/train.py and launch/eval.py write"
                ) from None
        return converted


@dataclass(frozen=True)
class RunFiles:
    """The contents of one directory. A training run has `rows`, an evaluation has `results`."""

    name: str  # as displayed
    directory: Path
    config: Mapping[str, Any]  # config.json, or the settings of an evaluation; {} if there is none
    rows: Sequence[Mapping[str, Any]]  # metrics.jsonl, one per step
    summary: Mapping[str, Any]  # summary.json; {} for a run that has not finished
    before: Mapping[str, Any]  # before.json; {} if there is none
    results: Mapping[str, Any]  # results.json
    blocks: Sequence[Block]

    @property
    def trained(self) -> bool:
        """Whether it is a training run."""
        return not self.results


def read_runs(directories: Sequence[str | Path]) -> list[RunFiles]:
    """Reads all directories. Each is named by its last path component if those are distinct, else by its path.

    Raises:
      UserError: one is neither a run of launch/train.py nor a finished evaluation, there are both, or a file cannot
        be read.
    """
    if not directories:
        raise UserError("no directory found, accepted: one or more of launch/train.py, or of launch/eval.py")
    short = [os.path.basename(os.path.abspath(d)) for d in directories]
    names = short if len(set(short)) == len(short) else [str(d) for d in directories]
    runs = [_read(locate(d), name) for d, name in zip(directories, names, strict=True)]
    for run in runs:
        if run.rows and not any("reward" in row for row in run.rows):
            raise UserError(
                f"{run.directory}: a run of launch/sft.py found, accepted: of launch/train.py or launch/eval.py"
            )
    for run in runs[1:]:
        if run.trained != runs[0].trained:
            kinds = {True: "a training run", False: "an evaluation"}
            raise UserError(
                f"{run.directory}: {kinds[run.trained]} found next to {kinds[not run.trained]}, accepted: one kind"
            )
    return runs


def score_of(row: Mapping[str, Any]) -> Score:
    """The score of a rollout that a training run wrote."""
    turns, golds = row["turns"], row["golden_answers"]
    parsed = [parse_turn(turn["text"]) for turn in turns if turn["n_sampled"]]
    answer = parsed[-1].answer if parsed and row["status"] == "answered" else None
    searches = [turn["queries"] for turn in turns if turn["queries"] and turn["n_sampled"]]
    return Score(
        source=row.get("source", ""),
        id=row["question_id"],
        sample=row["sample"],
        kind=row["kind"],
        status=row["status"],
        answer=None if answer is None else normalise(answer),
        em=float(exact_match(answer, golds)),
        f1=f1(answer, golds),
        searches=len(searches),
        sub_queries=sum(map(len, searches)),
        first_sub_queries=len(searches[0]) if searches else 0,
        turns=len(parsed),
        tokens=sum(turn["n_sampled"] for turn in turns),
        context=len(row["ids"]),
        valid_format=answer is not None and all(action.well_formed for action in parsed),
    )


def _read(directory: Path, name: str) -> RunFiles:
    results = _json(directory / "results.json")
    if results:
        blocks = [b for benchmark in results.get("benchmarks", {}) for b in _benchmark_blocks(directory, benchmark)]
        return RunFiles(name, directory, results.get("settings", {}), [], {}, {}, results, blocks)
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(
            f"{directory}: neither metrics.jsonl nor results.json found, accepted: the --workdir of launch/train.py, "
            "or the --out of a finished launch/eval.py"
        )
    config, summary, before = (_json(directory / f"{file}.json") for file in ("config", "summary", "before"))
    blocks = [Block(file, _step_of(file), "") for file in sorted((directory / "trajectories").glob("*.jsonl"))]
    return RunFiles(name, directory, config, read_metrics(metrics), summary, before, {}, blocks)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A last line without a newline is still being written and is skipped.

    Raises:
      UserError: a line is not a JSON object, or has no step.
    """
    *lines, _ = file.read_bytes().split(b"\n")
    rows = [_object(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{file}:{number}: step {row.get('step')!r} found, accepted: a number")
    return rows


def _benchmark_blocks(directory: Path, benchmark: str) -> list[Block]:
    file = directory / f"{file_name(benchmark)}.jsonl"
    if not file.is_file():
        raise UserError(f"{file}: not found, though results.json names its benchmark")
    lines = file.read_bytes().splitlines()
    starts = range(0, len(lines), BLOCK_ROWS)
    return [Block(file, None, benchmark, start, lines[start : start + BLOCK_ROWS]) for start in starts]


def _step_of(file: Path) -> int:
    if not file.stem.isdigit():
        raise UserError(f"{file}: found among the rollouts, accepted: files named by their step")
    return int(file.stem)


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; {} if there is no such file."""
    return read_json(file) if file.is_file() else {}


def _object(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise UserError(f"{place}: cannot be read ({error}), accepted: a JSON object") from None
    if not isinstance(value, dict):
        raise UserError(f"{place}: {type(value).__name__} found, accepted: a JSON object")
    return value

"""Reads the directories of training runs and evaluations for a report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from psearch_jax.config import Config, to_mapping
from psearch_jax.eval.benchmarks import file_name
from psearch_jax.runtime.paths import is_remote, locate, read_json
from psearch_jax.types import UserError


@dataclass(frozen=True)
class RunFiles:
    """The contents of one directory. A training run has `rows`, an evaluation has `results`."""

    name: str  # as displayed
    directory: Path
    config: Mapping[str, Any]  # config.json, or the settings of an evaluation; {} if there is none
    rows: Sequence[Mapping[str, Any]]  # metrics.jsonl, one per step
    summary: Mapping[str, Any]  # summary.json; {} for a run that has not finished
    results: Mapping[str, Any]  # results.json
    rollouts: Mapping[str, Path]  # files of rollouts by step or benchmark

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
    runs = [read_run(locate(d), name) for d, name in zip(directories, names, strict=True)]
    for run in runs[1:]:
        if run.trained != runs[0].trained:
            kinds = {True: "a training run", False: "an evaluation"}
            found = f"{kinds[run.trained]} found next to {kinds[not run.trained]}"
            raise UserError(f"{run.directory}: {found}, accepted: one kind")
    return runs


def read_run(directory: Path, name: str) -> RunFiles:
    config, summary, results = (
        read_json(file) if file.is_file() else {}
        for file in (directory / f"{part}.json" for part in ("config", "summary", "results"))
    )
    if results:
        files = {benchmark: directory / f"{file_name(benchmark)}.jsonl" for benchmark in results["benchmarks"]}
        return RunFiles(name, directory, results.get("settings", {}), [], {}, results, files)
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(
            f"{directory}: neither metrics.jsonl nor results.json found, accepted: the --workdir of launch/train.py, "
            "or the --out of a finished launch/eval.py"
        )
    rows = list(read_lines(metrics))
    if rows and not any("reward" in row for row in rows):
        raise UserError(f"{directory}: a run of launch/sft.py found, accepted: of launch/train.py or launch/eval.py")
    steps = {file.stem.lstrip("0") or "0": file for file in sorted((directory / "trajectories").glob("*.jsonl"))}
    return RunFiles(name, directory, config, rows, summary, {}, steps)


def read_complete(workdir: str | Path, config: Config) -> dict[str, Any] | None:
    """The summary of a training run that has taken all steps of this very config.

    None otherwise, and where only resuming can tell whether the inputs have changed: if the config names code, a
    server or a remote path, or if a file that it names is newer than the run's last start.
    """
    if is_remote(workdir):
        return None
    directory = Path(workdir)
    try:
        summary, known = (read_json(directory / f"{part}.json") for part in ("summary", "config"))
    except UserError:  # the run that follows says what is wrong
        return None
    steps = summary.get("steps", -1)
    taken = known == to_mapping(config) and steps >= config.train.steps
    if not taken or not (directory / "checkpoints" / str(steps)).is_dir():
        return None
    values = [value for section in known.values() if isinstance(section, dict) for value in section.values()]
    named = [name for value in values if isinstance(value, str) for name in value.split(",") if name]
    files = [file for name in named if os.path.exists(name) for file in (name, *Path(name).rglob("*"))]
    began = os.path.getmtime(directory / "config.json")
    unknown = any(":" in name for name in named) or any(os.path.getmtime(file) > began for file in files)
    return None if unknown else summary


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file. A last line without a newline is still being written and is skipped.

    Raises:
      UserError: a line is not a JSON object, or the file does not exist.
    """
    if not file.is_file():
        raise UserError(f"{file}: not found, though its directory has results for it")
    *lines, _ = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            value = orjson.loads(line)
        except ValueError as error:
            raise UserError(f"{file}:{number}: cannot be read ({error}), accepted: a JSON object") from None
        if not isinstance(value, dict):
            raise UserError(f"{file}:{number}: {type(value).__name__} found, accepted: a JSON object")
        yield value

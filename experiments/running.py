"""Trains and evaluates the runs of an experiment, and records their results in one JSON file.

A run is an arm, a cold start and a seed. Recorded runs are not repeated, wherever they were made: a run depends only
on its settings and its cold start. The file also records these and the evaluations. Experiments share a directory of
runs, so that equal training runs are made once. Programs started concurrently with the same directory of runs share
the work: each skips the runs that another one is making.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import smoke, smoke_ppo
from experiments import Arm, Experiment, Transplant
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.eval.benchmarks import CLOSED_WORLD
from psearch_jax.eval.evaluate import read_scores
from psearch_jax.eval.scores import DIGITS, finished_by_turn, splitting, summarise
from psearch_jax.runtime.metrics import mean
from psearch_jax.runtime.paths import TOY_POLICY, read_json, write_atomically
from psearch_jax.train.checkpointing.settings import WEIGHTS, fingerprint
from psearch_jax.train.monitoring.alarms import ALARM, NAMES, read_rows
from psearch_jax.types import UserError
from retrieval.corpus import write_corpus

ROOT = Path(__file__).resolve().parent.parent
Figures = dict[str, dict[str, Any]]  # figures by "evaluation/set"
CONFIGS = {"smoke": smoke, "smoke_ppo": smoke_ppo}


def run_all(
    experiment: Experiment,
    file: Path,
    work: Path,
    policies: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    arms: Sequence[str] = (),
) -> dict[str, Any]:
    """Makes the runs that `file` does not contain, and returns the complete record.

    Args:
      file: the record; rewritten after every run.
      work: directory of the runs of all experiments. A run's folder is named by a digest of its config and cold start.
      policies: cold starts, `toy` or directories.
      arms: arms to run; default: all.

    Raises:
      UserError: an unknown arm, or a file with other settings or cold starts.
    """
    for name in arms:
        if name not in experiment.arms:
            raise UserError(f"--arms={name}: not found, accepted: {', '.join(experiment.arms)}")
    for name in arms or experiment.arms:
        if max(experiment.arms[name].steps, default=0) >= steps:
            raise UserError(f"--steps={steps}: accepted: more than {experiment.arms[name].steps[-1]}, for arm {name}")
    starts = [_fingerprint(policy) for policy in policies]
    if len(set(starts)) < len(starts):  # it would count as several in the intervals over cold starts
        raise UserError(f"--policies={','.join(policies)}: the same cold start twice, accepted: each one once")
    runs = [(name, i, seed) for i in range(len(policies)) for seed in seeds for name in arms or experiment.arms]
    for wait in (False, True):  # the second pass waits for runs that another program is making
        for name, i, seed in runs:
            arm = experiment.arms[name]
            run = f"{name}/{i}/{seed if arm.trained else 0}"
            if run in _open_record(file, experiment, steps, starts)["runs"]:
                continue
            place, fields = _place(arm, work, starts[i], seed, steps)
            with _locked(place, wait) as acquired:
                if not acquired:
                    continue
                print(f"{run}: {file.name}", file=sys.stderr, flush=True)
                results = _run(experiment, arm, place, fields, _path(policies[i]))
                with _locked(work):
                    record = _open_record(file, experiment, steps, starts)
                    record["runs"][run] = results
                    write_atomically(file, as_text(record))
    return _open_record(file, experiment, steps, starts)


def read(file: Path) -> dict[str, Any]:
    """The record so far.

    Raises:
      UserError: the file does not exist.
    """
    if not file.is_file():
        raise UserError(f"{file}: not found; accepted: a file that launch/experiment.py wrote")
    return read_json(file)


def as_text(record: Mapping[str, Any]) -> str:
    """The record as JSON with one line per arm and per run, so that a new run adds one line."""
    parts = []
    for key, value in record.items():
        text = json.dumps(value)
        if key in ("arms", "runs") and value:
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            text = f"{{\n{lines}\n }}"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _open_record(file: Path, experiment: Experiment, steps: int, starts: Sequence[str]) -> dict[str, Any]:
    """The record to which runs are added; a new one if the file does not exist."""
    evaluations = {name: asdict(evaluation) for name, evaluation in experiment.evaluations.items()}
    arms = {name: _settings(arm) for name, arm in experiment.arms.items()}
    fresh = {"claim": experiment.claim, "steps": steps, "cold_starts": list(starts), "evaluations": evaluations}
    fresh = json.loads(json.dumps({**fresh, "arms": arms, "runs": {}}))
    if not file.is_file():
        return fresh
    record = read(file)
    known = record["cold_starts"]
    shared = min(len(known), len(starts))
    if record["steps"] != steps or known[:shared] != list(starts)[:shared]:
        raise UserError(
            f"{file}: was made with --steps={record['steps']} and cold starts {known}, found {steps} and "
            f"{list(starts)}; accepted: the same, or another file"
        )
    if record["evaluations"] != fresh["evaluations"]:
        raise UserError(f"{file}: its runs had other evaluations; accepted: the same evaluations, or another file")
    for run in record["runs"]:
        name = run.split("/")[0]
        if record["arms"].get(name) != fresh["arms"].get(name):
            raise UserError(f"{file}: arm {name} had other settings; accepted: the same, or another file")
    return fresh | {"runs": record["runs"], "cold_starts": [*starts, *known[shared:]]}


def _settings(arm: Arm) -> dict[str, Any]:
    """The settings of an arm, with a digest of the complete config that its fields override."""
    set_here = {name: value for name, value in asdict(arm).items() if value is not None}
    return set_here | {"base": _digest(CONFIGS[arm.config].get_config().to_dict())}


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _place(arm: Arm, work: Path, start: str, seed: int, steps: int) -> tuple[Path, dict[str, Any]]:
    """A run's folder, named by a digest of its complete config and its cold start, and its config overrides."""
    config = CONFIGS[arm.config].get_config().to_dict()
    if not arm.trained:
        return work / f"start-{_digest(config, start)}", {}
    every = math.gcd(max(1, steps // 6), *arm.steps)
    fields = {"seed": seed, "train.steps": steps, "eval.questions_per_kind": 0, **arm.fields}
    fields |= {"train.checkpoint_every_steps": every, "train.keep_every_steps": every}
    if arm.corpus is not None:
        fields["retrieval.corpus"] = str(_corpus(work, arm.corpus))
    for name, value in fields.items():
        section, _, key = name.rpartition(".")
        (config[section] if section else config)[key] = value
    return work / _digest(config, start), fields


def _run(experiment: Experiment, arm: Arm, place: Path, fields: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The results of a run; trains and evaluates whatever is missing."""
    if not arm.trained:
        return {"after": _evaluated(experiment, arm, place, "after", policy)}
    run = place / "run"
    if not (run / "summary.json").is_file():
        overrides = [f"--config.{name}={value}" for name, value in {**fields, "model.path": policy}.items()]
        _program("train.py", f"--config=configs/{arm.config}.py", *overrides, f"--workdir={run}")
    if not (run / "summary.json").is_file():  # after SIGTERM it exits with code 0
        raise UserError(f"{run}: was stopped before its last step; the same command resumes")
    results: dict[str, Any] = {}
    for step in arm.steps:
        results[f"step {step}"] = _evaluated(
            experiment, arm, place, f"step-{step}", str(run / "checkpoints" / str(step))
        )
    results["after"] = _evaluated(experiment, arm, place, "after", str(run))
    results["wall_s"] = json.loads((run / "summary.json").read_text(encoding="utf-8"))["wall_s"]
    rows = read_rows(run / "metrics.jsonl")
    results["alarms"] = first_alarm_steps(rows)
    if experiment.metrics:
        # A value that was not finite is null.
        values = {name: [row[name] for row in rows if row.get(name) is not None] for name in experiment.metrics}
        results["metrics"] = {name: round(mean(own), DIGITS) for name, own in values.items() if own}
    return results


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Locks a directory. Yields False if another program holds the lock; with `wait` it waits instead."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            # A subprocess outlives this program if that is killed; it inherits the lock and holds it until it ends.
            os.set_inheritable(lock.fileno(), True)
            yield True


def first_alarm_steps(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The first step at which each alarm fired in a run."""
    steps: dict[str, int] = {}
    for row in rows:
        for name in NAMES:
            if row.get(ALARM + name):
                steps.setdefault(name, row["step"])
    return steps


def _corpus(work: Path, seed: int) -> Path:
    """The passages of a closed world as a corpus file."""
    file = work / f"passages-{seed}.jsonl"
    if not file.is_file():
        write_corpus(file, ClosedWorld.make(seed).passages)
    return file


def _evaluated(experiment: Experiment, arm: Arm, place: Path, moment: str, model: str) -> Figures:
    figures: Figures = {}
    for name, evaluation in experiment.evaluations.items():
        if isinstance(evaluation, Transplant):
            if not arm.arguments:
                file = place / f"{moment}-{_digest(asdict(evaluation))}.json"
                figures |= _transplanted(name, evaluation, file, model)
            continue
        out = place / f"{moment}-{_digest(asdict(evaluation), arm.arguments)}"
        if not (out / "results.json").is_file():
            benchmarks = [f"--benchmark={CLOSED_WORLD}:{one}" for one in evaluation.sets]
            _program(
                "eval.py",
                f"--model={model}",
                f"--config=configs/{arm.config}.py",
                f"--count={evaluation.count}",
                *benchmarks,
                *evaluation.arguments,
                *arm.arguments,
                f"--out={out}",
            )
        scores = read_scores(out)
        for one in evaluation.sets:
            own = scores[f"{CLOSED_WORLD}:{one}"]
            split = splitting(own)
            more = {"finished_by_turn": finished_by_turn(own), "confusion": split["confusion"]}
            figures[f"{name}/{one}"] = summarise(own) | more | {"never_split": split["never_split"]}
    return figures


def _transplanted(name: str, evaluation: Transplant, file: Path, model: str) -> Figures:
    """The decision to split, by the origin of the first thought."""
    if not file.is_file():
        _program("bench.py", "transplant", "--model", model, f"--count={evaluation.count}", f"--json={file}")
    lines = json.loads(file.read_text(encoding="utf-8"))["transplant"]
    return {
        f"{name}/{line['thought']}": {
            "decomposition_accuracy": line["accuracy"],
            "parallel_split": line["parallel"],
            "sequential_split": line["sequential"],
            "questions": line["questions"],
            "never_split": 0.5,
        }
        for line in lines
    }


def _path(policy: str) -> str:
    """The policy as an argument of programs that run in another directory."""
    return policy if policy == "toy" else str(Path(policy).resolve())


def _fingerprint(policy: str) -> str:
    directory = TOY_POLICY if policy == "toy" else Path(policy)
    if not directory.is_dir():
        raise UserError(f"--policies={policy}: not found, accepted: toy, or a directory that launch/sft.py made")
    return fingerprint(directory, WEIGHTS)[:16]


def _program(program: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "launch" / program), *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        close_fds=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{' '.join([program, *arguments])}: exit code {done.returncode}: {last}")

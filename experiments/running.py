"""Trains and evaluates the runs of an experiment, and records their results in one JSON file.

A run is an arm, a cold start and a seed. Recorded runs are not repeated. The file also records the arms' complete
settings, the cold starts, the evaluations and the data, and is refused if these have changed. If there are data, each
run's metrics and five rollouts of each arm are next to the file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments import DATA, Evaluation, Experiment
from experiments.words import accuracy_by_words
from psearch_jax.eval.benchmarks import CLOSED_WORLD, file_name
from psearch_jax.eval.evaluate import read_rows, read_scores
from psearch_jax.eval.scores import Score, group_by_kind, summarise
from psearch_jax.runtime.paths import TOYS, read_json, write_atomically
from psearch_jax.train.checkpointing.settings import WEIGHTS, hash_files
from psearch_jax.types import UserError

ROOT = Path(__file__).resolve().parent.parent
CURVE_BYTES = 500_000  # of the copy of a run's metrics; of a longer file it has every n-th step
TRAINING_ONLY = ("eval.temperature", "rollout.samples", "rollout.temperature")  # launch/eval.py has flags for these


class Stopped(Exception):
    """The time is over, or SIGTERM arrived; the program that was running has saved."""


@dataclass(frozen=True)
class Plan:
    """What the runs of one call share.

    Attributes:
      file: the record; rewritten after every run.
      work: directory of the runs of all experiments. A run's folder is named by a digest of its config and cold start,
        so experiments share equal runs, and a killed run resumes.
      data: directory with train, test and index, for an experiment that needs it.
      fields: config fields of all arms in addition to those of the experiment, by their dotted names.
      deadline: by `time.monotonic`, when the running program is asked to save.
    """

    experiment: Experiment
    file: Path
    work: Path
    steps: int
    data: Path | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    deadline: float = math.inf

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config that all arms change."""
        return importlib.import_module(f"configs.{self.experiment.config}").get_config().to_dict()

    @cached_property
    def contents(self) -> dict[str, str]:
        """A digest of every part of the data, by name; empty in the closed world."""
        if self.data is None:
            return {}
        patterns = ["train", "index", *(name for e in self.experiment.evaluations.values() for name in e.sets)]
        files = ("questions.json", "manifest.json")
        return {path.stem: hash_files(path, files)[:16] for name in patterns for path in self.data.glob(name)}

    def benchmarks(self, evaluation: Evaluation) -> dict[str, str]:
        """The locations of the questions of an evaluation, by the names of the sets."""
        if self.data is None:
            return {asked: asked for asked in evaluation.sets}
        return {path.stem: str(path) for name in evaluation.sets for path in sorted(self.data.glob(name))}

    def check(self) -> None:
        """Raises `UserError` if the data are incomplete, or a field is one that the experiment sets itself."""
        needed = self.experiment.needs_data
        if self.data and not needed:
            raise UserError(f"--data={self.data}: found with an experiment in the closed world, accepted: none")
        parts = ("train/questions.json", "test/questions.json", "index/manifest.json") if needed else ()
        if missing := [part for part in parts if not (self.data and (self.data / part).is_file())]:
            accepted = "a directory with train, test and index (docs/data.md)"
            raise UserError(f"--data={self.data or ''}: {', '.join(missing)} not found, accepted: {accepted}")
        own = {"seed", "train.steps", "eval.questions_per_kind", "model.path", *self.experiment.training}
        own.update(name for arm in self.experiment.arms.values() for name in arm.fields)
        if taken := sorted(own & self.fields.keys()):
            raise UserError(f"--set={taken[0]}: found, accepted: a field that the experiment does not set itself")


def run_all(plan: Plan, policies: Sequence[str], seeds: Sequence[int], arms: Sequence[str] = ()) -> dict[str, Any]:
    """Makes the runs that the record does not contain, and returns the complete record.

    Args:
      policies: cold starts, `toy` or directories.
      arms: arms to run; default: all.

    Raises:
      Stopped: at the deadline.
      UserError: an unknown arm, incomplete data, or a record with other settings, cold starts or data.
    """
    plan.check()
    plan.file.parent.mkdir(parents=True, exist_ok=True)
    for name in arms:
        if name not in plan.experiment.arms:
            raise UserError(f"--arms={name}: not found, accepted: {', '.join(plan.experiment.arms)}")
    starts = [cold_start_digest(policy) for policy in policies]
    if len(set(starts)) < len(starts):  # it would count as several in the intervals over cold starts
        raise UserError(f"--policies={','.join(policies)}: the same cold start twice, accepted: each one once")
    record = open_record(plan, starts)
    for i, policy in enumerate(policies):
        path = policy if policy == "toy" else str(Path(policy).resolve())  # the programs run in another directory
        for seed in seeds:
            for name in arms or plan.experiment.arms:
                run = f"{name}/{i}/{seed if plan.experiment.arms[name].trained else 0}"
                if run not in record["runs"]:
                    print(f"{run}: {plan.file.name}", file=sys.stderr, flush=True)
                    made = make_run(plan, run, path, starts[i])
                    record = open_record(plan, starts)  # another call may have added runs of other arms
                    record["runs"][run] = made
                    write_atomically(plan.file, json.dumps(record, indent=1) + "\n")
    return record


def measure_device(plan: Plan, minutes: float) -> None:
    """Writes `launch/bench.py device` to device.json next to the record, unless it is there.

    After `minutes` it is ended, and sizes that were measured are only in its messages. The experiment follows in any
    case.
    """
    out = plan.file.with_name("device.json")
    if out.is_file():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    deadline = min(plan.deadline, time.monotonic() + 60 * minutes)
    try:
        run_until(deadline, "bench.py", "device", f"--minutes={0.75 * minutes}", f"--json={out}")
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
    except Stopped:
        if time.monotonic() < deadline:  # by SIGTERM
            raise


def read_record(file: Path) -> dict[str, Any]:
    """The record so far. Raises `UserError` if there is no such file."""
    if not file.is_file():
        raise UserError(f"{file}: not found; accepted: a file that launch/experiment.py wrote")
    return read_json(file)


def open_record(plan: Plan, starts: Sequence[str]) -> dict[str, Any]:
    """The record to which runs are added; a new one if the file does not exist."""
    experiment = plan.experiment
    base = digest(plan.config, experiment.training)
    settings = {
        "claim": experiment.claim,
        "steps": plan.steps,
        "cold_starts": list(starts),
        "evaluations": {name: asdict(evaluation) for name, evaluation in experiment.evaluations.items()},
        "arms": {name: asdict(arm) | {"base": base} for name, arm in experiment.arms.items()},
        **({"data": plan.contents} if plan.contents else {}),
        **({"set": dict(plan.fields)} if plan.fields else {}),
    }
    settings = json.loads(json.dumps(settings))
    if not plan.file.is_file():
        return settings | {"runs": {}}
    record = read_record(plan.file)
    shared = min(len(record["cold_starts"]), len(starts))
    settings["cold_starts"] += record["cold_starts"][shared:]
    recorded_arms = {run.partition("/")[0] for run in record["runs"]}
    changed = [key for key in ("steps", "evaluations", "data", "set") if record.get(key) != settings.get(key)]
    changed += ["cold_starts"] * (record["cold_starts"][:shared] != list(starts)[:shared])
    changed += [name for name in sorted(recorded_arms) if record["arms"].get(name) != settings["arms"].get(name)]
    if changed:
        raise UserError(f"{plan.file}: was made with other {', '.join(changed)}; accepted: the same, or another --out")
    return settings | {"runs": record["runs"]}


def digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def make_run(plan: Plan, label: str, policy: str, start: str) -> dict[str, Any]:
    """The results of a run; trains and evaluates whatever is missing in `plan.work`.

    Args:
      label: arm, number of the cold start and seed, as the record names the run.
      policy, start: the cold start, and its digest.
    """
    name, _, seed = label.split("/")
    arm, training = plan.experiment.arms[name], plan.experiment.training
    if not arm.trained:
        return {"after": evaluate(plan, name, plan.work / f"start-{digest(plan.config, start)}", policy)}
    fields = {"seed": int(seed), "train.steps": plan.steps, "eval.questions_per_kind": 0, **training}
    fields |= {**plan.fields, **arm.fields}
    trained_on = [plan.contents[part] for part in ("train", "index")] if plan.data else []
    folder = plan.work / digest(plan.config, fields, start, *trained_on)
    run = folder / "run"
    try:
        if not (run / "summary.json").is_file():
            run_program(plan, "train.py", *set_fields({**fields, "model.path": policy}), f"--workdir={run}")
    finally:
        if plan.data and (run / "metrics.jsonl").is_file():
            copy_curve(run / "metrics.jsonl", plan.file.with_name(f"metrics-{file_name(label)}.jsonl"))
    if not (run / "summary.json").is_file():  # after SIGTERM it exits with code 0
        raise UserError(f"{run}: was stopped before its last step; the same command resumes")
    return {"after": evaluate(plan, name, folder, str(run)), "wall_s": read_json(run / "summary.json")["wall_s"]}


def evaluate(plan: Plan, arm: str, folder: Path, model: str) -> dict[str, dict[str, Any]]:
    """The figures of an arm's policy by "evaluation/set", and on data also by "evaluation/set/kind"."""
    options, figures = plan.experiment.arms[arm].arguments, dict[str, dict[str, Any]]()
    own = [dict(plan.fields), plan.contents] if plan.fields or plan.contents else []
    read = {name: value for name, value in plan.fields.items() if name not in TRAINING_ONLY}
    for title, evaluation in plan.experiment.evaluations.items():
        out = folder / f"after-{digest(asdict(evaluation), options, *own)}"
        asked = plan.benchmarks(evaluation)
        if not (out / "results.json").is_file():
            arguments = [f"--benchmark={name if plan.data else CLOSED_WORLD}:{asked[name]}" for name in asked]
            arguments += [f"--count={evaluation.count}", *evaluation.arguments, *set_fields(read), *options]
            run_program(plan, "eval.py", f"--model={model}", *arguments, f"--out={out}")
        scores = read_scores(out)
        for name, location in asked.items():
            if not plan.data:
                figures[f"{title}/{name}"] = summarise(scores[f"{CLOSED_WORLD}:{name}"])
                continue
            for kind, group in {"": scores[name], **group_by_kind(scores[name])}.items():
                figures[f"{title}/{name}/{kind}".rstrip("/")] = summarise(group) | {"each": by_question(group)}
            figures[f"{title}/{name}"]["word_bigrams"] = accuracy_by_words(plan.data / "train", location)
            rollouts = plan.file.with_name(f"rollouts-{file_name(arm)}.txt")
            if not rollouts.exists():  # of the first run and set
                write_rollouts(out / f"{file_name(name)}.jsonl", rollouts)
    return figures


def set_fields(fields: Mapping[str, Any]) -> list[str]:
    """The arguments that set config fields."""
    return [f"--config.{name}={value}" for name, value in fields.items()]


def by_question(scores: Sequence[Score]) -> dict[str, str]:
    """The figures that tables.py compares question by question: the values in the order of the questions."""
    values = {name: [getattr(s, name) for s in scores] for name in ("em", "turns", "evidence")}
    values["decomposition_ratio"] = [s.split for s in scores]
    values["decomposition_accuracy"] = [s.decomposed_correctly for s in scores if s.kind != "mixed"]
    return {name: " ".join(f"{value:g}" for value in column) for name, column in values.items()}


def copy_curve(metrics: Path, to: Path) -> None:
    """Copies a run's metrics, of a long run every n-th step."""
    lines = metrics.read_bytes().splitlines(keepends=True)
    write_atomically(to, b"".join(lines[:: max(1, -(-metrics.stat().st_size // CURVE_BYTES))]))


def write_rollouts(rows: Path, to: Path) -> None:
    """Writes five rollouts of an evaluation: three wrong and two right ones, with the titles of the passages."""
    by_em = sorted((row for row, _ in read_rows(rows)), key=lambda row: row["em"])
    lines = []
    for row in by_em[:3] + by_em[3:][-2:]:
        lines += ["", row["question"], f"{row['kind']}, {row['status']}, EM {row['em']:g}: {row['golden_answers']}"]
        for turn in row["actions"]:
            found = zip(turn["queries"], turn["passages"], strict=False)
            lines += [
                turn["text"],
                *(f"[{query}: {', '.join(p['title'] for p in ranking)}]" for query, ranking in found),
            ]
    write_atomically(to, "\n".join(lines[1:]) + "\n")


def cold_start_digest(policy: str) -> str:
    directory = TOYS["toy"] if policy == "toy" else Path(policy)
    if not directory.is_dir():
        raise UserError(f"--policies={policy}: not found, accepted: toy, or a directory that launch/sft.py made")
    return hash_files(directory, WEIGHTS)[:16]


def run_program(plan: Plan, program: str, *arguments: str) -> None:
    """Runs a program of launch/ with the experiment's config, as `run_until` does."""
    config = f"--config=configs/{plan.experiment.config}.py"
    run_until(plan.deadline, program, config, *(argument.replace(DATA, str(plan.data)) for argument in arguments))


def run_until(deadline: float, program: str, *arguments: str) -> None:
    """Runs a program of launch/, which is asked to save if this process is stopped or its time is over.

    Raises:
      Stopped: after the program has ended, in both cases.
      UserError: its exit code is not 0; with the last line of its messages.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise Stopped
    command = [sys.executable, str(ROOT / "launch" / program), *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    done = subprocess.Popen(command, cwd=ROOT, text=True, env=environment, **streams)
    try:
        _, errors = done.communicate(timeout=None if left == math.inf else left)
    except BaseException as reason:
        done.terminate()
        done.communicate()
        raise (Stopped if isinstance(reason, subprocess.TimeoutExpired) else reason) from None
    if done.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{' '.join([program, *arguments])}: exit code {done.returncode}: {last}")

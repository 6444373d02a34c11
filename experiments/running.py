"""Trains and evaluates the runs of an experiment, and records their results in one JSON file.

A run is an arm, a cold start and a seed. Recorded runs are not repeated. The file also records the arms' complete
settings, the cold starts and the evaluations, and is refused if these have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import smoke
from experiments import Arm, Experiment
from psearch_jax.eval.benchmarks import CLOSED_WORLD
from psearch_jax.eval.evaluate import read_scores
from psearch_jax.eval.scores import summarise
from psearch_jax.runtime.paths import TOY_POLICY, read_json, write_atomically
from psearch_jax.train.checkpointing.settings import WEIGHTS, hash_files
from psearch_jax.types import UserError

ROOT = Path(__file__).resolve().parent.parent
# The training of every arm, in place of the shorter one of the demo (configs/smoke.py).
TRAINING = {
    "train.prompts": 24,
    "learning.mini_batch_rollouts": 192,
    "learning.learning_rate": 3e-4,
    "learning.decay_ratio": 0.0,
    "learning.kl_coefficient": 0.001,
}


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
      work: directory of the runs of all experiments. A run's folder is named by a digest of its config and cold start,
        so experiments share equal runs, and a killed run resumes.
      policies: cold starts, `toy` or directories.
      arms: arms to run; default: all.

    Raises:
      UserError: an unknown arm, or a file with other settings or cold starts.
    """
    for name in arms:
        if name not in experiment.arms:
            raise UserError(f"--arms={name}: not found, accepted: {', '.join(experiment.arms)}")
    starts = [cold_start_digest(policy) for policy in policies]
    if len(set(starts)) < len(starts):  # it would count as several in the intervals over cold starts
        raise UserError(f"--policies={','.join(policies)}: the same cold start twice, accepted: each one once")
    record = open_record(file, experiment, steps, starts)
    for i, policy in enumerate(policies):
        path = policy if policy == "toy" else str(Path(policy).resolve())  # the programs run in another directory
        for seed in seeds:
            for name in arms or experiment.arms:
                arm = experiment.arms[name]
                run = f"{name}/{i}/{seed if arm.trained else 0}"
                if run not in record["runs"]:
                    print(f"{run}: {file.name}", file=sys.stderr, flush=True)
                    record["runs"][run] = make_run(experiment, arm, work, path, starts[i], seed, steps)
                    write_atomically(file, json.dumps(record, indent=1) + "\n")
    return record


def read_record(file: Path) -> dict[str, Any]:
    """The record so far. Raises `UserError` if there is no such file."""
    if not file.is_file():
        raise UserError(f"{file}: not found; accepted: a file that launch/experiment.py wrote")
    return read_json(file)


def open_record(file: Path, experiment: Experiment, steps: int, starts: Sequence[str]) -> dict[str, Any]:
    """The record to which runs are added; a new one if the file does not exist."""
    base = digest(smoke.get_config().to_dict(), TRAINING)
    settings = {
        "claim": experiment.claim,
        "steps": steps,
        "cold_starts": list(starts),
        "evaluations": {name: asdict(evaluation) for name, evaluation in experiment.evaluations.items()},
        "arms": {name: asdict(arm) | {"base": base} for name, arm in experiment.arms.items()},
    }
    settings = json.loads(json.dumps(settings))
    if not file.is_file():
        return settings | {"runs": {}}
    record = read_record(file)
    shared = min(len(record["cold_starts"]), len(starts))
    settings["cold_starts"] += record["cold_starts"][shared:]
    recorded_arms = {run.partition("/")[0] for run in record["runs"]}
    changed = [key for key in ("steps", "evaluations") if record[key] != settings[key]]
    changed += ["cold_starts"] * (record["cold_starts"][:shared] != list(starts)[:shared])
    changed += [name for name in sorted(recorded_arms) if record["arms"].get(name) != settings["arms"].get(name)]
    if changed:
        raise UserError(f"{file}: was made with other {', '.join(changed)}; accepted: the same, or another --out")
    return settings | {"runs": record["runs"]}


def digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def make_run(
    experiment: Experiment, arm: Arm, work: Path, policy: str, start: str, seed: int, steps: int
) -> dict[str, Any]:
    """The results of a run; trains and evaluates whatever is missing in `work`."""
    config = smoke.get_config().to_dict()
    if not arm.trained:
        return {"after": evaluate(experiment, arm, work / f"start-{digest(config, start)}", policy)}
    fields = {"seed": seed, "train.steps": steps, "eval.questions_per_kind": 0, **TRAINING, **arm.fields}
    folder = work / digest(config, fields, start)
    run = folder / "run"
    if not (run / "summary.json").is_file():
        overrides = [f"--config.{name}={value}" for name, value in {**fields, "model.path": policy}.items()]
        run_program("train.py", "--config=configs/smoke.py", *overrides, f"--workdir={run}")
    if not (run / "summary.json").is_file():  # after SIGTERM it exits with code 0
        raise UserError(f"{run}: was stopped before its last step; the same command resumes")
    return {"after": evaluate(experiment, arm, folder, str(run)), "wall_s": read_json(run / "summary.json")["wall_s"]}


def evaluate(experiment: Experiment, arm: Arm, folder: Path, model: str) -> dict[str, dict[str, Any]]:
    """The figures of a policy by "evaluation/set"."""
    figures: dict[str, dict[str, Any]] = {}
    for name, evaluation in experiment.evaluations.items():
        out = folder / f"after-{digest(asdict(evaluation), arm.arguments)}"
        if not (out / "results.json").is_file():
            arguments = [f"--benchmark={CLOSED_WORLD}:{asked}" for asked in evaluation.sets]
            arguments += [f"--count={evaluation.count}", *evaluation.arguments, *arm.arguments, f"--out={out}"]
            run_program("eval.py", f"--model={model}", "--config=configs/smoke.py", *arguments)
        scores = read_scores(out)
        figures |= {f"{name}/{asked}": summarise(scores[f"{CLOSED_WORLD}:{asked}"]) for asked in evaluation.sets}
    return figures


def cold_start_digest(policy: str) -> str:
    directory = TOY_POLICY if policy == "toy" else Path(policy)
    if not directory.is_dir():
        raise UserError(f"--policies={policy}: not found, accepted: toy, or a directory that launch/sft.py made")
    return hash_files(directory, WEIGHTS)[:16]


def run_program(program: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "launch" / program), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=ROOT, text=True, check=False, env=environment, **streams)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{' '.join([program, *arguments])}: exit code {done.returncode}: {last}")

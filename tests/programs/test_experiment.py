"""Experiments: declared arms can run, results are aggregated over runs, and nothing runs twice."""

import importlib
import json
import sys
from dataclasses import replace

import pytest
from programs import ROOT, completed

from configs import smoke
from experiments import Arm, Evaluation, Experiment, running, tables
from psearch_jax.config import from_mapping
from psearch_jax.eval.benchmarks import SETS
from psearch_jax.limits import validate
from psearch_jax.types import UserError

EXPERIMENT = Experiment(
    claim="b is better than a",
    arms={"a": Arm(), "b": Arm({"learning.learning_rate": 1e-4}), "start": Arm(trained=False)},
    evaluations={"held-out": Evaluation(("parallel",), 2)},
    reference="a",
    figures=("em", "turns"),
)


@pytest.mark.parametrize("name", ["baselines", "critical_path"])
def test_declared_arms_and_question_sets_are_accepted(name):
    """Every arm is a valid config, every question set exists, and the committed record gives a table."""
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    assert experiment.reference in experiment.arms
    for arm in experiment.arms.values():
        values = smoke.get_config().to_dict()
        for field, value in arm.fields.items():
            section, _, key = field.rpartition(".")
            (values[section] if section else values)[key] = value
        validate(from_mapping(values))
    assert {asked for evaluation in experiment.evaluations.values() for asked in evaluation.sets} <= set(SETS)
    record = running.read_record(ROOT / "docs" / "experiments" / f"{name}.json")
    assert record["claim"] == experiment.claim and "| cold starts |" in tables.report(experiment, record)


def record_of(ems: dict[str, float]) -> dict:
    """A record with the given EM of each run, `arm/cold start/seed`."""
    runs = {run: {"after": {"held-out/parallel": {"em": em, "turns": 2, "chance": 0.4}}} for run, em in ems.items()}
    return {"arms": dict.fromkeys(EXPERIMENT.arms, {}), "runs": runs}


@pytest.mark.parametrize(
    ("ems", "lines"),
    [
        (  # intervals are over cold starts, and differences within a cold start and seed
            {"a/0/0": 0.5, "a/1/0": 0.9, "b/0/0": 0.6, "b/1/0": 1.0},
            [
                "a | 2 | 2 | .700 (.000-1.000) | 2.00 |",
                "b | held-out/parallel | em | 2 | 2 | +0.100 | +0.100 to +0.100 |",
            ],
        ),
        (  # the seeds of a cold start are averaged before the interval
            {f"a/{start}/{seed}": em for start, em in enumerate((0.5, 0.9)) for seed in range(5)},
            ["arm | cold starts | runs |", "a | 2 | 10 | .700 (.000-1.000) |", "chance level |  |  | .400 |"],
        ),
        (  # a run without a counterpart is not compared; an arm without seeds is compared with all of them
            {"a/0/0": 0.5, "a/0/1": 0.7, "a/1/0": 0.9, "b/0/0": 0.6, "start/0/0": 0.4},
            [
                "b | held-out/parallel | em | 1 | 1 | +0.100 |  |",
                "start | held-out/parallel | em | 1 | 2 | -0.200 |  |",
            ],
        ),
    ],
)
def test_runs_are_aggregated_by_cold_start(ems, lines):
    text = tables.report(EXPERIMENT, record_of(ems))
    assert all(f"| {line}" in text for line in lines), text


def test_a_record_of_other_settings_is_refused(tmp_path):
    """Runs with another length, cold start, evaluation or arm are never added to a record; further arms are."""
    file = tmp_path / "x.json"
    record = running.open_record(file, EXPERIMENT, 3, ["start"]) | {"runs": {"a/0/0": {"after": {}}}}
    file.write_text(json.dumps(record))
    assert running.open_record(file, EXPERIMENT, 3, ["start", "second"])["cold_starts"] == ["start", "second"]
    more = replace(EXPERIMENT, arms={**EXPERIMENT.arms, "c": Arm()})
    assert running.open_record(file, more, 3, ["start"])["runs"] == record["runs"]
    other_arm = replace(EXPERIMENT, arms={"a": Arm({"seed": 1})})
    other_evaluation = replace(EXPERIMENT, evaluations={"held-out": Evaluation(("parallel",), 3)})
    for experiment, steps, start in (
        (EXPERIMENT, 4, "start"),
        (EXPERIMENT, 3, "other"),
        (other_arm, 3, "start"),
        (other_evaluation, 3, "start"),
    ):
        with pytest.raises(UserError, match="was made with other"):
            running.open_record(file, experiment, steps, [start])


@pytest.mark.parametrize("arguments", [["nothing"], ["baselines", "--policies=nowhere"]])
def test_bad_arguments_get_one_line(arguments, tmp_path):
    done = completed([sys.executable, "launch/experiment.py", *arguments, f"--out={tmp_path}", f"--work={tmp_path}"])
    assert done.returncode == 2 and "accepted" in done.stderr.strip().splitlines()[-1], done.stderr


@pytest.mark.slow
def test_recorded_runs_are_not_repeated(tmp_path, monkeypatch):
    """Real runs of one step are recorded one by one; another experiment reuses them; a failure reports its cause."""
    small = {"train.prompts": 2, "rollout.samples": 2, "rollout.slots": 4, "rollout.num_buckets": 1}
    small |= {"learning.mini_batch_rollouts": 4, "learning.micro_batch_rows": 4}
    experiment = replace(EXPERIMENT, arms={"start": Arm(trained=False), "a": Arm(small)})
    settings = (tmp_path / "work", ["toy"], [0], 1)
    result = running.run_all(experiment, tmp_path / "x.json", *settings)
    assert set(result["runs"]) == {"start/0/0", "a/0/0"} and result == running.read_record(tmp_path / "x.json")
    assert result["runs"]["a/0/0"]["after"]["held-out/parallel"]["questions"] == 2
    calls = []
    monkeypatch.setattr(running, "run_program", lambda *arguments: calls.append(arguments))
    assert running.run_all(experiment, tmp_path / "x.json", *settings) == result and not calls
    renamed = replace(experiment, arms={"b": Arm(small)})
    shared = running.run_all(renamed, tmp_path / "y.json", *settings)
    assert shared["runs"] == {"b/0/0": result["runs"]["a/0/0"]} and not calls
    monkeypatch.undo()
    broken = replace(experiment, arms={**experiment.arms, "b": Arm({"learning.learning_rate": "much"})})
    with pytest.raises(UserError, match="train.py.*exit code"):
        running.run_all(broken, tmp_path / "x.json", *settings, ["b"])

"""Experiments: declared arms can run, results are aggregated over runs, and nothing runs twice."""

import importlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import permutations

import pytest
from helpers import PASSAGES, random_params, tiny_config
from programs import ROOT, Program, completed, wait_until

from experiments import Arm, Evaluation, Experiment, running, tables
from psearch_jax.config import from_mapping
from psearch_jax.data.prepared import prepare
from psearch_jax.eval.benchmarks import SETS
from psearch_jax.limits import validate
from psearch_jax.models.hf import save_hf
from psearch_jax.types import UserError
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.indexing.directory import build_index

EXPERIMENT = Experiment(
    claim="b is better than a",
    arms={"a": Arm(), "b": Arm({"learning.learning_rate": 1e-4}), "start": Arm(trained=False)},
    evaluations={"held-out": Evaluation(("parallel",), 2)},
    reference="a",
    figures=("em", "turns"),
)


@pytest.mark.parametrize("name", ["baselines", "critical_path", "real"])
def test_declared_arms_and_question_sets_are_accepted(name):
    """Every arm is a valid config, every question set exists, and a committed record gives a table."""
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    assert experiment.reference in experiment.arms
    for arm in experiment.arms.values():
        values = importlib.import_module(f"configs.{experiment.config}").get_config().to_dict()
        for field, value in {**experiment.training, **arm.fields}.items():
            section, _, key = field.rpartition(".")
            (values[section] if section else values)[key] = value
        validate(from_mapping(values))
    if experiment.needs_data:
        return
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
    plan = running.Plan(EXPERIMENT, tmp_path / "x.json", tmp_path, 3)
    record = running.open_record(plan, ["start"]) | {"runs": {"a/0/0": {"after": {}}}}
    plan.file.write_text(json.dumps(record))
    assert running.open_record(plan, ["start", "second"])["cold_starts"] == ["start", "second"]
    more = replace(EXPERIMENT, arms={**EXPERIMENT.arms, "c": Arm()})
    assert running.open_record(replace(plan, experiment=more), ["start"])["runs"] == record["runs"]
    other_arm = replace(EXPERIMENT, arms={"a": Arm({"seed": 1})})
    other_evaluation = replace(EXPERIMENT, evaluations={"held-out": Evaluation(("parallel",), 3)})
    for changes, start in (
        ({"steps": 4}, "start"),
        ({}, "other"),
        ({"experiment": other_arm}, "start"),
        ({"experiment": other_evaluation}, "start"),
        ({"fields": {"learning.kl_coefficient": "0"}}, "start"),
    ):
        with pytest.raises(UserError, match="was made with other"):
            running.open_record(replace(plan, **changes), [start])


def test_calls_for_different_arms_share_a_record(tmp_path, monkeypatch):
    """A run that another call recorded meanwhile is kept."""
    plan = running.Plan(replace(EXPERIMENT, arms={"a": Arm(), "b": Arm()}), tmp_path / "x.json", tmp_path, 3)

    def make_run(plan, label, policy, start):
        if label == "a/0/0":
            running.run_all(plan, ["toy"], [0], ["b"])
        return {"after": {}}

    monkeypatch.setattr(running, "make_run", make_run)
    assert set(running.run_all(plan, ["toy"], [0], ["a"])["runs"]) == {"a/0/0", "b/0/0"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["baselines", "--policies=nowhere"],
        ["baselines", "--data=."],
        ["baselines", "--set=seed=5"],
        ["real"],
        ["real", "--data=nowhere"],
    ],
)
def test_bad_arguments_get_one_line(arguments, tmp_path):
    done = completed([sys.executable, "launch/experiment.py", *arguments, f"--out={tmp_path}", f"--work={tmp_path}"])
    assert done.returncode == 2 and "accepted" in done.stderr.strip().splitlines()[-1], done.stderr


def test_the_device_benchmark_is_ended_in_time_and_never_repeated(tmp_path):
    """Neither a slow device nor a failed benchmark takes the experiment's time."""
    plan = running.Plan(EXPERIMENT, tmp_path / "x" / "real.json", tmp_path, 3)
    running.measure_device(plan, 1 / 60)
    assert not list(plan.file.parent.iterdir())
    (tmp_path / "x" / "device.json").write_text("{}")
    started = time.monotonic()
    running.measure_device(plan, 10)
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_recorded_runs_are_not_repeated(tmp_path, monkeypatch):
    """Real runs of one step are recorded one by one; another experiment reuses them; a failure reports its cause."""
    small = {"train.prompts": 2, "rollout.samples": 2, "rollout.slots": 4, "rollout.num_buckets": 1}
    small |= {"learning.mini_batch_rollouts": 4, "learning.micro_batch_rows": 4}
    experiment = replace(EXPERIMENT, arms={"start": Arm(trained=False), "a": Arm(small)})
    plan = running.Plan(experiment, tmp_path / "x.json", tmp_path / "work", 1)
    result = running.run_all(plan, ["toy"], [0])
    assert set(result["runs"]) == {"start/0/0", "a/0/0"} and result == running.read_record(tmp_path / "x.json")
    assert result["runs"]["a/0/0"]["after"]["held-out/parallel"]["questions"] == 2
    calls = []
    monkeypatch.setattr(running, "run_program", lambda *arguments: calls.append(arguments))
    assert running.run_all(plan, ["toy"], [0]) == result and not calls
    renamed = replace(plan, experiment=replace(experiment, arms={"b": Arm(small)}), file=tmp_path / "y.json")
    shared = running.run_all(renamed, ["toy"], [0])
    assert shared["runs"] == {"b/0/0": result["runs"]["a/0/0"]} and not calls
    monkeypatch.undo()
    broken = replace(experiment, arms={**experiment.arms, "b": Arm({"learning.learning_rate": "much"})})
    with pytest.raises(UserError, match="train.py.*exit code"):
        running.run_all(replace(plan, experiment=broken), ["toy"], [0], ["b"])


def make_data(directory):
    """Questions of both kinds to train on, to test and to transfer to, and an index of four passages."""
    asked = {"comparison": "Who was born first, {} or {}?", "bridge": "Who taught the rival of {}, {}?"}
    names = [passage.title for passage in PASSAGES]
    rows = []
    for number, (a, b) in enumerate(permutations(names, 2)):
        for kind, text in asked.items():
            metadata = {"type": kind, "evidences": [[a, "born", "1815"]]}
            rows.append(
                {
                    "question": text.format(a, b),
                    "golden_answers": [a, "\u2028"],
                    "id": f"{number}{kind}",
                    "metadata": metadata,
                }
            )
    directory.mkdir()
    for name, part in {"train": rows[:16], "test": rows[16:22], "transfer-own": rows[22:]}.items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
        if name != "transfer-own":
            prepare([(name, str(file))], directory / name)
    write_corpus(directory / "corpus.jsonl", PASSAGES)
    build_index(directory / "index", MemoryMappedCorpus(directory / "corpus.jsonl"), None)
    return directory


TINY = {"data.template": "toy", "rollout.slots": "4", "rollout.samples": "2", "rollout.num_buckets": "1"}
TINY |= {"rollout.context_tokens": "160", "rollout.prompt_tokens": "48", "rollout.turn_tokens": "12"}
TINY |= {"rollout.obs_tokens": "48", "rollout.search_turns": "1", "train.prompts": "2"}
TINY |= {"learning.mini_batch_rollouts": "4"}


@pytest.mark.slow
def test_an_experiment_on_files_that_was_stopped_resumes(tmp_path, tiny_tokenizer, monkeypatch):
    """Stopped in the middle of training, it keeps the run's metrics, and ends with the record of an unstopped one."""

    class InTime(Program):
        """A program of launch/ whose time is over after its first step."""

        def __init__(self, command, cwd, text, env, **streams):
            super().__init__(command, env, **streams)

        def communicate(self, timeout=None):
            if timeout is not None:
                wait_until(lambda: list((tmp_path / "work").glob("*/run/metrics.jsonl")), 120)
            return super().communicate(timeout and 0)

    monkeypatch.setattr(subprocess, "Popen", InTime)
    policy, experiment = tmp_path / "policy", importlib.import_module("experiments.real").EXPERIMENT
    config = tiny_config(tiny_tokenizer.size + 6, max_positions=256)
    save_hf(random_params(config), config, tiny_tokenizer.name, policy)
    plan = running.Plan(
        experiment, tmp_path / "a" / "real.json", tmp_path / "work", 2, make_data(tmp_path / "data"), TINY
    )
    runs = ([str(policy)], [0], ["A", "B"])
    with pytest.raises(running.Stopped):
        running.run_all(replace(plan, deadline=time.monotonic() + 600), *runs)
    curve = plan.file.with_name("metrics-A_0_0.jsonl")
    assert json.loads(curve.read_text().splitlines()[0])["step"] == 0 and not plan.file.exists()
    record = running.run_all(plan, *runs)
    whole = running.run_all(replace(plan, file=tmp_path / "b" / "real.json", work=tmp_path / "b"), *runs[:2], ["A"])
    after = record["runs"]["A/0/0"]["after"]
    assert after == whole["runs"]["A/0/0"]["after"] and "B/0/0" in record["runs"]
    assert set(after) >= {"search/test/parallel", "search/transfer-own", "closed book/test"}
    assert plan.file.with_name("rollouts-A.txt").read_text().count(", EM ") == 5
    text = tables.report(experiment, record)
    assert "| words and word bigrams | " in text and re.search(
        r"\| B \| search/test \| turns \| .* \| [01]\.\d{4} \|", text
    )

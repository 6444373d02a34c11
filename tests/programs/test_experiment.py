"""Experiments: declared arms can run, results are aggregated over runs, and nothing runs twice."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from programs import ROOT, completed, wait_until

from benchmarks.quality import world
from experiments import Arm, Evaluation, Experiment, Transplant, running, tables
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.config import from_mapping
from psearch_jax.eval.benchmarks import SETS, closed_world_benchmark
from psearch_jax.limits import validate
from psearch_jax.train.checkpointing.settings import fields
from psearch_jax.types import UserError
from retrieval.corpus import MemoryMappedCorpus

NAMES = sorted(p.stem for p in (ROOT / "experiments").glob("*.py"))
DECLARED = [name for name in NAMES if name not in ("__init__", "running", "tables")]


def config_of(arm: Arm):
    values = importlib.import_module(f"configs.{arm.config}").get_config().to_dict()
    known = fields(from_mapping(values))
    for name, value in arm.fields.items():
        assert name in known, name
        section, _, key = name.rpartition(".")
        (values[section] if section else values)[key] = value
    return from_mapping(values)


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_declared_can_run(name):
    """An arm with a rejected field, or a set that does not exist, is only noticed hours into an experiment."""
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    assert experiment.reference in experiment.arms and len(experiment.claim) > 20
    for arm_name, arm in experiment.arms.items():
        assert not re.search("[,/]", arm_name), "names are separated by commas, and used as directory names"
        validate(config_of(arm))
    asked = [evaluation for evaluation in experiment.evaluations.values() if isinstance(evaluation, Evaluation)]
    assert {one for evaluation in asked for one in evaluation.sets} <= set(SETS)
    assert set(experiment.figures) <= set(tables.TITLES)


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "experiments").glob("*.json")), ids=lambda file: file.stem)
def test_committed_records_match_their_experiments(file):
    """An arm or an evaluation is renamed only in the code: its recorded results drop out of every table. Or a rerun
    rewrites all lines of a record, so that no diff shows which runs are new."""
    experiment = importlib.import_module(f"experiments.{file.stem}").EXPERIMENT
    record = running.read(file)
    assert running.as_text(record) == file.read_text(encoding="utf-8")
    assert record["claim"] == experiment.claim and list(record["evaluations"]) == list(experiment.evaluations)
    assert {run.partition("/")[0] for run in record["runs"]} <= set(experiment.arms)
    assert len(file.read_text().splitlines()) == len(record["runs"]) + len(record["arms"]) + 10


def record(**ems) -> dict:
    """Two runs of each arm, with the given EMs."""
    runs = {
        f"{arm}/{i}/0": {"after": {"held-out/parallel": {"em": em, "turns": 2 + i, "chance": 0.4}}}
        for arm, both in ems.items()
        for i, em in enumerate(both)
    }
    return {"arms": {arm: {} for arm in ems}, "runs": runs, "steps": 3}


EXPERIMENT = Experiment(
    claim="b is better than a",
    arms={"a": Arm(), "b": Arm({"learning.learning_rate": 1e-4})},
    evaluations={"held-out": Evaluation(("parallel",), 2)},
    reference="a",
    figures=("em", "turns"),
)


def test_intervals_are_over_cold_starts_and_differences_within_runs():
    """Two cold starts that differ widely look certain, or an arm is compared with the reference of another run."""
    results = record(a=(0.5, 0.9), b=(0.6, 1.0))
    text = tables.report(EXPERIMENT, results)
    assert "| chance level |  |  | .400 |" in text
    assert "| a | 2 | 2 | .700 (.000-1.000) | 2.50 (-3.85-8.85) |" in text
    assert "| b | held-out/parallel | EM | 2 | 2 | +0.100 | +0.100 to +0.100 |" in text
    assert "| held-out/parallel | EM | b | .600 | 1.000 |" in text


def test_seeds_of_one_cold_start_are_not_independent_cold_starts():
    """Ten seeds of two cold starts are counted as ten: the interval shrinks to that of the seeds."""
    results = record(a=(0.5, 0.9))
    one_start = {f"a/0/{seed}": one for seed, one in enumerate(results["runs"].values())}
    text = tables.report(EXPERIMENT, results | {"runs": one_start})
    assert "| arm | seeds | runs |" in text and "Each cold start" not in text
    assert "| a | 2 | 2 | .700 (.000-1.000) |" in text
    seeds = {f"a/{i}/{seed}": results["runs"][f"a/{i}/0"] for i in range(2) for seed in range(5)}
    text = tables.report(EXPERIMENT, results | {"runs": seeds})
    assert "| a | 2 | 10 | .700 (.000-1.000) |" in text
    assert "| held-out/parallel | EM | a | .500, .500, .500, .500, .500 |" in text


def test_seeds_do_not_stand_in_for_cold_starts_that_are_missing():
    """An arm that ran from all cold starts is compared with one that ran from the first: the interval over the seeds
    of that cold start looks like one over cold starts."""
    results = record(a=(0.5, 0.9), b=(0.6, 1.0))
    seeds = {f"{arm}/0/{seed}": results["runs"][f"{arm}/0/0"] for arm in "ab" for seed in range(5)}
    text = tables.report(EXPERIMENT, results | {"runs": seeds | {"b/1/0": results["runs"]["b/1/0"]}})
    assert "| b | held-out/parallel | EM | 1 | 5 | +0.100 |  |" in text
    assert "| a | 1 | 5 | .500 |" in text and "| b | 2 | 6 | .800 (.000-1.000) |" in text


def test_controls_are_rows_of_the_tables():
    """Decomposition accuracy that a rule on the question's words, or never splitting, also reaches looks learned."""
    results = record(a=(0.5, 0.9))
    for one in results["runs"].values():
        one["after"]["held-out/pairs"] = {"decomposition_accuracy": 0.8, "never_split": 0.5}
        for name in ("elsewhere", "few"):
            one["after"][f"{name}/pairs"] = {"decomposition_accuracy": 0.8, "never_split": 0.5}
    figures = ("decomposition_accuracy", "turns")
    controls = tables.controls_of(ROOT / "docs" / "experiments" / "controls" / "world.json")
    others = {
        "elsewhere": Evaluation(("pairs",), 200, ("--config.data.world_seed=1",)),
        "few": Evaluation(("pairs",), 2),
    }
    own = {"held-out": replace(EXPERIMENT.evaluations["held-out"], count=200)}
    experiment = replace(EXPERIMENT, figures=figures, evaluations=EXPERIMENT.evaluations | own | others)
    text = tables.report(experiment, results, controls)
    assert text.count("| never split |  |  | .500 |") == 3
    assert f"| control: word bigrams |  |  | {controls['word bigrams']:.3f}".replace("0.", ".") in text
    assert text.count("control:") == len(controls) >= 7, "not for the pairs of another world, or for a part of them"
    assert tables.controls_of(ROOT / "nowhere.json") == {}


def test_the_committed_controls_are_those_of_this_world():
    """The wordings or the minimal pairs change, and the tables still compare with classifiers of the old ones."""
    file = ROOT / "docs" / "experiments" / "controls" / "world.json"
    committed = json.loads(file.read_text())["cues"]
    asked = closed_world_benchmark(ClosedWorld.make(0), "pairs", 200)
    bigrams = world.CLASSIFIERS["word bigrams"]().fit(*world._examples(ClosedWorld.make(0), "train", 1600, False))
    score = bigrams.score(asked, [q.kind for q in asked])
    assert score == pytest.approx(committed["word bigrams"][world.EVALUATED], abs=0.011)


def test_training_metrics_are_reported_where_they_exist():
    """A metric that only some arms log stops the report, or counts as 0 in the others."""
    results = record(a=(0.5, 0.9), b=(0.6, 1.0))
    results["runs"]["b/0/0"]["metrics"] = {"staleness": 2.5}
    results["runs"]["b/1/0"]["metrics"] = {"staleness": 1.5}
    results["runs"]["a/0/0"]["metrics"] = {}
    text = tables.report(replace(EXPERIMENT, metrics=("staleness",)), results)
    assert "| a | 1 | 1 |  |" in text and "| b | 2 | 2 | 2 (-4.35 to 8.35) |" in text


def test_an_arm_that_has_not_run_everywhere_is_compared_where_it_has():
    """A run that is still missing counts as 0, or is replaced by one with another cold start."""
    results = record(a=(0.5, 0.9), b=(0.6, 1.0))
    del results["runs"]["b/0/0"]
    assert "| b | held-out/parallel | EM | 1 | 1 | +0.100 |  |" in tables.report(EXPERIMENT, results)


def test_an_untrained_arm_is_compared_with_every_seed_of_its_cold_start():
    """A cold start has no seed: a lookup under the seed of a run would drop it from every comparison."""
    results = record(a=(0.5, 0.9), b=(0.6, 1.0))
    results["runs"] |= {"a/0/1": results["runs"]["a/0/0"]}
    untrained = replace(EXPERIMENT, arms={"a": Arm(), "b": Arm(trained=False)})
    assert "| b | held-out/parallel | EM | 2 | 3 | +0.100 | +0.100 to +0.100 |" in tables.report(untrained, results)


def test_alarms_are_counted_by_runs_with_the_step_of_the_first():
    """A run with an alarm looks like one without, or an unmonitored run looks like one without alarms."""
    rows = [{"step": s, "alarm/entropy": float(s > 4), "alarm/gap": 0.0, "alarm/likelihood": s == 6} for s in range(9)]
    assert running.first_alarm_steps(rows) == {"entropy": 5, "likelihood": 6}
    results = record(a=(0.5, 0.9), b=(0.6, 1.0))
    assert "Alarms" not in tables.report(EXPERIMENT, results)
    results["runs"]["a/0/0"]["alarms"] = {}
    results["runs"]["b/0/0"]["alarms"] = {"entropy": 5}
    results["runs"]["b/1/0"]["alarms"] = {"gap": 7, "entropy": 3}
    text = tables.report(EXPERIMENT, results)
    assert "| a | 1 | none |" in text and "| b | 2 | entropy 2 (3), gap 1 (7) |" in text


def test_a_broken_retriever_finds_another_worlds_passages(tmp_path):
    """The run that should be misled retrieves its own facts, or the file is not a valid corpus."""
    file = running._corpus(tmp_path, 1)
    passages = list(MemoryMappedCorpus(file))
    other = ClosedWorld.make(1).passages
    assert [(p.id, p.text) for p in passages] == [(p.id, p.text) for p in other]
    assert not {p.text for p in passages} & {p.text for p in ClosedWorld.make(0).passages}


def test_tables_include_evaluations_during_training():
    """An experiment about training is reported only at its last step."""
    results = record(a=(0.1, 0.2), b=(0.6, 1.0))
    for run in ("b/0/0", "b/1/0"):
        results["runs"][run]["step 1"] = results["runs"][run]["after"]
    over = replace(EXPERIMENT, arms={"a": Arm(trained=False), "b": Arm(steps=(1,))})
    text = tables.report(over, results)
    assert "held-out/parallel:" in text and "held-out/parallel, step 1:" in text


def test_results_of_other_settings_are_not_taken_for_these(tmp_path):
    """A file that resumes with another rate, length or cold start mixes results that cannot be compared."""
    file = tmp_path / "x.json"
    running.run_all(EXPERIMENT, file, tmp_path, [], [0], 3)
    results = running._open_record(file, EXPERIMENT, 3, ["one"])
    file.write_text(json.dumps(results | {"runs": {"b/0/0": {}}}))
    assert running._open_record(file, EXPERIMENT, 3, ["one", "two"])["cold_starts"] == ["one", "two"]
    assert running._open_record(file, EXPERIMENT, 3, [])["cold_starts"] == ["one"]
    with pytest.raises(UserError, match="--steps=3"):
        running._open_record(file, EXPERIMENT, 4, ["one"])
    with pytest.raises(UserError, match="cold starts"):
        running._open_record(file, EXPERIMENT, 3, ["other"])
    changed = replace(EXPERIMENT, arms={**EXPERIMENT.arms, "b": Arm({"learning.learning_rate": 3e-4})})
    with pytest.raises(UserError, match="arm b had other settings"):
        running._open_record(file, changed, 3, ["one"])
    asked = replace(EXPERIMENT, evaluations={"held-out": Evaluation(("parallel",), 3)})
    with pytest.raises(UserError, match="had other evaluations"):
        running._open_record(file, asked, 3, ["one"])
    more = replace(EXPERIMENT, arms={**EXPERIMENT.arms, "c": Arm()})
    assert "b/0/0" in running._open_record(file, more, 3, ["one"])["runs"], "a new arm must not discard existing runs"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        [],
        ["ablation", "--seeds=a"],
        ["ablation", "--policies=nowhere"],
        ["ablation", "--seeds="],
        ["ablation", "--seeds=\u00b2"],
        ["ablation", "--policies=toy,toy"],
    ],
)
def test_what_the_program_cannot_take_is_one_line(arguments, tmp_path):
    """A wrong name costs a run, or ends in a traceback."""
    done = completed([sys.executable, "launch/experiment.py", *arguments, f"--out={tmp_path}", f"--work={tmp_path}"])
    assert (
        done.returncode == 2 and "accepted" in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr
    )


def test_the_program_starts_from_anywhere(tmp_path):
    """The program finds its experiments only if the repository happens to be on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "launch" / "experiment.py"), "ablation", "--only_tables", "--out=x"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"{tmp_path}/x/ablation.json: not found" in done.stderr, done.stderr[-2000:]


def test_a_run_that_outlives_its_experiment_keeps_its_place(tmp_path):
    """A killed experiment leaves its training running, and after a restart two programs write one directory."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train.py").write_text(
        "import os, time\nopen('pid.tmp', 'w').write(str(os.getpid()))\nos.rename('pid.tmp', 'pid')\ntime.sleep(600)"
    )
    code = (
        "import sys; from pathlib import Path; from experiments import running\n"
        "running.ROOT = Path(sys.argv[1])\n"
        "with running._locked(running.ROOT / 'place'): running._program('train.py')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        wait_until((tmp_path / "pid").is_file)
        with running._locked(tmp_path / "place", wait=False) as locked:
            assert not locked
        parent.kill()
        parent.wait()
        with running._locked(tmp_path / "place", wait=False) as locked:
            assert not locked, "its program is still running"
    finally:
        parent.kill()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    with running._locked(tmp_path / "place") as locked:
        assert locked


@pytest.mark.slow
def test_an_experiment_is_run_once_and_kept(tmp_path, monkeypatch):
    """Real runs of one step: results are saved after each run; neither a second call nor another experiment with the
    same training and evaluation starts a program; a failing program reports why. Two concurrent calls share the work:
    if one overwrote the other's file, runs would be lost, and both would train the same run in one directory."""
    small = {"train.prompts": 2, "rollout.samples": 2, "rollout.slots": 4, "rollout.num_buckets": 1}
    small |= {"learning.mini_batch_rollouts": 4, "learning.micro_batch_rows": 4}
    arms = {"cold start": Arm(trained=False), "a": Arm(small, steps=(1,))}
    evaluations = {**EXPERIMENT.evaluations, "first thought": Transplant(4)}
    experiment = replace(EXPERIMENT, arms=arms, evaluations=evaluations, metrics=("logp_gap",))
    started, start = [], running._program
    monkeypatch.setattr(running, "_program", lambda *arguments: started.append(arguments) or start(*arguments))
    both = (experiment, tmp_path / "x.json", tmp_path / "work", ["toy"], [0], 2)
    with ThreadPoolExecutor(2) as pool:
        result, concurrent = pool.map(lambda _: running.run_all(*both), range(2))
    assert result == concurrent and len(started) == len(set(started)) == 7
    assert set(result["runs"]) == {"cold start/0/0", "a/0/0"} and result == running.read(tmp_path / "x.json")
    trained = result["runs"]["a/0/0"]
    assert {"step 1", "after", "wall_s", "alarms", "metrics"} == set(trained)
    assert 0 <= trained["metrics"]["logp_gap"] < 0.01
    thoughts = [trained["after"][f"first thought/{origin}"] for origin in ("own", "same type", "other type")]
    assert all(0 < one["questions"] <= 4 and 0 <= one["decomposition_accuracy"] <= 1 for one in thoughts)
    figures = trained["after"]["held-out/parallel"]
    assert figures["questions"] == 2 and 0 <= figures["em"] <= 1 and len(figures["finished_by_turn"]) > 2
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append(a))
    assert running.run_all(experiment, tmp_path / "x.json", tmp_path / "gone", ["toy"], [0], 2) == result and not calls
    alike = replace(
        experiment, arms={"by another name": Arm({**small, "train.dynamic_sampling_rounds": 0}, steps=(1,))}
    )
    shared = running.run_all(alike, tmp_path / "y.json", tmp_path / "work", ["toy"], [0], 2)
    assert shared["runs"] == {"by another name/0/0": trained} and not calls
    monkeypatch.undo()
    broken = replace(experiment, arms={**arms, "b": Arm({"learning.learning_rate": "much"})})
    with pytest.raises(UserError, match="train.py.*exit code"):
        running.run_all(broken, tmp_path / "x.json", Path(tmp_path) / "work", ["toy"], [0], 2, ["b"])

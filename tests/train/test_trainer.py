"""The main loop, its run directory, and how it survives interruptions and bad inputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from compilations import CompilationCounter
from programs import Program
from runs import assert_same_run, command, metrics_without_clocks, run, small_config, wait_for

from configs import smoke
from psearch_jax.assembly import build, questions
from psearch_jax.config import from_mapping
from psearch_jax.models import decoder, hf
from psearch_jax.report.runs import read_complete
from psearch_jax.runtime.compiling import compile_all
from psearch_jax.train import trainer
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.train.monitoring import alarms
from psearch_jax.train.trainer import train_step
from psearch_jax.types import UserError


def test_a_killed_run_resumes_bit_for_bit(tiny_policy, tmp_path):
    """Parameters, metrics, trajectories and evaluations are those of an uninterrupted run."""
    run(command(tmp_path / "whole", tiny_policy, 4))
    killed = tmp_path / "killed"
    process = Program(command(killed, tiny_policy, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # Kill after step 3: later than the checkpoint, so that rows have to be removed.
    wait_for(lambda: (killed / "trajectories" / "000002.jsonl").is_file(), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "summary.json").is_file()
    run(command(killed, tiny_policy, 4))
    assert_same_run(killed, tmp_path / "whole")
    before, after = (json.loads((w / "summary.json").read_text()) for w in (killed, tmp_path / "whole"))
    assert before["before"] == after["before"] and before["after"] == after["after"]


def test_a_complete_run_is_not_repeated(tiny_policy, tmp_path):
    """A complete run neither loads weights nor compiles again, unless one of its inputs may have changed."""
    program = command(tmp_path, tiny_policy, 1, **{"reward.terms": ""})  # whether code has changed only a run can tell
    run(program)
    again = run(program)
    assert "complete after 1 steps, nothing to do" in again.stdout and "compiling" not in again.stderr
    config = from_mapping(json.loads((tmp_path / "config.json").read_text()))
    assert read_complete(tmp_path, config)
    os.utime(tmp_path / "config.json", (0, 0))
    assert not read_complete(tmp_path, config), "the policy that it names is newer"


def test_sigterm_saves_and_exits_cleanly(tiny_policy, tmp_path):
    """All complete steps are saved; a resume with other settings is refused in one line."""
    long = command(tmp_path, tiny_policy, 1000, **{"train.checkpoint_every_steps": 1000})
    process = Program(long, stderr=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "trajectories" / "000000.jsonl").is_file(), process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)  # the grace period of a preempted machine
    assert process.returncode == 0 and "the same command resumes" in out
    step = checkpoint.read_loop(checkpoint.find_checkpoint(tmp_path))["step"]
    assert step == len(metrics_without_clocks(tmp_path)) >= 1


def test_no_step_after_the_first_compiles(tiny_policy):
    """Every program is listed, in every width; the first step adds small ones of conversions."""
    parts = build.training_run(small_config(tiny_policy, **{"rollout.num_buckets": 2}))
    parts.begin()
    parts.collector.warm_up(parts.sampling_weights())
    compile_all(parts.learner.programs(parts.reference))
    train_step(parts, next(parts.loader), 0)
    counter = CompilationCounter()
    for step in range(1, 4):
        train_step(parts, next(parts.loader), step)
    assert counter.count == 0


def test_half_a_line_of_metrics_before_the_first_checkpoint(tiny_policy, tmp_path, caplog):
    """The run starts again at step 0."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1}\n{"step": 1, "rew')
    trainer.train(build.training_run(small_config(tiny_policy, **{"train.steps": 1})), tmp_path)
    assert "has metrics of 1 steps but no checkpoint" in caplog.text
    assert [row["step"] for row in metrics_without_clocks(tmp_path)] == [0]


def test_a_checkpoint_of_another_architecture_is_refused(tiny_policy, tmp_path):
    """It is not taken for damage."""
    parts = build.training_run(small_config(tiny_policy))
    parts.begin()
    record = {"model": checkpoint.model_record(parts.model), "loader": parts.loader.state(), "tokenizer": "x"}
    keeper = checkpoint.Checkpoints(tmp_path / "checkpoints")
    keeper.save(1, parts.state, record)
    keeper.wait()
    other = decoder.init_params(replace(parts.model, layers=3), 0)
    with pytest.raises(UserError, match="another architecture"):
        keeper.restore(replace(parts.state, params=other))
    keeper.close()


def test_a_tokenizer_that_does_not_fit_is_refused(tiny_policy, tmp_path):
    """It has more tokens than the model, or another end-of-text token."""
    config = small_config(tiny_policy)
    shape = hf.read_config(tiny_policy)
    for change, message in (({"vocab_rows": 100}, "embedding rows"), ({"eos_ids": (400,)}, "not a control token")):
        model = replace(shape, **change)
        with pytest.raises(UserError, match=message):
            build.engine(
                replace(config, model=replace(config.model, path="", tokenizer=str(tiny_policy))),
                params=decoder.init_params(model, 0),
                model=model,
            )


def test_a_run_stops_after_updates_that_are_not_finite(tiny_policy, tmp_path, monkeypatch):
    """Also if only the first of a step's two mini-batches is bad; the message names the cause."""
    fields = {"train.steps": 3, "eval.questions_per_kind": 0}
    monkeypatch.setattr(alarms, "MAX_NONFINITE_UPDATES", 1)
    parts = build.training_run(small_config(tiny_policy, **fields))
    rewards, poisoned = parts.reward, iter([np.nan] * 4 + [0.0] * 1000)  # of 8 rollouts, in mini-batches of 4
    parts.reward = lambda ts: [replace(parts, total=next(poisoned)) for parts in rewards(ts)]
    with pytest.raises(UserError, match="step 0: loss or gradient was not finite in 1 updates in a row"):
        trainer.train(parts, tmp_path)
    (row,) = metrics_without_clocks(tmp_path)
    assert (row["skipped"], row["nonfinite_in_a_row"]) == (1, 1)
    causes = [parts.learner.nonfinite_cause({"nonfinite_param": index}) for index in (-1, 0)]
    assert causes == ["in the loss or the gradient's norm", "first in the gradient of embedding"]


@pytest.mark.slow
def test_figures_before_training_are_only_those_of_the_same_evaluation(tiny_policy, tmp_path, caplog):
    """They are kept if the reward changes, and dropped if the evaluation changes; none are made up afterwards."""
    fields = {"train.steps": 1, "eval.questions_per_kind": 2}
    first = trainer.train(build.training_run(small_config(tiny_policy, **fields)), tmp_path)
    assert set(first["before"]) == set(first["after"]) != set()
    for changes, kept in (({"reward.format": 0.2}, True), ({"eval.temperature": 0.5}, False)):
        run = build.training_run(small_config(tiny_policy, **fields, **changes))
        again = trainer.train(run, tmp_path, allow_changes=True)
        assert again["before"] == (first["before"] if kept else {}), changes
    assert "the summary will have no before figures" in caplog.text and not (tmp_path / "before.json").exists()


@pytest.mark.weekly
def test_learning_to_split_in_a_few_steps(tmp_path, monkeypatch):
    """Seven steps on parallel questions raise the reward and the share of splits."""
    # Only parallel questions: a few steps on all kinds would first learn one splitting rate for all of them.
    monkeypatch.setattr(questions, "WORLD_SHARES", {"parallel": 1.0})
    config = from_mapping(smoke.get_config().to_dict())
    config = replace(config, train=replace(config.train, steps=7))
    config = replace(config, eval=replace(config.eval, questions_per_kind=60))
    summary = trainer.train(build.training_run(config), tmp_path)
    before, after = (summary[moment]["parallel"]["decomposition_ratio"] for moment in ("before", "after"))
    assert after >= before + 0.15
    rewards = [row["reward"] for row in metrics_without_clocks(tmp_path)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])

"""The main loop, its run directory, and how it survives interruptions and bad inputs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from programs import Program
from runs import command, final_params, metrics_without_clocks, run, small_config, wait_for

from psearch_jax.assembly import build
from psearch_jax.config import from_mapping
from psearch_jax.models import decoder, hf
from psearch_jax.train import trainer
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.train.monitoring import validation
from psearch_jax.train.trainer import train_step
from psearch_jax.types import UserError


def test_a_killed_run_resumes_bit_for_bit(tiny_policy, tmp_path):
    """A resume that repeats a batch, a key or a metrics row, or restarts the optimizer, makes results unrepeatable."""
    run(command(tmp_path / "whole", tiny_policy, 4))
    killed = tmp_path / "killed"
    process = Program(command(killed, tiny_policy, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # Kill after step 3: later than the checkpoint, so that rows have to be removed.
    wait_for(lambda: (killed / "trajectories" / "000002.jsonl").is_file(), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "summary.json").is_file()
    run(command(killed, tiny_policy, 4))
    assert metrics_without_clocks(killed) == metrics_without_clocks(tmp_path / "whole")
    ours, theirs = final_params(killed), final_params(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)
    for name in ("000000", "000003"):
        a, b = ((w / "trajectories" / f"{name}.jsonl").read_text() for w in (killed, tmp_path / "whole"))
        assert a == b
    before, after = (json.loads((w / "summary.json").read_text()) for w in (killed, tmp_path / "whole"))
    assert before["before"] == after["before"] and before["after"] == after["after"]


def test_sigterm_saves_and_exits_cleanly(tiny_policy, tmp_path):
    """A preempted run that loses its last steps, or exits with an error, would make the scheduler start over."""
    long = command(tmp_path, tiny_policy, 1000, **{"train.checkpoint_every_steps": 1000})
    process = Program(long, stderr=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "trajectories" / "000000.jsonl").is_file(), process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)  # the grace period of a preempted machine
    assert process.returncode == 0 and "the same command resumes" in out
    step = checkpoint.read_loop(checkpoint.find_checkpoint(tmp_path))["step"]
    assert step == len(metrics_without_clocks(tmp_path)) >= 1
    other = {"reward.format": 0.2, "rollout.samples": 4}
    refused = run(command(tmp_path, tiny_policy, 1000, **other), expect=2).stderr
    (line,) = [line for line in refused.splitlines() if line.startswith("train: ")]
    assert "reward.format: 0.1, now 0.2" in line and "rollout.samples: 2, now 4" in line and "Traceback" not in refused


def test_no_step_after_the_first_compiles(tiny_policy):
    """A shape that changes from step to step would stop a run for minutes each time it first occurs."""
    parts = build.training_run(small_config(tiny_policy, **{"rollout.num_buckets": 2}))
    parts.begin()
    parts.collector.warm_up(parts.sampling_weights())
    parts.learner.warm_up(parts.state.params, parts.reference)
    train_step(parts, next(parts.loader), 0)
    once = {**parts.collector.sampler.compilations(), **parts.learner.compilations()}
    for step in range(1, 4):
        train_step(parts, next(parts.loader), step)
    assert {**parts.collector.sampler.compilations(), **parts.learner.compilations()} == once


def test_errors_of_rewards_are_not_those_of_the_disk(tiny_policy, tmp_path):
    """A judge that cannot be reached would be reported as a directory that cannot be written, its cause hidden."""
    for error in (ConnectionRefusedError("judge"), FileNotFoundError(2, "No such file", "/nonexistent/judge.json")):
        parts = build.training_run(small_config(tiny_policy))

        def judge(_, error=error):
            raise error

        parts.reward = judge
        with pytest.raises(type(error)) as raised:
            trainer.train(parts, tmp_path)
        assert raised.value is error


def test_half_a_line_of_metrics_before_the_first_checkpoint(tiny_policy, tmp_path, caplog):
    """A run that lost its power while it wrote its first rows could never start again."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1}\n{"step": 1, "rew')
    trainer.train(build.training_run(small_config(tiny_policy, **{"train.steps": 1})), tmp_path)
    assert "has metrics of 1 steps but no checkpoint" in caplog.text
    assert [row["step"] for row in metrics_without_clocks(tmp_path)] == [0]


def test_a_checkpoint_of_another_architecture_is_refused(tiny_policy, tmp_path):
    """Weights of another shape would end in a traceback from the reader, or be taken for damage."""
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


def test_everything_missing_is_listed_at_once(tmp_path):
    """A user who is told of only one missing input per start gives up at the third."""
    done = run(
        [sys.executable, "launch/train.py", "--config=configs/qwen7b.py", f"--workdir={tmp_path / 'w'}"]
        + ["--config.model.path=/nowhere/qwen"],
        expect=2,
    )
    headline, *needs = done.stderr.strip().splitlines()
    assert headline == "train: this run needs:" and len(needs) == 3
    parts = ("config.model.path=/nowhere/qwen", "config.data.source", "config.retrieval.index")
    assert all(need.startswith(f"  - {part}") for need, part in zip(needs, parts, strict=True))
    assert "build_index.py" in needs[2]
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    "field, message",
    [
        ("mesh.tensor=3", "is not the number of devices"),
        ("rollout.obs_tokens=8", "rollout.obs_tokens"),
        ("learning.mini_batch_rollouts=5", "multiple of rollout.samples"),
        ("data.template=/nowhere.txt", "prompt template"),
        ("no.such=1", "unknown"),
        ("train.stepz=1", "unknown"),
        ("train.steps=many", "steps"),
    ],
)
def test_a_bad_field_is_one_line(tiny_policy, tmp_path, field, message):
    """A traceback instead of a line that names the field would send the user into our code."""
    done = run([*command(tmp_path / "w", tiny_policy, 1), f"--config.{field}"], expect=2)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_tokenizer_that_does_not_fit_is_refused(tiny_policy, tmp_path):
    """Tokens past the last embedding row are clamped silently; with a wrong end-of-text token, rows never stop."""
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


def test_a_run_that_turns_bad_stops(tiny_policy, tmp_path):
    """NaN weights saved over good ones, or a night of steps that change nothing."""
    config = small_config(
        tiny_policy, **{"train.steps": 8, "learning.max_nonfinite_updates": 2, "eval.questions_per_kind": 0}
    )
    parts = build.training_run(config)
    parts.begin()
    poisoned = nnx.from_flat_state(
        [(path, v.replace(v.get_value() * np.nan)) for path, v in nnx.to_flat_state(parts.state.params)]
    )
    parts.state = replace(parts.state, params=poisoned)
    with pytest.raises(UserError, match="not finite"):
        trainer.train(parts, tmp_path)
    causes = [parts.learner.nonfinite_cause({"nonfinite_param": index}) for index in (-1, 0)]
    assert causes == ["in the loss or the gradient's norm", "first in the gradient of embedding"]


def test_bad_updates_inside_a_step_stop_the_run(tiny_policy, tmp_path):
    """The first of two mini-batches is always bad, the last good: a run that ignores half of its data continues."""
    fields = {"train.steps": 3, "learning.max_nonfinite_updates": 1, "eval.questions_per_kind": 0}
    parts = build.training_run(small_config(tiny_policy, **fields))
    rewards, poisoned = parts.reward, iter([np.nan] * 4 + [0.0] * 1000)  # of 8 rollouts, in mini-batches of 4
    parts.reward = lambda ts: [replace(parts, outcome=next(poisoned)) for parts in rewards(ts)]
    with pytest.raises(UserError, match="step 0: loss or gradient was not finite in 1 updates in a row"):
        trainer.train(parts, tmp_path)
    (row,) = metrics_without_clocks(tmp_path)
    assert (row["skipped"], row["nonfinite_in_a_row"]) == (1, 1)


def test_a_run_is_not_judged_by_what_it_cannot_do(tiny_policy, tmp_path, caplog):
    """A run with one search for the question gets a warning at every step that it does not search, and one that it
    will never split; a run without a reference reports a divergence of 0 from it."""
    fields = {"rollout.search_turns": 0, "rollout.initial_search": True, "alarms.window": 1}
    fields |= {"learning.kl_coefficient": 0.0, "train.steps": 1, "eval.questions_per_kind": 0}
    trainer.train(build.training_run(small_config(tiny_policy, **fields)), tmp_path)
    (row,) = metrics_without_clocks(tmp_path)
    assert row["searched_0"] == 1 and row["alarm/no_search"] == 0 and row["split/parallel"] == 0
    assert "split them" not in caplog.text and "kl" not in row and row["entropy"] > 0


@pytest.mark.slow
def test_what_was_not_evaluated_before_is_not_made_up(tiny_policy, tmp_path, caplog):
    """An evaluation of the trained policy reported as the one before training would hide everything learned."""
    fields = {"train.steps": 2, "train.checkpoint_every_steps": 1, "eval.questions_per_kind": 2}
    config = small_config(tiny_policy, **fields)
    first = trainer.train(build.training_run(config), tmp_path)
    assert set(first["before"]) == set(first["after"]) != set()
    (tmp_path / "before.json").unlink()
    again = trainer.train(build.training_run(config), tmp_path)
    assert again["before"] == {} and again["after"] == first["after"]
    assert "the summary will have no before figures" in caplog.text and not (tmp_path / "before.json").exists()


def test_the_greedy_figures_are_greedy(tmp_path, monkeypatch):
    """The figures named greedy are sampled, or replace those at the run's own temperature."""
    monkeypatch.setattr(validation, "evaluate_policy", lambda run, temperature: {"all": {"at": temperature}})
    config = from_mapping({"eval": {"temperature": 0.7, "also_greedy": True}})
    run = SimpleNamespace(config=config, evaluation=[1], phase=lambda _: nullcontext())
    evaluations = validation.evaluate_once(run, tmp_path / "before.json", policy_unchanged=True)
    assert evaluations == {"": {"all": {"at": 0.7}}, "_greedy": {"all": {"at": 0.0}}}
    assert validation.evaluate_once(run, tmp_path / "before.json", policy_unchanged=False) == evaluations


@pytest.mark.slow
def test_evaluations_of_two_kinds_are_not_compared(tiny_policy, tmp_path, caplog):
    """After a change of the evaluation, the old figures before training would be compared with new ones after it."""
    fields = {"train.steps": 1, "eval.questions_per_kind": 2}
    first = trainer.train(build.training_run(small_config(tiny_policy, **fields)), tmp_path)
    for changes, kept in (({"reward.format": 0.2}, True), ({"eval.temperature": 0.5}, False)):
        run = build.training_run(small_config(tiny_policy, **fields, **changes))
        again = trainer.train(run, tmp_path, allow_changes=True)
        assert again["before"] == (first["before"] if kept else {}), changes
    assert "before.json is missing" in caplog.text


@pytest.mark.slow
def test_the_export_of_a_run_loads_in_transformers(tiny_policy, tmp_path):
    """A result that only this project can load is of no use to anyone else."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run(command(tmp_path / "run", tiny_policy, 2))
    run([sys.executable, "launch/export_hf.py", f"--checkpoint={tmp_path / 'run'}", f"--out={tmp_path / 'hf'}"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    config, params, _ = checkpoint.load_params(checkpoint.find_checkpoint(tmp_path / "run"))
    ids = np.arange(24).reshape(2, 12) + 5
    with torch.no_grad(), jax.default_matmul_precision("highest"):
        model = nnx.merge(decoder.graphdef(config, np.float32), params)
        ours = model.logits(model.hidden(ids)[0], 1.0, config.vocab_rows)
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("born").input_ids
    again = run(
        [sys.executable, "launch/export_hf.py", f"--checkpoint={tmp_path / 'run'}", f"--out={tmp_path / 'hf'}"],
        expect=2,
    )
    assert "exists already" in again.stderr


@pytest.mark.slow
def test_real_questions_and_passages_run_through(shared_data, tmp_path):
    """The closed world lacks what real text has: long passages, foreign scripts, a vocabulary of 151,646 tokens."""
    arguments = [sys.executable, "launch/train.py", "--config=configs/hotpot_sample.py", f"--workdir={tmp_path}"]
    arguments += [f"--config.data.source={shared_data / 'hotpotqa100' / 'questions.jsonl'}"]
    arguments += [f"--config.retrieval.corpus={shared_data / 'hotpotqa100' / 'corpus.jsonl'}"]
    arguments += [f"--config.model.tokenizer={shared_data / 'qwen2_tokenizer'}", "--config.train.steps=2"]
    arguments += ["--config.rollout.num_buckets=1"]  # every width is compiled
    run(arguments)
    corpus = (shared_data / "hotpotqa100" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    known = {json.loads(line)["id"] for line in corpus}
    rows = [json.loads(line) for file in (tmp_path / "trajectories").glob("*.jsonl") for line in file.open()]
    passage_ids = [{p["id"] for turn in row["turns"] for ps in turn["passages"] for p in ps} for row in rows]
    assert len(rows) == 16 and all(ids <= known for ids in passage_ids)
    assert np.mean([bool(ids) for ids in passage_ids]) >= 0.9
    for row in rows:
        assert len(row["ids"]) == len(row["mask"]) == len(row["logprobs"])
        assert sum(row["mask"]) == sum(turn["n_sampled"] for turn in row["turns"])


@pytest.mark.slow
def test_learning_to_split_in_a_few_steps(tmp_path):
    """A run that works but learns nothing: a wrong sign, a mask off by one, or a reward assigned to the wrong row."""
    # Only parallel questions: a few steps on all kinds would first learn one splitting rate for all of them.
    fields = {"train.steps": 7, "eval.questions_per_kind": 60, "eval.also_greedy": False, "data.parallel_share": 1.0}
    fields["data.sequential_share"] = 0.0
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    run([sys.executable, "launch/train.py", "--config=configs/smoke.py", f"--workdir={tmp_path}", *flags])
    summary = json.loads((tmp_path / "summary.json").read_text())
    before, after = (summary[moment]["parallel"]["decomposition_ratio"] for moment in ("before", "after"))
    assert after >= before + 0.15
    rewards = [row["reward"] for row in metrics_without_clocks(tmp_path)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])
    assert set(summary["before"]) == {"all", "pairs", "parallel", "sequential", "single", "mixed"}
    figures = {"em", "f1", "decomposition_ratio", "searches", "sub_queries", "turns", "valid_format", "questions"}
    figures |= {"tokens", "context", "llm_calls", "chance"}
    after, plan = summary["after"], {"independent_at_once", "dependent_in_order"}
    split = figures | {"decomposition_accuracy"}
    assert set(after["mixed"]) == figures | plan
    assert set(after["parallel"]) == split | {"independent_at_once"}
    assert set(after["sequential"]) == split | {"dependent_in_order"}
    assert set(after["pairs"]) == split | plan
    assert after["all"]["questions"] == 240

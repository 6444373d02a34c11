"""The best checkpoint of a run: which metric selects it, what removes it, and which programs use it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx
from helpers import random_params, tiny_config
from programs import ROOT
from runs import metrics_without_clocks, run, small_config

from psearch_jax.assembly import build, policy_flags
from psearch_jax.closed_world import question_forms
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.eval.evaluate import questions_digest
from psearch_jax.models import decoder
from psearch_jax.train import trainer
from psearch_jax.train.checkpointing import checkpoint, preemption
from psearch_jax.train.checkpointing.best import Best, find_best
from psearch_jax.train.monitoring import validation
from psearch_jax.train.monitoring.records import write_config
from psearch_jax.types import UserError
from retrieval.protocol import RetrievalError

WON = {"step": 2, "metric": "em", "questions": "of these", "value": 0.5}


def kept(workdir) -> list[str]:
    return [p.name for p in checkpoint.find_checkpoints(workdir / "best")]


def test_only_what_is_better_is_kept(tmp_path):
    """The last saved checkpoint would be kept instead of the best, or a restart would forget the best."""
    config = tiny_config(8)
    loop = {"model": checkpoint.model_record(config), "tokenizer": "x"}

    def offered(best, *values):
        for step, value in values:
            best.offer(step, value, decoder.init_params(config, step), loop)
        best.close()
        return best.record

    first = Best(tmp_path, "em", "of these")
    assert first.record is None
    assert offered(first, (1, 0.2), (2, 0.5), (3, 0.5), (4, 0.1)) == WON
    assert kept(tmp_path) == ["2"]
    (tmp_path / "best" / "9.orbax-checkpoint-tmp").mkdir()  # left by a kill while saving
    again = Best(tmp_path, "em", "of these")
    assert again.record == first.record and kept(tmp_path) == ["2"]
    # A killed run repeats steps with the same values, and then continues.
    assert offered(again, (1, 0.2), (2, 0.5), (3, 0.5), (5, 0.6))["step"] == 5
    assert kept(tmp_path) == ["5"]
    _, params, read = checkpoint.load_params(find_best(tmp_path))
    assert read["best"] == {"metric": "em", "questions": "of these", "value": 0.6} and read["step"] == 5
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), params, decoder.init_params(config, 5))
    assert all(jax.tree.leaves(same))
    # A value of another metric, or of other questions, replaces the kept one.
    assert offered(Best(tmp_path, "f1", "of these"), (6, 0.1))["metric"] == "f1"
    assert offered(Best(tmp_path, "f1", "of others"), (7, 0.05), (8, 0.04))["step"] == 7 and kept(tmp_path) == ["7"]
    # A run that restarts from an earlier step with other settings sets a best checkpoint of a later step aside.
    assert offered(Best(tmp_path, "f1", "of others", until=7))["step"] == 7
    assert offered(Best(tmp_path, "f1", "of others", until=6), (7, 0.01))["value"] == 0.01 and kept(tmp_path) == ["7"]
    assert offered(Best(tmp_path, "f1", "of others", until=5), (6, 0.01))["step"] == 6 and kept(tmp_path) == ["6"]
    earlier = [p.name for p in (tmp_path / "best").glob("*.earlier*")]
    assert sorted(earlier) == ["7.earlier", "7.earlier.again"], "it may be all that is left of a run"
    with pytest.raises(UserError, match="--best: .*nothing/best holds no checkpoint"):
        find_best(tmp_path / "nothing")


@pytest.mark.parametrize("contents", ['{"step": 4, "be', '{"step": 4}', "[]"])
def test_a_damaged_best_checkpoint_is_set_aside(tmp_path, contents, caplog):
    """A file that no run needs for resuming would stop every start of a run whose checkpoints are intact."""
    config = tiny_config(8)
    loop = {"model": checkpoint.model_record(config), "tokenizer": "x"}
    best = Best(tmp_path, "em")
    best.offer(4, 0.5, decoder.init_params(config, 0), loop)
    best.close()
    (tmp_path / "best" / "4" / "loop" / "metadata").write_text(contents)
    again = Best(tmp_path, "em")
    assert again.record is None and "the next evaluation starts a new best" in caplog.text
    assert again.offer(4, 0.1, decoder.init_params(config, 1), loop)
    again.close()
    assert kept(tmp_path) == ["4"] and (tmp_path / "best" / "4.unreadable").is_dir()
    assert Best(tmp_path, "em").record["value"] == 0.1


@pytest.mark.parametrize(
    ("changed", "replaced"),
    [
        ({}, False),
        ({"learning.learning_rate": 1.0}, False),
        ({"eval.temperature": 1.0}, True),
        ({"rollout.turn_tokens": 9}, True),
        ({"data.source": {"names": "other", "is": "1"}}, True),
        ({"data.source": {"names": "other", "is": "1"}, "data.validation": {"names": "v", "is": "2"}}, False),
    ],
)
def test_values_under_other_settings_are_not_compared(tmp_path, changed, replaced):
    """A best of sampled answers would never be replaced by greedy ones."""
    config = tiny_config(8)
    before = {"eval.temperature": 0.0, "rollout.turn_tokens": 8, "learning.learning_rate": 0.1}
    before |= {"data.source": {"names": "s", "is": "0"}}
    before |= {"data.validation": {"names": "v", "is": "2"}} if "data.validation" in changed else {}
    loop = {"model": checkpoint.model_record(config), "tokenizer": "x", "settings": before}
    best = Best(tmp_path, "em", "of these", before)
    best.offer(4, 0.5, decoder.init_params(config, 0), loop)
    best.close()
    again = Best(tmp_path, "em", "of these", before | changed)
    assert again.offer(5, 0.3, decoder.init_params(config, 1), loop | {"settings": before | changed}) is replaced
    assert again.offer(6, 0.2, decoder.init_params(config, 2), loop) is False, "the new scale holds from then on"
    again.close()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_checkpoint_is_read_in_the_dtype_asked_for(tmp_path, dtype):
    """A 16-bit export would load float32 weights, 30 GB for 7B, and need more than twice the memory."""
    config = tiny_config(8)
    best, written = Best(tmp_path, "em"), random_params(config)
    best.offer(1, 0.5, written, {"model": checkpoint.model_record(config), "tokenizer": "x"})
    best.close()
    _, params, _ = checkpoint.load_params(find_best(tmp_path), dtype=dtype)
    for loaded, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(written), strict=True):
        assert loaded.dtype == dtype and np.array_equal(np.asarray(loaded), np.asarray(wanted).astype(dtype))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Training questions of the closed world, as a user's file."""
    file = tmp_path_factory.mktemp("questions") / "train.jsonl"
    sampled = question_forms.questions(ClosedWorld.make(0), "train", "single", 60, 0)
    rows = [{"id": q.id, "question": q.text, "golden_answers": list(q.answers)} for q in sampled]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def settings(policy, file, **fields):
    """The config of a run on a user's file, without a corpus."""
    values = {"data.source": str(file), "data.validation_share": 0.2, "rollout.search_turns": 0}
    values |= {"eval.every_steps": 1, "eval.questions_per_kind": 3, "train.checkpoint_every_steps": 1}
    return small_config(policy, **{**values, **fields})


def test_a_file_of_questions_is_validated(tiny_policy, questions, tmp_path):
    """A run on real questions would show only its training reward until somebody evaluates it by hand."""
    parts = build.training_run(settings(tiny_policy, questions, **{"train.steps": 2}))
    parts.begin()
    left = Best(tmp_path, "em", questions_digest(parts.evaluation))  # of a run killed before its first checkpoint
    left.offer(9, 1.0, parts.state.params, {"model": checkpoint.model_record(parts.model), "tokenizer": "x"})
    left.close()
    held = {q.id for q in parts.evaluation}
    assert len(held) == 3
    summary = trainer.train(parts, tmp_path)
    first, last = metrics_without_clocks(tmp_path)
    assert first["eval/all/questions"] == 3 and "eval/single/em" in first and "eval/all/em" not in last
    assert summary["before"]["all"]["questions"] == summary["after"]["all"]["questions"] == 3
    rows = [json.loads(line) for file in (tmp_path / "trajectories").glob("*") for line in file.open()]
    assert len({row["question_id"] for row in rows}) == 8 and not held & {row["question_id"] for row in rows}
    best = summary["best"]
    assert (best["step"], best["metric"], best["value"]) == (1, "em", first["eval/all/em"])
    assert best["questions"].startswith("3 ") and kept(tmp_path) == ["1"]


@pytest.mark.parametrize("lost", [False, True], ids=["stopped", "retriever lost"])
def test_an_interrupted_evaluation_is_repeated(tiny_policy, questions, tmp_path, monkeypatch, lost, caplog):
    """The best policy would never be kept if a preemption arrives during its evaluation."""
    config = settings(tiny_policy, questions, **{"train.steps": 4})
    values = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.3, 4: 0.4}
    interrupted = []

    def measured(run, temperature):
        step = int(run.state.updates) // 2
        if step == 2 and len(interrupted) < 2:  # also when it is repeated
            interrupted.append(step)
            raise RetrievalError("unreachable") if lost else preemption.Interrupted("asked to stop")
        return {"all": {"em": values[step]}}

    monkeypatch.setattr(validation, "measured", measured)
    for _ in range(2):
        with pytest.raises((RetrievalError, preemption.Interrupted), match="unreachable" if lost else "after step 2"):
            trainer.train(build.training_run(config), tmp_path / "cut")
    assert not lost or "lost the retriever; saved after step 2; the same command resumes" in caplog.text
    summary = trainer.train(build.training_run(config), tmp_path / "cut")
    assert (summary["best"]["step"], summary["best"]["value"]) == (2, 0.9)
    trainer.train(build.training_run(config), tmp_path / "whole")
    rows = metrics_without_clocks(tmp_path / "cut")
    assert rows == metrics_without_clocks(tmp_path / "whole")
    assert [row.get("eval/all/em") for row in rows] == [0.2, 0.9, 0.3, None]


@pytest.mark.slow
def test_the_best_survives_retention_and_an_interruption(tiny_policy, questions, tmp_path, monkeypatch):
    """Newer checkpoints, or a run that was killed and resumed, would remove the best checkpoint."""
    config = settings(tiny_policy, questions, **{"train.steps": 5, "train.keep_checkpoints": 1})
    values = {0: 0.9, 1: 0.2, 2: 0.6, 3: 0.4, 4: 0.5, 5: 0.6}

    def measured(run, temperature):  # a random policy is always wrong, so its EM is set here
        return {"all": {"em": values[int(run.state.updates) // 2]}}

    monkeypatch.setattr(validation, "measured", measured)
    parts = build.training_run(config)
    rewards, left = parts.reward, iter(range(8 * 3))

    def reward(trajectory):
        next(left)  # raises StopIteration in step 3
        return rewards(trajectory)

    parts.reward = reward
    with pytest.raises(StopIteration):
        trainer.train(parts, tmp_path)
    best = find_best(tmp_path)
    before = {p.relative_to(best): p.read_bytes() for p in best.rglob("*") if p.is_file()}
    assert best.name == "2"
    summary = trainer.train(build.training_run(config), tmp_path)
    assert (summary["best"]["step"], summary["best"]["value"]) == (2, 0.6)
    assert {p.relative_to(best): p.read_bytes() for p in best.rglob("*") if p.is_file()} == before
    assert [p.name for p in checkpoint.find_checkpoints(tmp_path)] == ["5"]


@pytest.mark.slow
def test_export_and_evaluation_take_the_best(tiny_policy, questions, tmp_path):
    """The newest checkpoint would be evaluated or exported under the name of the best."""
    run_dir, parts = tmp_path / "run", build.training_run(settings(tiny_policy, questions))
    record = {"model": checkpoint.model_record(parts.model), "tokenizer": parts.tokenizer_path}
    parts.begin()
    best = Best(run_dir, "em")
    best.offer(3, 0.25, parts.state.params, record)
    best.close()
    keeper = checkpoint.Checkpoints(run_dir / "checkpoints")
    double = nnx.from_flat_state(
        [(path, v.replace(2 * v.get_value())) for path, v in nnx.to_flat_state(parts.state.params)]
    )
    keeper.save(4, replace(parts.state, params=double), {**record, "loader": parts.loader.state()})
    keeper.wait()
    keeper.close()
    program = [sys.executable, "launch/export_hf.py", f"--checkpoint={run_dir}"]
    assert "step 4 ->" in run([*program, f"--out={tmp_path / 'newest'}"]).stdout
    done = subprocess.run(  # needs no accelerator, whatever JAX_PLATFORMS says
        [*program, "--best", f"--out={tmp_path / 'best'}"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "step 3, the best by em (0.2500) ->" in done.stdout, done.stderr[-2000:]
    assert "orbax" not in done.stderr.lower(), "Orbax's log is hidden"
    files = [tmp_path / name / "model.safetensors" for name in ("newest", "best")]
    assert files[0].read_bytes() != files[1].read_bytes() == (tiny_policy / "model.safetensors").read_bytes()
    program = [sys.executable, "launch/eval.py", f"--model={run_dir}", "--best", "--benchmark=closed_world:single"]
    small = [
        "--config=configs/smoke.py",
        "--count=2",
        "--config.rollout.slots=8",
        "--config.rollout.search_turns=0",
        "--config.rollout.turn_tokens=8",
    ]
    run([*program, *small, f"--out={tmp_path / 'results'}"])
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["model"] == str(run_dir / "best" / "3")
    shutil.rmtree(run_dir / "checkpoints")  # as in a copy of only the best checkpoint
    write_config(run_dir, replace(parts.given, method="r1"), 0)
    if "retriever_url" not in flags.FLAGS:
        policy_flags.define_flags("toy")
    flags.FLAGS([""])
    with flagsaver.flagsaver(model=str(run_dir), best=True):
        served = policy_flags.to_serve(ROOT, 8)
    assert served.method == "r1" and served.rollout.turn_tokens == parts.config.rollout.turn_tokens
    assert "holds no checkpoint" in run([*program, *small, f"--model={tiny_policy}", "--out=x"], expect=2).stderr

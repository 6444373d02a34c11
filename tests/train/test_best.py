"""The best checkpoint of a run: which evaluations set it, what it survives, and which programs use it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import jax
import pytest
from runs import metrics_without_clocks, run, small_config

from psearch_jax.assembly import build
from psearch_jax.closed_world import question_forms
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.eval.evaluate import questions_digest
from psearch_jax.train import trainer
from psearch_jax.train.checkpointing import checkpoint, preemption
from psearch_jax.train.checkpointing.best import Best, find_best
from psearch_jax.train.monitoring import validation
from retrieval.protocol import RetrievalError


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


def test_a_run_on_a_file_is_validated_on_held_out_questions(tiny_policy, questions, tmp_path):
    """Held-out questions are evaluated and never trained on; a best of a run without a checkpoint is set aside."""
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
    assert best["questions"].startswith("3 ") and find_best(tmp_path).name == "1"


@pytest.mark.parametrize("lost", [False, True], ids=["stopped", "retriever lost"])
def test_an_interrupted_evaluation_is_repeated(tiny_policy, questions, tmp_path, monkeypatch, lost, caplog):
    """A resumed run evaluates first, and keeps the best over the retention of newer checkpoints."""
    config = settings(tiny_policy, questions, **{"train.steps": 4, "train.keep_checkpoints": 1})
    values = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.3, 4: 0.4}
    interrupted = []

    def measured(run, temperature):  # a random policy is always wrong, so its EM is set here
        step = int(run.state.updates) // 2
        if step == 2 and len(interrupted) < 2:  # also when it is repeated
            interrupted.append(step)
            raise RetrievalError("unreachable") if lost else preemption.Interrupted("asked to stop")
        return {"all": {"em": values[step]}}

    monkeypatch.setattr(validation, "evaluate_policy", measured)
    for _ in range(2):
        with pytest.raises((RetrievalError, preemption.Interrupted), match="unreachable" if lost else "after step 2"):
            trainer.train(build.training_run(config), tmp_path)
    assert not lost or "lost the retriever; saved after step 2; the same command resumes" in caplog.text
    summary = trainer.train(build.training_run(config), tmp_path)
    assert (summary["best"]["step"], summary["best"]["value"]) == (2, 0.9) and find_best(tmp_path).name == "2"
    assert [row.get("eval/all/em") for row in metrics_without_clocks(tmp_path)] == [0.2, 0.9, 0.3, None]
    assert [p.name for p in checkpoint.find_checkpoints(tmp_path)] == ["4"]


@pytest.mark.slow
def test_export_and_evaluation_take_the_best(tiny_policy, questions, tmp_path):
    """--best selects the best checkpoint, without it the newest is used."""
    run_dir, parts = tmp_path / "run", build.training_run(settings(tiny_policy, questions))
    record = {"model": checkpoint.model_record(parts.model), "tokenizer": parts.tokenizer_path}
    parts.begin()
    best = Best(run_dir, "em")
    best.offer(3, 0.25, parts.state.params, record)
    best.close()
    checkpoints = checkpoint.Checkpoints(run_dir / "checkpoints")
    double = jax.tree.map(lambda x: 2 * x, parts.state.params)
    checkpoints.save(4, replace(parts.state, params=double), {**record, "loader": parts.loader.state()})
    checkpoints.close()
    program = [sys.executable, "launch/export_hf.py", f"--checkpoint={run_dir}"]
    assert "step 4 ->" in run([*program, f"--out={tmp_path / 'newest'}"]).stdout
    assert "step 3, the best by em (0.2500) ->" in run([*program, "--best", f"--out={tmp_path / 'best'}"]).stdout
    files = [tmp_path / name / "model.safetensors" for name in ("newest", "best")]
    assert files[0].read_bytes() != files[1].read_bytes() == (tiny_policy / "model.safetensors").read_bytes()
    program = [sys.executable, "launch/eval.py", f"--model={run_dir}", "--best", "--benchmark=closed_world:single"]
    small = {"rollout.slots": 8, "rollout.search_turns": 0, "rollout.turn_tokens": 8}
    program += ["--config=configs/smoke.py", "--count=2", *(f"--config.{k}={v}" for k, v in small.items())]
    run([*program, f"--out={tmp_path / 'results'}"])
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["model"] == str(run_dir / "best" / "3")
    assert "holds no checkpoint" in run([*program, f"--model={tiny_policy}", "--out=x"], expect=2).stderr

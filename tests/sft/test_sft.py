"""launch/sft.py on transcripts: what it learns, resumes and writes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from dataclasses import replace

import pytest
from programs import Program, completed, wait_until
from runs import small_config

from psearch_jax.assembly import build, build_sft
from psearch_jax.config import SFTSection
from psearch_jax.runtime import cli
from psearch_jax.sft import learner, trainer
from psearch_jax.train.checkpointing.preemption import Interrupted
from psearch_jax.train.checkpointing.run_config import load_run_config
from psearch_jax.types import UserError

NAMES = ("Ada", "Alan", "Grace", "Edsger", "Barbara", "Donald", "Frances", "John")


@pytest.fixture(scope="module")
def policy(wordy_policy, tmp_path_factory):
    """The random policy with a short prompt template in its directory."""
    folder = tmp_path_factory.mktemp("policy") / "hf"
    shutil.copytree(wordy_policy, folder)
    (folder / "template.txt").write_text("Answer: {question}")
    return folder


@pytest.fixture(scope="module")
def transcripts(tmp_path_factory):
    """Transcripts that answer with the first name after a search of two queries."""
    file = tmp_path_factory.mktemp("transcripts") / "rows.jsonl"
    rows = []
    for i, name in enumerate(NAMES):
        other = NAMES[(i + 1) % len(NAMES)]
        passages = [[{"title": n, "text": f"{n} was born in {1800 + len(n)}."}] for n in (name, other)]
        search = f"<think> need </think> <search> {name} ## {other} </search>"
        turns = [{"text": search, "passages": passages}, {"text": f"<think> so </think> <answer> {name} </answer>"}]
        rows.append({"question": f"{name} or {other}?", "turns": turns})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_for(policy, lora_rank=0, **section):
    config = small_config(policy)
    rollout = replace(config.rollout, context_tokens=512, obs_tokens=120, prompt_tokens=200)
    section = {"epochs": 3, "batch_rows": 4, "learning_rate": 1e-2, **section}
    model = replace(config.model, lora_rank=lora_rank, lora_alpha=8.0)
    data = replace(config.data, template=str(policy / "template.txt"))
    return replace(config, rollout=rollout, model=model, data=data, sft=SFTSection(**section))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_it_learns_and_is_a_run_directory(policy, transcripts, tmp_path, lora_rank):
    """The loss falls, other programs open the run directory, and a finished run returns its summary again."""
    config = config_for(policy, lora_rank, validation_share=0.25)
    run = build_sft.supervised_run(config, str(transcripts))
    summary = trainer.train(run, tmp_path)
    losses = list(summary["validation_loss"].values())
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.05
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-2]["loss"] < rows[1]["loss"] and rows[-2]["progress"] == 1.0
    assert summary["steps"] == summary["epochs"] == 3
    parts = build.from_path(replace(config, model=replace(config.model, path="")), str(tmp_path))
    assert (parts.config.model.lora_rank == lora_rank) and parts.sampling_weights()
    assert run.initial_state is None, "the weights of step 0 stay in memory"
    progress = [row["progress"] for row in rows if "progress" in row]
    assert progress == sorted(progress) and len(set(progress)) == 3, "of the run, not of an epoch"
    again = trainer.train(build_sft.supervised_run(config, str(transcripts)), tmp_path)
    assert again == summary == json.loads((tmp_path / "summary.json").read_text()), "nothing was left to do"
    (tmp_path / "summary.json").unlink()  # killed before it was written
    again = trainer.train(build_sft.supervised_run(config, str(transcripts)), tmp_path)
    assert again["validation_loss"] == summary["validation_loss"]


def test_a_run_that_begins_again_keeps_nothing_of_the_last_start(policy, tmp_path):
    """Metrics of an earlier start are dropped, and the config is recorded without the changes of its method."""
    file = tmp_path / "rows.jsonl"
    turns = [
        {"text": "<think> a </think> <search> Ada </search>", "passages": [[{"title": "Ada", "text": "Born."}]]},
        {"text": "<think> so </think> <answer> Ada </answer>"},
    ]
    file.write_text("".join(json.dumps({"question": f"{name}?", "turns": turns}) + "\n" for name in NAMES))
    config = replace(config_for(policy, epochs=1, validation_share=0.25), method="search_r1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "validation/loss": 99.0}\n')
    summary = trainer.train(build_sft.supervised_run(config, str(file)), tmp_path / "run")
    assert 0 < summary["validation_loss"]["0"] < 50
    recorded = load_run_config(str(tmp_path / "run"))
    assert recorded.retrieval == config.retrieval and recorded.reward == config.reward
    assert recorded.retrieval.max_sub_queries > 1 and recorded.method == "search_r1"


def test_the_loss_is_a_mean_and_bad_input_is_refused(policy, transcripts, tmp_path):
    """The loss does not depend on packing, and other transcripts, an impossible batch or bad files are refused."""
    losses = []
    for micro_batch_rows in (1, 8):
        config = config_for(policy)
        config = replace(config, learning=replace(config.learning, micro_batch_rows=micro_batch_rows))
        run = build_sft.supervised_run(config, str(transcripts))
        assert run.initial_state is not None and isinstance(run.batches, learner.RowBatches)
        state = run.initial_state()
        _, pieces = run.batches[0]
        _, metrics = run.trainer.update_micro_batches(run.initial_state(), pieces)
        batch = learner.row_batch([run.batches._rows[i] for i in run.batches._batches[0]])
        by_row = run.trainer.score(state.params, batch)
        assert metrics["loss"] == pytest.approx(-by_row.sum() / batch.mask.sum(), rel=1e-5)
        losses.append(metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert isinstance(run.batches, learner.RowBatches)
    batches = run.batches._batches  # an epoch has every row once
    first, second = ([i for step in steps for i in batches[step].tolist()] for steps in ((0, 1), (2, 3)))
    assert sorted(first) == sorted(second) == list(range(len(NAMES))) and first != second
    with pytest.raises(UserError, match="config.sft.batch_rows: found 9 with 8 training transcripts"):
        build_sft.supervised_run(config_for(policy, batch_rows=9), str(transcripts))
    trainer.train(build_sft.supervised_run(config_for(policy, epochs=1), str(transcripts)), tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text(transcripts.read_text().replace("Ada", "Eva"))
    with pytest.raises(UserError, match="other settings, transcripts"):
        trainer.train(build_sft.supervised_run(config_for(policy, epochs=1), str(other)), tmp_path)


def test_a_stop_during_the_validation_saves(policy, transcripts, tmp_path):
    """The loss on held-out rows may take longer than a machine waits after SIGTERM."""
    run = build_sft.supervised_run(config_for(policy, epochs=2, validation_share=0.25), str(transcripts))

    def stop(*arguments):
        run.stop.arrived = bool(losses)  # in the second validation
        losses.append(measure(*arguments))
        return losses[-1]

    losses, measure, run.trainer.mean_loss = [], run.trainer.mean_loss, stop
    with pytest.raises(Interrupted, match=f"after step {run.steps_per_epoch}"):
        trainer.train(run, tmp_path)
    assert len(losses) == 1 and _checkpoints(tmp_path) == {str(run.steps_per_epoch)}


def test_every_step_learns():
    """The warm-up begins above 0."""
    rates = [float(learner.cosine_schedule(1.0, 4, 0.5)(i)) for i in range(4)]
    assert rates[0] == 0.5 and rates[1] == 1.0 > rates[2]
    rates = [float(learner.cosine_schedule(1.0, n)(0)) for n in (1, 2, 15, 30, 60)]
    assert rates == pytest.approx([1, 1, 1, 0.5, 1 / 3]), "no first step at rate 0"


def command(policy, transcripts, workdir) -> list[str]:
    fields = {
        "model.path": policy,
        "data.source": "",
        "data.template": policy / "template.txt",
        "rollout.context_tokens": 512,
        "rollout.prompt_tokens": 200,
        "rollout.obs_tokens": 120,
        "sft.epochs": 20,
        "sft.batch_rows": 2,
        "sft.learning_rate": 1e-3,
        "train.checkpoint_every_steps": 10,
        "learning.micro_batch_rows": 2,
    }
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    files = [f"--transcripts={transcripts}", f"--workdir={workdir}"]
    return ["launch/sft.py", "--config=configs/smoke.py", *files, *flags]


def test_a_killed_run_resumes_to_the_same_weights(policy, transcripts, tmp_path):
    """Stops and a kill leave the weights of an uninterrupted run; no policy is overwritten, a bad file is refused."""
    complete, killed = tmp_path / "complete", tmp_path / "killed"
    done = completed([sys.executable, *command(policy, transcripts, complete)])
    assert done.returncode == 0 and "policy: written" in done.stdout, done.stderr[-2000:]
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, cli.INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)):
        process = Program(command(policy, transcripts, killed))
        started = len(_checkpoints(killed))
        wait_until(lambda: len(_checkpoints(killed)) > started or process.poll() is not None, 300)  # noqa: B023
        process.send_signal(number)
        out, _ = process.communicate()
        assert process.returncode == code
        assert not (killed / "policy").exists()
        assert number == signal.SIGKILL or "the same command resumes" in out
    again = completed([sys.executable, *command(policy, transcripts, killed)])
    assert again.returncode == 0 and "resuming after step" in again.stderr, again.stderr[-2000:]
    names = [tuple((place / "policy").iterdir()) for place in (complete, killed)]
    assert {p.name for p in names[0]} == {p.name for p in names[1]}
    weights = [(place / "policy" / "model.safetensors").read_bytes() for place in (complete, killed)]
    assert weights[0] == weights[1]
    exported = load_run_config(str(complete / "policy"))
    assert exported and exported.rollout.obs_tokens == 120, "the policy is evaluated with other budgets"
    broken = killed / "broken.jsonl"
    broken.write_text(transcripts.read_text() + "{\n")
    for file, words in ((transcripts, "exists already"), (broken, "broken.jsonl: line 9: not JSON")):
        refused = completed([sys.executable, *command(policy, file, killed if file == transcripts else killed / "x")])
        assert refused.returncode == 2 and words in refused.stderr and refused.stderr.count("\n") == 1


def _checkpoints(workdir) -> set[str]:
    return {place.name for place in (workdir / "checkpoints").glob("*") if place.name.isdigit()}

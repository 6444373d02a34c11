"""How a run resumes: which settings must match, which may change, and SIGTERM at any moment. One set of compiled
programs serves all runs, as if each were a process of its own."""

from __future__ import annotations

import json
import os
import signal
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import same_bits
from runs import assert_same_run, metrics_without_clocks, small_config

from psearch_jax.assembly import build
from psearch_jax.config import Config, from_mapping, to_mapping
from psearch_jax.train import saving, trainer
from psearch_jax.train.checkpointing import checkpoint, preemption, settings
from psearch_jax.train.state import schedule, updates_per_step, with_schedule
from psearch_jax.train.trainer import train_step
from psearch_jax.types import RewardParts, UserError

FIELDS = {
    "rollout.context_tokens": 72,
    "rollout.obs_tokens": 96,
    "learning.micro_batch_rows": 2,
    "learning.warmup_ratio": 0.5,
    "train.steps": 3,
    "train.checkpoint_every_steps": 1000,
    "eval.questions_per_kind": 0,
}


@pytest.fixture(scope="module")
def parts(tiny_policy):
    """A run whose steps have two updates of two micro-batches each, with its initial state kept for later runs."""
    return build_run(tiny_policy)


@pytest.fixture(scope="module")
def ppo(tiny_policy):
    """The same with a critic."""
    return build_run(
        tiny_policy, **{"learning.algorithm": "ppo", "learning.kl_in": "reward", "critic.warmup_ratio": 0.5}
    )


def build_run(policy: Path, **fields) -> trainer.Run:
    built = build.training_run(small_config(policy, **FIELDS, **fields))
    built.reward = lambda rollouts: [  # a random policy earns no other
        RewardParts({}, int(t.ids.sum()) % 7 / 7) for t in rollouts
    ]
    built.begin()
    built.start = jax.device_get(built.state), built.loader.state()
    return built


def restart(parts: trainer.Run, **fields) -> trainer.Run:
    """The run as a new process would build it, with other settings."""
    values = to_mapping(parts.config)
    for name, value in fields.items():
        section, _, key = name.partition(".")
        values[section][key] = value
    config = from_mapping(values)
    state, loader = parts.start
    parts.loader.restore(loader)
    contents = {k: (v["names"], v["is"]) for k, v in parts.settings.items() if isinstance(v, dict)}
    placement = jax.tree.map(lambda x: x.sharding, parts.abstract)
    changed = {"config": config, "user_config": config, "settings": settings.record(config, contents), "state": None}
    updates = schedule(config.learning, updates_per_step(config) * config.train.steps)
    changed |= {
        "initial_state": lambda: with_schedule(jax.device_put(state, placement), updates),
        "stop": preemption.StopRequest(),
        "stream": parts.collector.stream(config.rollout.samples, config.seed),
        "wall_s": defaultdict(float),
    }
    return replace(parts, **changed)


def listing(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """The directory of an uninterrupted run of three steps."""
    directory = tmp_path_factory.mktemp("whole")
    trainer.train(restart(parts), directory)
    return directory


# ---- settings that must match ----


def test_every_difference_is_listed_and_nothing_changes(parts, tmp_path):
    """A resume under other settings is refused in one line that names each of them."""
    trainer.train(restart(parts, **{"train.steps": 1}), tmp_path)
    before = listing(tmp_path)
    other = {"reward.format": 0.2, "learning.kl_coefficient": 0.5, "rollout.samples": 4, "model.lora_alpha": 8.0}
    run = restart(parts, **other)
    run.settings["model.path"] = {"names": "/another/model", "is": "0"}
    with pytest.raises(UserError) as caught:
        trainer.train(run, tmp_path)
    line = str(caught.value)
    assert "after step 1" in line and "--allow_changes" in line and "\n" not in line
    for words in (
        "reward.format: 0.1, now 0.2",
        "learning.kl_coefficient: 0.001, now 0.5",
        "rollout.samples: 2, now 4",
        "model.lora_alpha: 32.0, now 8.0",
        "now '/another/model'",
    ):
        assert words in line
    assert listing(tmp_path) == before


def test_changes_are_accepted_by_a_flag_and_recorded(parts, tmp_path, caplog):
    """With `allow_changes` the run continues, and the old config is kept with the step until which it applied."""
    trainer.train(restart(parts, **{"train.steps": 1}), tmp_path)
    old = (tmp_path / "config.json").read_text()
    changed = {"reward.format": 0.2, "learning.warmup_ratio": 1.0, "train.steps": 2}
    trainer.train(restart(parts, **changed), tmp_path, allow_changes=True)
    assert "reward.format: 0.1, now 0.2" in caplog.text
    assert (tmp_path / "config.until_000001.json").read_text() == old
    assert json.loads((tmp_path / "config.json").read_text())["reward"]["format"] == 0.2
    rates = [row["learning_rate"] for row in metrics_without_clocks(tmp_path)]
    full = parts.config.learning.learning_rate
    assert rates == pytest.approx([full, full * (0.25 + 0.75 * 0.75)])  # the fourth of four updates in all
    trainer.train(restart(parts, **{**changed, "train.steps": 3}), tmp_path)  # accepted settings are now the run's
    assert len(metrics_without_clocks(tmp_path)) == 3


def test_changes_that_evaluations_do_not_see():
    """Evaluations before and after a change of the rollouts' temperature or number are compared."""
    now = settings.record(Config(), {})
    unseen = ["rollout.temperature", "rollout.samples", "model.dtype", "reward.format"]
    assert not settings.affect_evaluation(unseen, now)
    assert settings.affect_evaluation(["rollout.turn_tokens"], now)
    assert settings.affect_evaluation(["data.source"], now)


def test_a_longer_run_keeps_its_rates(parts, whole, tmp_path):
    """The warm-up is computed at step 0: a run that is extended does not warm up again."""
    trainer.train(restart(parts, **{"train.steps": 2}), tmp_path)
    run = restart(parts, **{"train.steps": 3})  # its warm-up was computed for 2 steps
    trainer.train(run, tmp_path)
    rates = [row["learning_rate"] for row in metrics_without_clocks(tmp_path)]
    full = parts.config.learning.learning_rate
    assert rates == pytest.approx([full * 0.75, full, full])
    assert [row["learning_rate"] for row in metrics_without_clocks(whole)][0] == pytest.approx(full * 5 / 9)


def test_weights_are_identified_by_their_contents(tiny_policy, tmp_path):
    """A fingerprint follows the contents of a directory, not its path or its notes."""
    patterns = ("config.json", "*.safetensors")
    here = settings.hash_files(tiny_policy, patterns)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in tiny_policy.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    (moved / "README.md").write_text("a note")
    assert settings.hash_files(moved, patterns) == here
    weights = moved / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    for place in range(len(raw) // 2, len(raw)):  # as other training would change them
        raw[place] ^= 1
    weights.write_bytes(bytes(raw))
    assert settings.hash_files(moved, patterns) != here


# ---- memory during a resume ----


def test_a_resumed_run_never_holds_two_states(parts, tmp_path, monkeypatch):
    """The initial weights are freed before a checkpoint is loaded."""
    trainer.train(restart(parts, **{"train.steps": 1}), tmp_path)
    run = restart(parts, **{"train.steps": 1})
    weights = run.initial_state()  # stands for the loaded weights, referenced only by `initial_state`
    held = [weakref.ref(x) for x in jax.tree.leaves(weights)]
    run.initial_state = lambda weights=weights: weights
    del weights
    read, alive = checkpoint.Checkpoints.restore, []

    def restore(self, state, *more):
        alive.extend(x for x in held if x() is not None)
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
        return read(self, state, *more)

    monkeypatch.setattr(checkpoint.Checkpoints, "restore", restore)
    trainer.train(run, tmp_path)
    assert held and not alive


# ---- checkpoints by time ----


@pytest.mark.parametrize("seconds, expected", [(0.0, [1, 2, 3]), (1e9, [3])])
def test_checkpoints_by_time(parts, tmp_path, monkeypatch, seconds, expected):
    """A checkpoint is written once the last one is `CHECKPOINT_EVERY_S` old."""
    monkeypatch.setattr(saving, "CHECKPOINT_EVERY_S", seconds)
    trainer.train(restart(parts), tmp_path)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == expected


# ---- SIGTERM ----


class StopAtCheck(preemption.StopRequest):
    """SIGTERM arrives just before the n-th interrupt check of a step."""

    def __init__(self, n: int):
        self.left = n

    def checker(self):
        check = super().checker()

        def count() -> None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            check()

        return count


@pytest.mark.parametrize("n", [2, 7, 10])
def test_a_step_is_given_up_between_any_two_micro_batches(parts, n):
    """Until the first optimizer step the state is intact. There are four checks each at log-probs and at reference
    log-probs, and two at the first of two updates."""
    run = restart(parts)
    run.begin()
    run.stop = StopAtCheck(n)
    before = jax.tree.map(np.array, run.state)
    with run.stop.listen(), pytest.raises(preemption.Interrupted):
        train_step(run, next(run.loader), 0)
    assert run.stop.left == 0 and same_bits(run.state, before)


def test_a_step_is_completed_once_an_optimizer_step_was_taken(parts, whole, tmp_path, monkeypatch):
    """A request that arrives between two updates of a step ends the run after that step."""
    run, updates = restart(parts), []
    update = run.learner.update

    def note(*arguments):
        updates.append(arguments)
        if len(updates) == 3:  # the first of step 1
            os.kill(os.getpid(), signal.SIGTERM)
            arguments = (*arguments[:2], lambda: None)
        return update(*arguments)

    monkeypatch.setattr(run.learner, "update", note)
    with pytest.raises(preemption.Interrupted, match="saved after step 2"):
        trainer.train(run, tmp_path)
    monkeypatch.undo()
    trainer.train(restart(parts), tmp_path)
    assert metrics_without_clocks(tmp_path) == metrics_without_clocks(whole)


def test_a_run_of_ppo_resumes_to_the_bit(ppo, tmp_path):
    """The critic, its optimizer and its rate are restored with the policy, and no run may change its algorithm."""
    trainer.train(restart(ppo), tmp_path / "whole")
    run = restart(ppo)
    run.stop = StopAtCheck(2 + 14 + 13)
    with pytest.raises(preemption.Interrupted, match="saved after step 1"):
        trainer.train(run, tmp_path / "cut")
    with pytest.raises(UserError, match="learning.algorithm was 'ppo', now 'grpo'"):
        trainer.train(restart(ppo, **{"learning.algorithm": "grpo", "learning.kl_in": "loss"}), tmp_path / "cut", True)
    trainer.train(restart(ppo), tmp_path / "cut")
    rows = metrics_without_clocks(tmp_path / "cut")
    assert rows == metrics_without_clocks(tmp_path / "whole")
    assert all(np.isfinite(row["critic/loss"]) for row in rows) and rows[0]["critic/gradient_norm"] > 0


def test_ctrl_c_saves_and_a_second_one_ends(capfd):
    """The first Ctrl-C requests a save, the second one raises KeyboardInterrupt."""
    request, before = preemption.StopRequest(), signal.getsignal(signal.SIGINT)
    with request.listen():
        os.kill(os.getpid(), signal.SIGINT)
        assert request.arrived and request.by_user and "Ctrl-C again stops without saving" in capfd.readouterr().err
        with pytest.raises(preemption.Interrupted):
            request.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_sigterms_at_any_moment_change_nothing(parts, tmp_path):
    """Ten stops before random checks leave metrics, trajectories and weights bit for bit as they would be."""
    steps, rng = {"train.steps": 12}, np.random.default_rng(0)
    uninterrupted, stopped = tmp_path / "whole", tmp_path / "stopped"
    trainer.train(restart(parts, **steps), uninterrupted)
    assert all(row["gradient_norm"] > 0 for row in metrics_without_clocks(uninterrupted))
    for n in rng.integers(1, 20, 10):
        run = restart(parts, **steps)
        run.stop = StopAtCheck(n)
        with pytest.raises(preemption.Interrupted):
            trainer.train(run, stopped)
    trainer.train(restart(parts, **steps), stopped)
    assert_same_run(stopped, uninterrupted)

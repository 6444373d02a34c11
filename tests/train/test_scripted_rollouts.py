"""Transcripts in the groups of the first steps, and the KL to a teacher on wrong rollouts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import small_config, write_transcripts
from test_learner import worst
from test_step import begin_run, spy_on_updates

from psearch_jax.data.transcripts import read_rows
from psearch_jax.models import decoder, hf
from psearch_jax.rl.losses import NO_KL
from psearch_jax.text.prompts import load_template
from psearch_jax.train import trainer
from psearch_jax.train.learner import Learner
from psearch_jax.train.monitoring.figures import rollout_metrics
from psearch_jax.types import UserError


def reference_logprobs(params, shape, batch, n_ids):
    """Log-probs at the sampled tokens, from complete rows: [N, S - 1]."""
    model = nnx.merge(decoder.graphdef(shape, jnp.float32), params)
    return model.logprobs(model.hidden(batch.ids)[0][:, :-1], batch.ids[:, 1:], 1.0, n_ids, batch.mask[:, 1:] > 0)[0]


@pytest.fixture(scope="module")
def mixed(tiny_policy, tmp_path_factory):
    """A run with transcripts in its first step, and that step, which leaves the policy as it is."""
    file = write_transcripts(tmp_path_factory.mktemp("scripted") / "rows.jsonl", small_config(tiny_policy))
    fields = {"train.scripted": str(file), "train.scripted_steps": 1, "learning.learning_rate": 0.0}
    run = begin_run(tiny_policy, lambda t: t.sample % 2, **fields, **{"learning.kl_coefficient": 0.0})
    return run, file, *trainer.train_step(run, next(run.loader), 0)


def test_the_last_rollout_of_a_group_is_its_transcript(mixed, tokenizer):
    """Its tokens are those of a cold start, and the figures of behaviour leave it out. All others are sampled."""
    run, file, metrics, rollouts = mixed
    rows = read_rows(file, run.collector.dialect, load_template("toy"), run.config.rollout)
    masks = {ids.tobytes(): mask for ids, mask in rows}
    own = [i for i, t in enumerate(rollouts.trajectories) if not t.scripted]
    assert 4 < len(own) < 8 and metrics["scripted"] == 1 - len(own) / 8
    for t in rollouts.trajectories:
        assert t.scripted == (t.sample == 1 and t.question.identity in run.scripted)
        if t.scripted:
            np.testing.assert_array_equal(t.mask, masks[t.ids.tobytes()])
            assert t.well_formed and t.decomposed and t.executed[0].seen
            assert sum(turn.n_sampled for turn in t.turns) == t.mask.sum()
    kept = ([rows[i] for i in own] for rows in (rollouts.trajectories, rollouts.rewards))
    expected = rollout_metrics(*kept, rollouts.advantages, 2)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, nan_ok=True)
    assert "scripted" not in trainer.train_step(run, next(run.loader), 1)[0]


# Log-probs of the sampler; two updates; one update, which computes its own old log-probs.
@pytest.mark.parametrize("options", [("sampler", 0.0, 4), ("trainer", 2.0, 4), ("trainer", 2.0, 8)])
def test_the_ratio_and_the_weight_of_a_transcript_are_1(mixed, options):
    """The gradient of the first update is that of advantages times the policy's own log-probs."""
    run, _, _, rollouts = mixed
    names, params = ("old_logprobs", "importance_cap", "mini_batch_rollouts"), run.state.params
    config = replace(run.config, learning=replace(run.config.learning, **dict(zip(names, options, strict=True))))
    n_ids = run.collector.tokenizer.size
    learner = Learner(config, run.model, run.learner._optimizer, run.learner.mesh, n_ids)
    batch = trainer.make_batch(rollouts.trajectories, rollouts.advantages, config.rollout.context_tokens)
    run = replace(run, config=config, learner=learner)
    batch = trainer._score(run, batch, rollouts.trajectories, rollouts.rewards)

    def full_loss(params):
        logp = reference_logprobs(params, run.model, batch, n_ids)
        return -jnp.sum(logp * batch.advantage[:, 1:]) / batch.mask.sum()

    assert worst(learner.gradients(params, batch), jax.jit(jax.grad(full_loss))(params)) < 1e-4


def test_the_kl_to_a_teacher_of_another_width_on_wrong_rollouts(tiny_policy, wordy_policy, tokenizer, tmp_path):
    """Right rollouts have no reference, wrong ones the teacher's log-probs. Another tokenizer is refused."""
    shape = replace(hf.read_config(tiny_policy), width=48, heads=6, kv_heads=2, vocab_rows=tokenizer.size + 3)
    teacher = decoder.init_params(shape, 1)
    hf.save_hf(teacher, shape, tokenizer.name, tmp_path / "teacher")
    fields = {"learning.kl_to": "wrong", "learning.teacher": str(tmp_path / "teacher"), "model.lora_rank": 2}
    run = begin_run(tiny_policy, lambda t: t.sample % 2, **fields)
    with pytest.MonkeyPatch.context() as patch:
        seen = spy_on_updates(run, patch)
        assert 0 < trainer.train_step(run, next(run.loader), 0)[0]["kl"] < 10
    for batch in seen:
        expected = reference_logprobs(teacher, shape, batch, tokenizer.size)
        np.testing.assert_allclose(batch.ref_logprobs[::2, 1:], expected[::2], atol=1e-5)
        assert (batch.ref_logprobs[1::2] == NO_KL).all()
    with pytest.raises(UserError, match="config.learning.teacher=.*: its tokenizer is not the policy's"):
        begin_run(tiny_policy, **{"learning.teacher": str(wordy_policy)})
    hf.save_hf(teacher, replace(shape, max_positions=8), tokenizer.name, tmp_path / "short")
    with pytest.raises(UserError, match="config.learning.teacher=.*context_tokens: found .*, accepted: at most"):
        begin_run(tiny_policy, **{"learning.teacher": str(tmp_path / "short")})


def test_a_step_without_a_wrong_rollout_has_no_kl(tiny_policy):
    """With kl_to=wrong, the reference then scores an empty batch, and the optimizer's steps have a gradient of 0."""
    run = begin_run(tiny_policy, lambda t: 1.0, **{"learning.kl_to": "wrong"})
    metrics = trainer.train_step(run, next(run.loader), 0)[0]
    assert np.isnan(metrics["kl"]) and metrics["loss"] == metrics["gradient_norm"] == metrics["skipped"] == 0, metrics
    assert run.current_state().updates > 0

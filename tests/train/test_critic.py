"""The critic: what it values, that it starts from the policy's weights, and that PPO keeps the two states separate."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import one_device_mesh, random_params, same_bits, training_config
from runs import small_config
from test_learner import CONFIG, ROWS, S, some_batch, worst

from psearch_jax.assembly import build
from psearch_jax.config import Lora
from psearch_jax.models import decoder
from psearch_jax.rl import gae
from psearch_jax.train.checkpointing.checkpoint import Checkpoints, model_record
from psearch_jax.train.critic import build_critic, critic_learning, init_critic, without_lm_head
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.train.trainable import Trainable
from psearch_jax.train.trainer import train_step
from psearch_jax.types import RewardParts


def make_critic(lora: Lora | None = None, seed: int = 4) -> tuple[Trainable, nnx.State]:
    """A float32 critic with a nonzero head, and its parameters."""
    policy = random_params(CONFIG, seed=seed, scale=0.03)
    config = training_config(S, model={"lora_rank": lora.rank, "lora_alpha": lora.alpha} if lora else {})
    optimizer, base = make_optimizer(critic_learning(config), 10), without_lm_head(policy) if lora else None
    critic = build_critic(config, CONFIG, optimizer, one_device_mesh(), base)
    params = init_critic(policy, CONFIG, lora, 0, one_device_mesh())
    head = np.random.default_rng(0).normal(size=(CONFIG.width, 1)).astype(np.float32)
    flat = nnx.to_flat_state(params)
    return critic, nnx.from_flat_state(
        {path: v.replace(jnp.asarray(head)) if path == ("value_head",) else v for path, v in flat}
    )


@pytest.fixture(scope="module")
def critic():
    return make_critic()


def test_the_value_of_a_token_is_that_of_the_prefix_before_it(critic):
    """Values read the passages before a token, and not the token itself."""
    critic, params = critic
    batch = some_batch()
    values = critic.score(params, batch)
    assert values.shape == (ROWS, S) and not values[batch.mask == 0].any()
    model = nnx.merge(decoder.graphdef(CONFIG, jnp.float32, values=True), params)
    row = int(np.argmax(batch.mask.sum(axis=1)))
    n = batch.length[row]
    states = np.asarray(model.hidden(batch.ids[row : row + 1, :n])[0])[0]
    by_hand = states @ np.asarray(params["value_head"].get_value())[:, 0]
    at = np.flatnonzero(batch.mask[row])
    np.testing.assert_allclose(values[row, at], by_hand[at - 1], atol=1e-5)
    # Another token at t changes the values after t, but not the value at t.
    t = at[len(at) // 2]
    ids = batch.ids.copy()
    ids[row, t] = (ids[row, t] + 1) % 390
    moved = critic.score(params, replace(batch, ids=ids))[row] != values[row]
    assert not moved[: t + 1].any() and moved[at[at > t]].all()


def test_its_gradient_is_that_of_the_complete_loss(critic):
    """Sums over micro-batches and packed rows are divided once."""
    critic, params = critic
    batch = some_batch()

    def full_loss(params):
        model = nnx.merge(decoder.graphdef(CONFIG, jnp.float32, values=True), params)
        values = jnp.pad(model.values(model.hidden(batch.ids)[0][:, :-1]), ((0, 0), (1, 0)))
        near = batch.values + jnp.clip(values - batch.values, -0.5, 0.5)
        worse = jnp.maximum((values - batch.returns) ** 2, (near - batch.returns) ** 2)
        return 0.5 * jnp.sum(worse * batch.mask) / batch.mask.sum()

    assert worst(critic.gradients(params, batch), jax.jit(jax.grad(full_loss))(params)) < 5e-6


@pytest.mark.parametrize("lora", [None, Lora(4, 8.0)])
def test_it_starts_with_the_policys_weights_and_learns(lora):
    """It has the policy's weights and values of 0; with adapters only they and the head are trained."""
    policy = random_params(CONFIG, seed=4, scale=0.03)
    start = init_critic(policy, CONFIG, lora, 0, one_device_mesh())
    assert not np.asarray(start["value_head"].get_value()).any()
    if lora is None:
        trunk = [item for item in nnx.to_flat_state(start) if item[0] != ("value_head",)]
        assert same_bits(without_lm_head(policy), nnx.from_flat_state(trunk))
    else:
        assert {path[0] for path, _ in nnx.to_flat_state(start)} == {"adapters", "value_head"}
    critic, _ = make_critic(lora)
    state = init_state(start, critic._optimizer, one_device_mesh())
    batch = replace(some_batch(), values=np.zeros((ROWS, S), np.float32))
    losses = []
    for _ in range(8):
        state, metrics = critic.update(state, batch)
        losses.append(metrics["loss"])
    assert losses[-1] < losses[0] and int(state.updates) == 8


def by_length(trajectories):
    """A reward that differs between questions; a random policy earns no other."""
    return [RewardParts({}, float(len(t.question.text) % 7)) for t in trajectories]


def ppo_config(tiny_policy: Path, **fields):
    return small_config(tiny_policy, **{"learning.algorithm": "ppo", "learning.kl_in": "reward", **fields})


def test_a_step_of_ppo_trains_both_and_a_pretraining_step_only_the_critic(tiny_policy, tmp_path, monkeypatch):
    """The advantages of a step are whitened, and a checkpoint of adapters holds both states."""
    fields = {"critic.pretrain_steps": 1, "train.steps": 3, "rollout.samples": 1, "train.prompts": 24}
    fields |= {"model.lora_rank": 4, "learning.decay_ratio": 1.0}
    run = build.training_run(ppo_config(tiny_policy, **fields))
    run.begin()
    policies, critics = [jax.device_get(run.state.params)], [jax.device_get(run.state.critic.params)]
    learned, update = [], run.critic.update
    monkeypatch.setattr(run.critic, "update", lambda *arguments: (learned.append(arguments[1]), update(*arguments))[1])
    monkeypatch.setattr(run, "reward", by_length)
    for step in range(2):
        learned.clear()
        metrics, _ = train_step(run, next(run.loader), step)
        advantage, sampled = (np.concatenate([getattr(p, name) for p in learned]) for name in ("advantage", "mask"))
        assert advantage[sampled > 0].std() == pytest.approx(1, abs=1e-3)
        policies.append(jax.device_get(run.state.params))
        critics.append(jax.device_get(run.state.critic.params))
        assert ("loss" in metrics) == (step == 1) and np.isfinite(metrics["critic/loss"])
    share = metrics["learning_rate"] / run.config.learning.learning_rate
    assert share == pytest.approx(0.5, abs=0.1), "the policy has taken half of its updates"
    assert same_bits(policies[0], policies[1]) and not same_bits(policies[1], policies[2])
    assert not same_bits(critics[0], critics[1]) and not same_bits(critics[1], critics[2])
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(2, run.state, {"model": model_record(run.model), "lora": run.lora})
    checkpoints.wait()
    state, _ = checkpoints.restore(run.abstract)
    checkpoints.close()
    assert same_bits(state, run.state)


def test_a_step_of_ppo_pays_the_reward_and_the_kl(tiny_policy, monkeypatch):
    """Returns are those of GAE with the KL in the reward of every token."""
    fields = {"learning.gae_lambda": 0.5, "learning.kl_coefficient": 0.5, "train.prompts": 8}
    run = build.training_run(ppo_config(tiny_policy, **fields, **{"rollout.samples": 1}))
    monkeypatch.setattr(run, "reward", by_length)
    run.begin()
    run.reference = jax.tree.map(lambda x: 1.5 * x, run.reference)  # another policy: at step 0 the KL is 0
    critic = run.state.critic
    run.state = replace(run.state, critic=replace(critic, params=jax.tree.map(lambda x: x + 0.1, critic.params)))
    seen, update = [], run.critic.update
    monkeypatch.setattr(run.critic, "update", lambda *a: (seen.append(a[1]), update(*a))[1])
    totals = np.array([parts.total for parts in train_step(run, next(run.loader), 0)[1].rewards])
    batch = {name: np.concatenate([getattr(b, name) for b in seen]) for name in vars(seen[0])}
    mask, values, old, ref = (batch[name] for name in ("mask", "values", "old_logprobs", "ref_logprobs"))
    assert np.abs(old - ref).max() > 0.01 and np.abs(values).max() > 0.01
    _, returns = gae.estimate_advantages(gae.token_rewards(totals, mask, old, ref, 0.5), values, mask, 0.5)
    np.testing.assert_allclose(batch["returns"], returns, atol=1e-5)

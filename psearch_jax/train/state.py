"""What training carries from step to step: parameters, optimizer state, counters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, LearningSection
from psearch_jax.sharding import STORAGE, param_shardings, put, replicated

GRADIENT_CLIP = 1.0  # maximum global norm of the gradient; larger gradients are scaled down to it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    params: nnx.State  # float32 master weights, storage-sharded
    optimizer: Any  # optax state, sharded as the parameters
    updates: jax.Array  # [] int32, optimizer steps taken
    nonfinite_in_a_row: jax.Array  # [] int32, consecutive updates skipped because loss or gradient was not finite
    critic: TrainState | None = None  # PPO only: the four fields above for the critic


def updates_per_step(config: Config) -> int:
    """Optimizer steps in one training step."""
    return -(-config.train.prompts * config.rollout.samples // config.learning.mini_batch_rollouts)


def reads_own_logprobs(config: Config) -> bool:
    """Whether the update's own forward pass gives the log-probs of the old policy: with one update per step."""
    return updates_per_step(config) == 1 and config.learning.old_logprobs == "trainer"


def scores_before_update(config: Config) -> bool:
    """Whether the old log-probs take a separate forward pass: for the loss, or for a KL penalty in the reward."""
    in_update = reads_own_logprobs(config) and config.learning.kl_in == "loss"
    return config.learning.old_logprobs == "trainer" and not in_update


def policy_updates(config: Config) -> int:
    """Optimizer steps of the policy in the complete run: with PPO, the first steps may train only the critic."""
    waiting = config.critic.pretrain_steps if config.learning.algorithm == "ppo" else 0
    return updates_per_step(config) * (config.train.steps - waiting)


def make_optimizer(learning: LearningSection, total_updates: int) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW with a linear warm-up, a constant rate, and a linear decay to 0.

    The state holds the updates of this schedule, which `with_schedule` changes when a run resumes.
    """

    def adamw(warmup: jax.Array, decay: jax.Array, total: jax.Array) -> optax.GradientTransformation:
        updates = {"warmup": warmup, "decay": decay, "total": total}
        rate = functools.partial(_learning_rate, learning.learning_rate, updates)
        return optax.chain(
            optax.clip_by_global_norm(GRADIENT_CLIP), optax.adamw(rate, weight_decay=learning.weight_decay)
        )

    return optax.inject_hyperparams(adamw)(**schedule(learning, total_updates))


def schedule(learning: LearningSection, total_updates: int) -> dict[str, np.ndarray]:
    """The updates of warm-up and decay, and all of them, of a run of `total_updates`. [] int32 each"""
    updates = {
        "warmup": learning.warmup_ratio * total_updates,
        "decay": learning.decay_ratio * total_updates,
        "total": total_updates,
    }
    return {name: np.asarray(int(number), np.int32) for name, number in updates.items()}


def learning_rate(state: TrainState, learning: LearningSection) -> jax.Array:
    """The learning rate of the next update. [] float32"""
    return _learning_rate(learning.learning_rate, state.optimizer.hyperparams, state.optimizer.count)


def with_schedule(state: TrainState, updates: Mapping[str, np.ndarray]) -> TrainState:
    """The state with other values of `schedule`; they count the updates already taken."""
    before = state.optimizer.hyperparams
    hyperparams = before | {name: put(number, before[name].sharding) for name, number in updates.items()}
    return replace(state, optimizer=state.optimizer._replace(hyperparams=hyperparams))


def _learning_rate(full: float, updates: Mapping[str, jax.Array], taken: jax.Array) -> jax.Array:
    """Rises linearly from full / n over the n updates of the warm-up; falls to 0 over the updates of the decay."""
    n = jnp.maximum(updates["warmup"], 1)
    missing = jnp.where(updates["warmup"] > 0, jnp.clip(1 - taken / n, 0, 1), 0.0)
    left = jnp.clip((updates["total"] - taken) / jnp.maximum(updates["decay"], 1), 0, 1)
    return ((full / n - full) * missing + full) * jnp.where(updates["decay"] > 0, left, 1.0)


def state_shardings(abstract: TrainState, mesh: Mesh) -> TrainState:
    """Storage sharding of every array of the state. Optimizer moments are sharded like their parameters."""
    params = param_shardings(abstract.params, STORAGE, mesh)
    optimizer = _like_params(abstract.optimizer, abstract.params, params, mesh)
    critic = state_shardings(abstract.critic, mesh) if abstract.critic else None
    return TrainState(params, optimizer, replicated(mesh), replicated(mesh), critic)


def _like_params(optimizer: Any, params: nnx.State, shardings: nnx.State, mesh: Mesh) -> Any:
    """Shardings of the optimizer state: the parameters' for subtrees of the same structure, else replicated."""
    structure = jax.tree.structure(params)

    def mirrors(node: Any) -> bool:
        return isinstance(node, nnx.State) and jax.tree.structure(node) == structure

    return jax.tree.map(lambda n: shardings if mirrors(n) else replicated(mesh), optimizer, is_leaf=mirrors)


def abstract_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state as ShapeDtypeStructs, from (abstract) parameters."""
    return jax.eval_shape(functools.partial(_first_state, optimizer), params)


def init_state(params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The initial state for loaded or random parameters, sharded on the mesh."""
    shardings = state_shardings(abstract_state(params, optimizer), mesh)
    return jax.jit(functools.partial(_first_state, optimizer), out_shardings=shardings)(params)


def _first_state(optimizer: optax.GradientTransformation, params: nnx.State) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))

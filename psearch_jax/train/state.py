"""What training carries from step to step: parameters, optimizer state, counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, LearningSection
from psearch_jax.sharding import STORAGE, param_shardings, replicated


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    params: nnx.State  # float32 master weights, storage-sharded
    optimizer: Any  # optax state, sharded as the parameters
    updates: jax.Array  # [] int32, optimizer steps taken
    bad_in_a_row: jax.Array  # [] int32, updates skipped in a row because something was not finite


def updates_per_step(config: Config) -> int:
    """Optimizer steps in one training step."""
    return -(-config.train.prompts * config.rollout.samples // config.learning.mini_batch_rollouts)


def make_optimizer(learning: LearningSection, total_updates: int) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; linear warm-up over `warmup_ratio` of the updates, then constant."""
    warmup = int(learning.warmup_ratio * total_updates)
    if warmup > 0:
        rate = optax.linear_schedule(learning.learning_rate / warmup, learning.learning_rate, warmup)
    else:
        rate = optax.constant_schedule(learning.learning_rate)  # a schedule too: the state has one structure
    return optax.chain(
        optax.clip_by_global_norm(learning.gradient_clip),
        optax.adamw(rate, b1=learning.beta1, b2=learning.beta2, weight_decay=learning.weight_decay),
    )


def state_shardings(abstract: TrainState, mesh: Mesh) -> TrainState:
    """Storage sharding of every array of the state; optimizer moments lie where their parameter lies."""
    params = param_shardings(abstract.params, STORAGE, mesh)
    optimizer = _like_params(abstract.optimizer, abstract.params, params, mesh)
    return TrainState(params, optimizer, replicated(mesh), replicated(mesh))


def _like_params(optimizer: Any, params: nnx.State, shardings: nnx.State, mesh: Mesh) -> Any:
    """Replaces every subtree of the optimizer state that mirrors the parameters by their shardings."""
    structure = jax.tree.structure(params)

    def mirrors(node: Any) -> bool:
        return isinstance(node, nnx.State) and jax.tree.structure(node) == structure

    return jax.tree.map(lambda n: shardings if mirrors(n) else replicated(mesh), optimizer, is_leaf=mirrors)


def _fresh(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))


def abstract_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state's ShapeDtypeStructs, from (abstract) parameters."""
    return jax.eval_shape(lambda p: _fresh(p, optimizer), params)


def init_state(params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A fresh state around loaded or random parameters, placed on the mesh."""
    shardings = state_shardings(abstract_state(params, optimizer), mesh)
    return jax.jit(lambda p: _fresh(p, optimizer), out_shardings=shardings)(params)

"""Creates the device programs of a config without using a device, so that plans can compile them for absent ones."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.models import decoder
from psearch_jax.models.attention import implementation_for
from psearch_jax.rollout.boundary import BoundaryTables
from psearch_jax.rollout.copy import sampled_shape
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.sharding import is_one_cpu
from psearch_jax.train.critic import Critic, critic_learning
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import updates_per_step


def make_sampler(
    config: Config, model: DecoderConfig, mesh: Mesh, tables: BoundaryTables, n_ids: int, stop_ids: Sequence[int]
) -> Sampler:
    """The sampler of a config."""
    m = config.model
    dtype, adapters = jnp.dtype(m.sampling_dtype), m.lora
    model = sampled_shape(model, mesh, dtype)
    return Sampler(
        decoder.graphdef(model, dtype, attention=implementation_for(mesh, dtype), lora=adapters, int8=m.int8_weights),
        model,
        tables,
        n_ids,
        stop_ids,
        mesh,
        dtype,
        config.rollout.top_k,
        config.rollout.top_p,
        config.rollout.max_tokens_after_answer,
        config.rollout.yield_share,
        adapters,
        m.int8_weights,
        m.int8_cache,
        m.unstacked_decoding and (mesh.devices.flat[0].platform == "gpu" or is_one_cpu(mesh)),
    )


def make_learner(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    n_ids: int,
    pack: bool = True,
) -> Learner:
    """The learner of a config. Without `pack` each trajectory gets its own row."""
    return Learner(
        model,
        config.learning,
        optimizer,
        mesh,
        config.rollout.context_tokens,
        config.rollout.temperature,
        n_ids,
        jnp.dtype(config.model.dtype),
        jnp.dtype(config.model.sampling_dtype),
        config.model.remat,
        config.model.shard_residual,
        config.model.lora,
        config.rollout.num_buckets,
        on_policy=updates_per_step(config) == 1,
        int8_sampling=config.model.int8_weights,
        pack=pack,
    )


def make_critic(config: Config, model: DecoderConfig, mesh: Mesh, optimizer: optax.GradientTransformation) -> Critic:
    """The critic of a config."""
    return Critic(
        model,
        critic_learning(config),
        optimizer,
        mesh,
        config.rollout.context_tokens,
        config.critic.value_clip,
        jnp.dtype(config.model.dtype),
        config.model.remat,
        config.model.shard_residual,
        config.model.lora,
        config.rollout.num_buckets,
    )

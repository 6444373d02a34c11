"""Creates the device programs of a config without using a device, so that plans can compile them for absent ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.models import decoder
from psearch_jax.models.backend import choose_backend
from psearch_jax.rollout.boundary import BoundaryTables
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.rollout.sampler_programs import SamplerOptions
from psearch_jax.train.critic import build_critic, critic_learning
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import updates_per_step
from psearch_jax.train.trainable import Trainable, TrainingOptions


def make_sampler(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    tables: BoundaryTables,
    n_ids: int,
    stop_ids: Sequence[int],
    sampler_class: type[Sampler] = Sampler,
) -> Sampler:
    """The sampler of a config."""
    m = config.model
    dtype = jnp.dtype(m.sampling_dtype)
    options = SamplerOptions(
        dtype=dtype,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        max_tokens_after_answer=config.rollout.max_tokens_after_answer,
        yield_share=config.rollout.yield_share,
        lora=m.lora,
        eos_continues=config.rollout.after_eos == "corrective",
    )
    backend = choose_backend(mesh, dtype, model, config.rollout.slots)
    if not m.unstacked_decoding:
        backend = replace(backend, unstack="never")
    return sampler_class(
        graph=decoder.graphdef(model, dtype, backend=backend, lora=m.lora),
        config=model,
        tables=tables,
        n_ids=n_ids,
        stop_ids=stop_ids,
        mesh=mesh,
        backend=backend,
        options=options,
    )


def make_learner(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    n_ids: int,
    base: nnx.State | None = None,
    pack: bool = True,
    rollout_mesh: Mesh | None = None,
) -> Learner:
    """The learner of a config. Without `pack` each trajectory gets its own row."""
    return Learner(
        model,
        config.learning,
        optimizer,
        mesh,
        training_options(config, pack),
        temperature=config.rollout.temperature,
        n_ids=n_ids,
        sampling_dtype=jnp.dtype(config.model.sampling_dtype),
        on_policy=updates_per_step(config) == 1,
        base=base,
        rollout_mesh=rollout_mesh,
    )


def make_critic(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    base: nnx.State | None = None,
) -> Trainable:
    """The critic of a config."""
    options = training_options(config)
    return build_critic(model, critic_learning(config), optimizer, mesh, options, base)


def training_options(config: Config, pack: bool = True) -> TrainingOptions:
    """How a config trains its parameters."""
    return TrainingOptions(
        context_tokens=config.rollout.context_tokens,
        dtype=jnp.dtype(config.model.dtype),
        remat=config.model.remat,
        shard_residual=config.model.shard_residual,
        lora=config.model.lora,
        num_buckets=config.rollout.num_buckets,
        pack=pack,
    )

"""The critic of PPO: it predicts the remaining reward before every sampled token.

It has the policy's architecture and starts from the policy's weights, with a value head in place of the lm head
(arXiv 2203.02155). With LoRA it has its own adapters and head, and shares the base weights with the policy.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig, LearningSection, Lora
from psearch_jax.models import decoder
from psearch_jax.models import lora as adapters
from psearch_jax.rl.losses import VALUE_METRICS, value_loss
from psearch_jax.runtime.metrics import Ratio
from psearch_jax.sharding import STORAGE, param_shardings
from psearch_jax.train.trainable import Trainable, hidden_states
from psearch_jax.types import MicroBatch

CRITIC = "critic/"  # prefix of the critic's metrics


def critic_learning(config: Config) -> LearningSection:
    """The policy's learning settings, with the learning rate and warm-up ratio of section `critic`."""
    section = config.critic
    return replace(config.learning, learning_rate=section.learning_rate, warmup_ratio=section.warmup_ratio)


def token_values(model: decoder.Decoder, micro_batch: MicroBatch) -> jax.Array:
    """The value of the prefix of every token in the mask, including passages inserted since the previous such token.

    Returns:
      [B, W] float32; 0 where the mask is 0.
    """
    hidden, _, in_mask = hidden_states(model, micro_batch)
    before = jnp.pad(model.values(hidden[:, :-1]), ((0, 0), (1, 0)))
    return jnp.where(in_mask, before, 0.0)


def build_critic(
    config: Config,
    model: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    base: nnx.State | None = None,
) -> Trainable:
    """Device programs of the critic; its score is the value at every sampled token. Arguments as of `Trainable`."""

    def loss_fn(model: decoder.Decoder, micro_batch: MicroBatch) -> tuple[Ratio, dict[str, Ratio]]:
        return value_loss(token_values(model, micro_batch), micro_batch)

    return Trainable(
        replace(config, learning=critic_learning(config)),
        model,
        optimizer,
        mesh,
        loss_fn=loss_fn,
        metrics=VALUE_METRICS,
        score_fn=token_values,
        score_name="values",
        update_name="critic update",
        base=base,
        values=True,
    )


def without_lm_head(weights: nnx.State) -> nnx.State:
    """A policy's weights without the lm head, which a critic does not need. No array is copied."""
    return nnx.from_flat_state([item for item in nnx.to_flat_state(weights) if item[0] != ("lm_head",)])


def init_critic(policy: nnx.State, model: DecoderConfig, lora: Lora | None, seed: int, mesh: Mesh) -> nnx.State:
    """The critic's initial parameters: the policy's weights or, with `lora`, fresh adapters, and a zero value head."""

    def fresh() -> nnx.State:
        head = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_head)
        return adapters.join_adapters(adapters.init_adapters(model, lora, seed), head) if lora else head

    abstract_head = adapters.value_head(decoder.abstract_params(model, values=True)[1])
    initial = jax.jit(fresh, out_shardings=param_shardings(jax.eval_shape(fresh), STORAGE, mesh))()
    return initial if lora else adapters.join_adapters(without_lm_head(policy), initial)

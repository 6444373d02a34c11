"""The critic of PPO: what reward is still to come, told before every sampled id.

It is a network of the policy's shape that starts from the policy's weights, with a value head in place of the lm head
(arXiv 2203.02155); with adapters it is adapters of its own and a head, beside the weights that it shares with the
policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig, LearningSection, Lora, Remat
from psearch_jax.metrics import Ratio
from psearch_jax.models import decoder
from psearch_jax.models import lora as adapters
from psearch_jax.rl.losses import VALUE_METRICS, value_loss
from psearch_jax.sharding import STORAGE, param_shardings
from psearch_jax.train.trainable import Trainable, read
from psearch_jax.types import Packed


def critic_learning(config: Config) -> LearningSection:
    """The learning settings of the critic: the policy's, with the rates of section `critic`."""
    own = config.critic
    return replace(config.learning, learning_rate=own.learning_rate, warmup_ratio=own.warmup_ratio)


def token_values(model: decoder.Decoder, piece: Packed) -> jax.Array:
    """The value of what stands before every id that counts, passages that were read since the last one included.

    Returns:
      [B, W] float32; 0 where the mask is.
    """
    hidden, _, wanted = read(model, piece)
    before = jnp.pad(model.values(hidden[:, :-1]), ((0, 0), (1, 0)))
    return jnp.where(wanted, before, 0.0)


class Critic(Trainable):
    """Device programs of the critic; its score is the value of every sampled id.

    Args (those that are not `Trainable`'s):
      value_clip: as `value_loss` takes it.
    """

    metrics, scored = VALUE_METRICS, "values"

    def __init__(
        self,
        model: DecoderConfig,
        learning: LearningSection,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        context_tokens: int,
        value_clip: float,
        dtype: Any = jnp.float32,
        remat: Remat = "full",
        shard_residual: bool = False,
        lora: Lora | None = None,
        widths: int = 4,
    ):
        self._value_clip = value_clip
        super().__init__(
            model, learning, optimizer, mesh, context_tokens, dtype, remat, shard_residual, lora, widths, values=True
        )

    def _scores(self, model: decoder.Decoder, piece: Packed) -> jax.Array:
        return token_values(model, piece)

    def _loss(self, model: decoder.Decoder, piece: Packed) -> tuple[Ratio, dict[str, Ratio]]:
        values = token_values(model, piece)
        return value_loss(values, piece.values, piece.returns, piece.mask, self._value_clip)


def without_lm_head(weights: nnx.State) -> nnx.State:
    """A policy's weights, of which a critic has no use for the lm head; no array is copied."""
    return nnx.from_flat_state([item for item in nnx.to_flat_state(weights) if item[0] != ("lm_head",)])


def first_params(policy: nnx.State, model: DecoderConfig, lora: Lora | None, seed: int, mesh: Mesh) -> nnx.State:
    """What a critic starts from: the policy's weights, or with `lora` fresh adapters, and a value head of zeros."""

    def fresh() -> nnx.State:
        head = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), head_alone)
        return adapters.beside(adapters.init_adapters(model, lora, seed), head) if lora else head

    head_alone = adapters.value_head(decoder.abstract_params(model, values=True)[1])
    made = jax.jit(fresh, out_shardings=param_shardings(jax.eval_shape(fresh), STORAGE, mesh))()
    return made if lora else adapters.beside(without_lm_head(policy), made)

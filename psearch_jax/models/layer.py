"""One decoder layer: attention and MLP, each on the normalised residual stream. Letters as in models/decoder.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from psearch_jax.config import DecoderConfig
from psearch_jax.models import kv_cache, products, ragged, workarounds
from psearch_jax.models.attention import attend_causally
from psearch_jax.models.attention.cached import Keys, attend_chunk, decode, decode_in_groups
from psearch_jax.models.backend import Backend
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.sharding import constrain, gather_fsdp


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a forward pass share."""

    config: DecoderConfig
    dtype: Any  # of products with weights
    backend: Backend
    lora_scale: float
    positions_axis: str | None  # logical axis of the positions between layers; None: they are not split
    rotation: tuple[jax.Array, jax.Array]  # cos and sin, [B, T, H/2]
    start: jax.Array  # [B] int32, position of the first token
    cache: KVCache | None
    span: int | None  # cached positions to attend to
    rows: jax.Array | None  # [B] int32, rows of the cache
    segments: jax.Array | None  # [B, T] int32
    keep_kv: bool  # return the keys and values
    work: ragged.Work | None  # of the kernel in models/ragged.py, where the backend has it


def layer(
    x: jax.Array, weights_and_index: tuple[Mapping[str, jax.Array], jax.Array], context: LayerContext
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """One decoder layer; the body of the scan over layers.

    Args:
      x: [B, T, D].
      weights_and_index: the layer's arrays by name, and its index [] int32.

    Returns:
      ([B, T, D], None or the new keys and values, each [B, K, T, H]).
    """
    w, index = weights_and_index
    # Gather over fsdp here. Otherwise the partitioner made each of 16 x 4 chips gather and multiply the attention of
    # all rows, which added a quarter to an update's products.
    # Not for decoding: weights that are sampled from are not split over fsdp, and the constraint would keep the slice
    # of the stacked kernel from fusing with its product.
    if "o_kernel" in w and x.shape[1] > 1:
        w = {**w, "o_kernel": gather_fsdp(w["o_kernel"], "heads", None, "embed")}
    eps = context.config.rms_eps

    def project_and_rotate(y: jax.Array, name: str, axis: str) -> jax.Array:
        """Queries or keys [B, T, heads of `axis`, H], normalised if the model does so, rotated to their positions."""
        out, norm = _dense(y, w, name, context), w.get(f"{name}_norm")
        out = out if norm is None else rms_norm(out, norm, eps)
        cos, sin = (a[:, :, None] for a in context.rotation)  # [B, T, 1, H/2]
        return constrain(_rotate(out, cos, sin), "rows", None, axis, None)

    y = rms_norm(x, w["attention_norm"], eps)
    q, k = project_and_rotate(y, "q", "heads"), project_and_rotate(y, "k", "kv_heads")
    v = constrain(_dense(y, w, "v", context), "rows", None, "kv_heads", None)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, K, T, H], the cache's layout
    out = _attend(q, k, v, index, context)
    x = constrain(x + _dense(out, w, "o", context, contracted=2), "rows", context.positions_axis, None)
    y = rms_norm(x, w["mlp_norm"], eps)
    inner = gated(_dense(y, w, "gate", context), _dense(y, w, "up", context))
    x = x + _dense(constrain(inner, "rows", None, "mlp"), w, "down", context)
    return constrain(x, "rows", context.positions_axis, None), (k, v) if context.keep_kv else None


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, index: jax.Array, context: LayerContext) -> jax.Array:
    """Attention [B, T, N, H] of the queries to their own row and to the cached positions before it."""
    cache, start, backend = context.cache, context.start, context.backend
    if cache is None:
        return attend_causally(q, k, v, backend.attention, context.segments)
    if context.work is not None:
        return ragged.attend(q, k, v, cache, index, start, context.rows, context.work)
    is_decoding = q.shape[1] == 1
    if is_decoding and backend.cache == "groups":
        return decode_in_groups(q, k, v, cache, index, start)
    old = Keys(*kv_cache.read(cache, index, context.span, context.rows))
    return (decode if is_decoding else attend_chunk)(q, k, v, old, start)


def _dense(
    x: jax.Array, w: Mapping[str, jax.Array], name: str, context: LayerContext, contracted: int = 1
) -> jax.Array:
    """x times the kernel `name`, plus its bias and its adapter if it has them."""
    bias, left, is_decoding = w.get(f"{name}_bias"), f"{name}_kernel_left" in w, x.shape[1] == 1
    kernel = w[f"{name}_kernel_left" if left else f"{name}_kernel"]
    out = products.dense(x, kernel, context.dtype, bias, contracted, left)
    if f"{name}_kernel_a" in w:
        low_input = workarounds.separate_input(x) if is_decoding else x
        low = products.dense(low_input, w[f"{name}_kernel_a"], x.dtype, contracted=contracted)
        out += products.dense(context.lora_scale * low, w[f"{name}_kernel_b"], x.dtype)
    return out


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU's silu(gate) * up (arXiv 2002.05202, eq. 6), elementwise.

    Only `gate` and `up` are kept for its backward pass. JAX would also keep the sigmoid, the silu and its derivative,
    and on a CPU writing and reading these takes a tenth of an update.
    """
    return jax.nn.silu(gate) * up


def _gated_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return gated(gate, up), (gate, up)


def _gated_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up, d_out = (x.astype(jnp.float32) for x in (*residuals, gradient))
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate, d_up = d_out * up * (sigmoid + silu * (1 - sigmoid)), d_out * silu
    return d_gate.astype(residuals[0].dtype), d_up.astype(residuals[1].dtype)


gated.defvjp(_gated_forward, _gated_backward)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] with a root mean square of 1 along its last axis, computed in float32, times `scale` [D]."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def rope_cos_sin(positions: jax.Array, config: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, H/2] in float32: at 30,000 positions, bf16 angles would be off by full turns.

    Llama 3.1 stretches its context by dividing the slow frequencies by `rope_factor` (rope type `llama3` of
    transformers), with a linear transition between `rope_low` and `rope_high` turns.
    """
    c = config
    frequency = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)  # computed in float64, rounded once
    turns = c.rope_positions * frequency / (2 * np.pi)
    kept = np.clip((turns - c.rope_low) / (c.rope_high - c.rope_low), 0, 1)
    frequency = frequency * (kept + (1 - kept) / c.rope_factor)
    angle = positions[..., None].astype(jnp.float32) * frequency.astype(np.float32)
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding, halves layout: dimension i is paired with i + H/2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

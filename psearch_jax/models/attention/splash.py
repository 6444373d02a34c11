"""Attention by JAX's splash kernel, for TPUs, in 16 bits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from psearch_jax.models.attention.scores import ATTENTION_OUTPUT
from psearch_jax.models.buckets import BLOCK

LANES = 128  # the width of a TPU register: the kernel needs H and T to be multiples of it


def splash_block(width: int) -> int:
    """The splash kernel's block size of queries and keys for rows of `width` positions.

    Rows are padded to a multiple of it (`splash_width`), so that no width needs small blocks: 6,196 positions are
    padded to 6,656 in blocks of 512, rather than to 6,272 in blocks of 128.
    """
    return min(BLOCK, width + -width % LANES)


def splash_width(width: int) -> int:
    """The width to which the splash kernel pads rows of `width` positions."""
    return width + -width % splash_block(width)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """JAX's block-sparse flash attention for TPUs. q [B, T, N, H], k and v [B, K, T, H] -> [B, T, N, H]."""
    # Imported here: without a TPU the kernel's module is not needed and may not exist.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, N, H = q.shape[1:]
    q, k = _scale(q.swapaxes(1, 2), k)
    width, size = splash_width(T), splash_block(T)

    def pad(x: jax.Array) -> jax.Array:  # causal: no real query attends to a padded key
        return jnp.pad(x, ((0, 0), (0, 0), (0, width - T), (0, -x.shape[-1] % LANES)))

    blocks = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = kernels.BlockSizes(**dict.fromkeys(blocks, size))
    mask = masks.MultiHeadMask([masks.CausalMask((width, width))] * N)
    kernel = kernels.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION_OUTPUT,
        interpret=interpret,
    )
    if segments is None:
        out = jax.vmap(kernel)(pad(q), pad(k), pad(v))
    else:
        segments = jnp.pad(segments, ((0, 0), (0, width - T)))
        out = jax.vmap(kernel)(pad(q), pad(k), pad(v), kernels.SegmentIds(segments, segments))
    return out[:, :, :T, :H].swapaxes(1, 2)


def _scale(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys whose products are those of q and k times H**-0.5: the splash kernel itself does not scale.

    In 16 bits the scaled query would be rounded again, unless the scale is a power of two (head dim 64). So the
    rounding error `rest` is appended to the rounded query `hi` and the key is repeated: the kernel's float32 sum
    [hi, rest] . [k, k] is scaled to a precision of 2**-17. This costs a product over twice the head dim, about 2% of a
    7B step over rows of 2,000 positions.
    """
    scale = q.shape[-1] ** -0.5
    exact = q.astype(jnp.float32) * scale
    hi = exact.astype(q.dtype)
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:
        return hi, k
    rest = jax.lax.stop_gradient(exact - hi.astype(jnp.float32)).astype(q.dtype)  # the gradient is only that of `hi`
    return jnp.concatenate([hi, rest], axis=-1), jnp.concatenate([k, k], axis=-1)

"""Attention behind two functions: `causal` for whole rows, `cached` for a chunk behind a cache.

`causal` has three forms, chosen by the platform of the mesh (`implementation_for`): `splash` (a Pallas kernel, TPU),
`cudnn` (GPU), `blocked` (anywhere). None of them holds all scores of a row at once.
Letters: B rows, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from psearch_jax.sharding import COMPUTE, spec

Implementation = Literal["blocked", "splash", "cudnn"]
NEG_INF = -1e30  # a finite stand-in: a row of -inf alone would softmax to NaN
WHOLE_CHUNK = 256  # up to so many query positions, all scores exist at once
QUERY_BLOCK = 128  # of longer chunks, those of so many
SPLASH_BLOCK = 512  # of queries and keys in the kernel
LANES = 128  # the width of a TPU register: what the kernel wants H and T to be a multiple of


def implementation_for(mesh: Mesh, dtype: Any) -> Implementation:
    """The form of `causal` for the devices of a mesh. cuDNN has no kernel for float32."""
    platform = mesh.devices.flat[0].platform
    if platform == "tpu":
        return "splash"
    if platform in ("gpu", "cuda") and jnp.dtype(dtype).itemsize == 2:
        return "cudnn"
    return "blocked"


def causal(q: jax.Array, k: jax.Array, v: jax.Array, implementation: Implementation = "blocked") -> jax.Array:
    """Causal attention of rows over themselves.

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H], as the cache holds them.

    Returns:
      [B, T, N, H].
    """
    if implementation == "splash":
        return _splash(q, k, v)
    if implementation == "cudnn":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return cached(q, k, v, None, None)


def cached(q: jax.Array, k: jax.Array, v: jax.Array, old: Any, start: jax.Array | None) -> jax.Array:
    """Causal attention of a chunk over itself and, where given, the cached positions before it.

    The cache is only read: one softmax runs over the scores of both, so that no layer copies the cache to append.
    Long chunks go block by block of queries, and a block's scores are computed anew in the backward pass.

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H] of the chunk.
      old: None, or cached (k, v) [B, K, S, H], of which the first start[b] positions are real.

    Returns:
      [B, T, N, H].
    """
    T = q.shape[1]
    block = functools.partial(_block, k=k, v=v, old=old, start=start)
    if T <= WHOLE_CHUNK:
        return block(q, jnp.int32(0))
    blocks = -(-T // QUERY_BLOCK)
    padded = jnp.pad(q, ((0, 0), (0, blocks * QUERY_BLOCK - T), (0, 0), (0, 0)))
    pieces = padded.reshape(q.shape[0], blocks, QUERY_BLOCK, *q.shape[2:]).swapaxes(0, 1)
    out = jax.lax.map(jax.checkpoint(lambda x: block(*x)), (pieces, QUERY_BLOCK * jnp.arange(blocks)))
    return out.swapaxes(0, 1).reshape(padded.shape)[:, :T]


def _block(q: jax.Array, first: jax.Array, *, k: jax.Array, v: jax.Array, old: Any, start: Any) -> jax.Array:
    """Attention of the queries [B, X, N, H] at positions `first` .. first + X - 1 of the chunk."""
    B, X, N, H = q.shape
    K, T = k.shape[1:3]
    G = N // K
    # The G heads of a kv head are stacked along the query positions, which makes every product a plain batched one.
    q = (q * (H**-0.5)).reshape(B, X, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * X, H)
    seen = jnp.tile(jnp.arange(T) <= first + jnp.arange(X)[:, None], (G, 1))
    scores = jnp.einsum("BKXH,BKSH->BKXS", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores, NEG_INF)
    if old is not None:
        old_k, old_v = old
        real = jnp.arange(old_k.shape[2]) < start[:, None]  # [B, S]
        before = jnp.einsum("BKXH,BKSH->BKXS", q, old_k.astype(q.dtype), preferred_element_type=jnp.float32)
        scores = jnp.concatenate([jnp.where(real[:, None, None], before, NEG_INF), scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if old is None:
        out = jnp.einsum("BKXS,BKSH->BKXH", weights, v)
    else:
        S = old_v.shape[2]
        out = jnp.einsum("BKXS,BKSH->BKXH", weights[..., :S], old_v.astype(q.dtype))
        out = out + jnp.einsum("BKXS,BKSH->BKXH", weights[..., S:], v)
    return out.reshape(B, K, G, X, H).transpose(0, 3, 1, 2, 4).reshape(B, X, N, H)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, interpret: bool = False) -> jax.Array:
    """JAX's block-sparse flash attention, on each device for its own rows and heads."""
    T, N, H = q.shape[1:]
    q = (q * (H**-0.5)).swapaxes(1, 2)
    widths = ((0, 0), (0, 0), (0, -T % LANES), (0, -H % LANES))  # causal: no real query sees a padded key
    q, k, v = (jnp.pad(x, widths) for x in (q, k, v))
    mesh = jax.sharding.get_abstract_mesh()
    local = functools.partial(_splash_local, interpret=interpret)
    if not mesh.empty and mesh.size > 1:
        if k.shape[1] % mesh.shape["tensor"]:  # a device's query heads need other kv heads than its share would be
            k, v = (jnp.repeat(x, N // x.shape[1], axis=1) for x in (k, v))
        places = [
            spec(("rows", heads, None, None), COMPUTE, mesh, x.shape)
            for heads, x in (("heads", q), ("kv_heads", k), ("kv_heads", v))
        ]
        local = jax.shard_map(local, in_specs=tuple(places), out_specs=places[0], check_vma=False)
    return local(q, k, v)[:, :, :T, :H].swapaxes(1, 2)


def _splash_local(q: jax.Array, k: jax.Array, v: jax.Array, interpret: bool) -> jax.Array:
    """[B, N, T, H], [B, K, T, H] x 2 -> [B, N, T, H]."""
    # Imported here: the kernel's module is of no use, and not always there, without a TPU.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    N, T = q.shape[1:3]
    size = next(size for size in range(min(SPLASH_BLOCK, T), 0, -LANES) if T % size == 0)
    sizes = kernels.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * N)
    kernel = kernels.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
    return jax.vmap(kernel)(q, k, v)

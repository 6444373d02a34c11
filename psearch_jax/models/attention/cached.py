"""Attention to a cache: `attend_chunk` of many tokens, `decode` and `decode_in_groups` of the one of a decode step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.models.attention.scores import NEG_INF, merge_heads, scale_and_group, weighted_sum
from psearch_jax.models.kv_cache import AXES, KVCache
from psearch_jax.sharding import on_own_rows

QUERY_CHUNK = 256  # `attend_chunk` takes this many query positions at once
KEY_BLOCK = 256  # cached positions per block
# Maximum bytes of keys per loop iteration of `decode_in_groups`: more would leave the processor's cache before they
# are used, and far fewer are not worth an iteration.
GROUP_BYTES = 2**20

Sums = tuple[jax.Array, jax.Array, jax.Array]  # of a softmax: maximum, sum of exponentials, weighted sum of values


@dataclass(frozen=True)
class Keys:
    """Keys and values of S positions in one layer of a cache."""

    k: jax.Array  # [B, K, S, H]
    v: jax.Array  # [B, K, S, H]


def attend_chunk(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
    """Causal attention of a chunk over itself and the cached positions before it.

    The cache is not written. It is read in blocks of `KEY_BLOCK` positions, up to the end of the longest row. One
    softmax covers these blocks and the chunk, kept as a running maximum and sums (arXiv 2205.14135).

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H] of the chunk.
      old: cached keys and values of S positions, of which the first start[b] are real.

    Returns:
      [B, T, N, H].
    """
    T = q.shape[1]
    block = functools.partial(_attend_block, k=k, v=v, old=old, start=start)
    if T <= QUERY_CHUNK:
        return block(q, jnp.int32(0))
    blocks = -(-T // QUERY_CHUNK)
    padded = jnp.pad(q, ((0, 0), (0, blocks * QUERY_CHUNK - T), (0, 0), (0, 0)))
    chunks = padded.reshape(q.shape[0], blocks, QUERY_CHUNK, *q.shape[2:]).swapaxes(0, 1)
    out = jax.lax.map(lambda x: block(*x), (chunks, QUERY_CHUNK * jnp.arange(blocks)))
    return out.swapaxes(0, 1).reshape(padded.shape)[:, :T]


def _attend_block(q: jax.Array, first: jax.Array, *, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array):
    """`attend_chunk` for the queries [B, X, N, H] at positions `first` .. first + X - 1 of the chunk."""
    q, score = scale_and_group(q, k.shape[1])
    mask = jnp.arange(k.shape[2]) <= (first + jnp.arange(q.shape[3]))[:, None]
    scores = jnp.where(mask, score(k), NEG_INF)  # [B, K, G, X, T]
    row_max = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - row_max)
    sums = row_max, jnp.sum(weights, axis=-1, keepdims=True), weighted_sum(weights, v, q.dtype)

    def read_block(at: jax.Array, width: int) -> Keys:
        return Keys(*(jax.lax.dynamic_slice_in_dim(x, at, width, 2) for x in (old.k, old.v)))

    return merge_heads(_over_cache(sums, q.dtype, score, read_block, start, old.v.shape[2]).astype(v.dtype))


def _over_cache(
    sums: Sums,
    dtype: Any,
    score: Callable[..., jax.Array],
    read_block: Callable[[jax.Array, int], Keys],
    start: jax.Array,
    S: int,
) -> jax.Array:
    """Continues a softmax over the cached positions, in blocks of `KEY_BLOCK` (arXiv 2205.14135, section 3.1).

    Args:
      sums: of the keys already attended to, float32: maximum and sum of exponentials [B, K, G, X, 1], and weighted
        sum of values [B, K, G, X, H].
      dtype: of products.
      score: the score function of the queries, from `scale_and_group`.
      read_block: from the first position of a block and its width to the cached keys and values there.
      start: [B] int32, the number of real positions of each row; blocks past the longest row are not visited.
      S: positions of the cache.

    Returns:
      [B, K, G, X, H] float32.
    """
    width = min(KEY_BLOCK, S)

    def visit(i: jax.Array, sums: Sums) -> Sums:
        row_max, denominator, numerator = sums
        at = jnp.minimum(i * width, S - width)  # the last block may overlap the one before
        position = at + jnp.arange(width)
        mask = (position >= i * width) & (position < start[:, None])
        block = read_block(at, width)
        scores = jnp.where(mask[:, None, None, None], score(block.k), NEG_INF)
        new_max = jnp.maximum(row_max, jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - new_max), jnp.exp(row_max - new_max)
        denominator = denominator * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        return new_max, denominator, numerator * rescale + weighted_sum(weights, block.v, dtype)

    _, denominator, numerator = jax.lax.fori_loop(0, -(-jnp.max(start) // width), visit, sums)
    return numerator / denominator


def _over_itself(score: Callable[..., jax.Array], k: jax.Array, v: jax.Array) -> Sums:
    """The sums of a single token that attends to itself; k and v [B, K, 1, H]."""
    own = score(k)  # [B, K, G, 1, 1]
    values = jnp.broadcast_to(v[:, :, None].astype(jnp.float32), (*own.shape[:-1], v.shape[-1]))
    return own, jnp.ones_like(own), values


def decode(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
    """Attention of one token over itself and the cached positions before it, all at once.

    Args:
      q: [B, 1, N, H].
      k, v: [B, K, 1, H] of the token.
      old: cached keys and values of S positions, of which the first start[b] are real.

    Returns:
      [B, 1, N, H].
    """
    q, score = scale_and_group(q, k.shape[1])
    own_max, own_denominator, own_numerator = _over_itself(score, k, v)
    scores = score(old.k)
    scores = jnp.where((jnp.arange(old.v.shape[2]) < start[:, None])[:, None, None, None], scores, NEG_INF)
    row_max = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own_max)
    weights, own_rescale = jnp.exp(scores - row_max), jnp.exp(own_max - row_max)
    denominator = jnp.sum(weights, axis=-1, keepdims=True) + own_rescale * own_denominator
    out = (weighted_sum(weights, old.v, q.dtype) + own_rescale * own_numerator) / denominator
    return merge_heads(out.astype(v.dtype))


def decode_in_groups(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array
) -> jax.Array:
    """`decode` for groups of rows, one after the other, so that a block of keys and values is used while it is in a
    CPU's cache. Each group reads its blocks up to its longest row.

    Args:
      cache: of which the first start[b] positions of row b are real.
      layer: [] int32.
    """
    own = ("rows", "kv_heads", None, None)
    arrays = (k, own), (v, own), (layer, ()), (start, ("rows",)), (cache.k, AXES), (cache.v, AXES)
    return on_own_rows(_decode_local_groups, q, ("rows", None, "heads", None), *arrays)


def rows_per_group(rows: int, block_bytes: int) -> int:
    """Rows per group: a divisor of `rows`; a block of one row has `block_bytes` bytes of keys."""
    return max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * block_bytes <= GROUP_BYTES))


def _decode_local_groups(first: Any, q, k, v, layer, start, cached_k, cached_v) -> jax.Array:
    """`decode_in_groups` for a device's rows and heads. cached_v [L, B, K, S, H]."""
    B, K, S, H = cached_v.shape[1:]
    R = rows_per_group(B, K * min(KEY_BLOCK, S) * H * q.dtype.itemsize)

    def group(g: jax.Array, out: jax.Array) -> jax.Array:
        queries, own_k, own_v, length = (jax.lax.dynamic_slice_in_dim(x, g * R, R) for x in (q, k, v, start))
        _, score = scale_and_group(queries, K)

        def read_block(at: jax.Array, width: int) -> Keys:
            begin, sizes = (layer, g * R, 0, at, 0), (1, R, K, width, H)
            return Keys(*(jax.lax.dynamic_slice(x, begin, sizes)[0] for x in (cached_k, cached_v)))

        attended = _over_cache(_over_itself(score, own_k, own_v), q.dtype, score, read_block, length, S)
        return jax.lax.dynamic_update_slice_in_dim(out, merge_heads(attended).astype(out.dtype), g * R, 0)

    return jax.lax.fori_loop(0, B // R, group, jnp.zeros_like(q))

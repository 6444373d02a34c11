"""Attention to a cache: `chunk_attention` of many tokens, `decode` of the few of a decode step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.models.attention.scores import NEG_INF, grouped, merge_heads, weighted_sum

QUERY_CHUNK = 256  # `chunk_attention` takes this many query positions at once
KEY_BLOCK = 256  # cached positions per block
MAX_DECODE_TOKENS = 8  # maximum tokens of a row per decode step: one, plus the drafts that the step verifies


@dataclass(frozen=True)
class Keys:
    """Keys and values of S positions in one layer of a cache."""

    k: jax.Array  # [B, K, S, H], or with `transposed` [B, K, H, S]
    v: jax.Array  # [B, K, S, H]
    transposed: bool = False
    k_scale: jax.Array | None = None  # in int8, one per line of H (models/int8.py): [B, K, S]
    v_scale: jax.Array | None = None


def chunk_attention(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
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
    """`chunk_attention` for the queries [B, X, N, H] at positions `first` .. first + X - 1 of the chunk."""
    q, scored = grouped(q, k.shape[1])
    sums = over_chunk(q.dtype, scored, k, v, first + jnp.arange(q.shape[3]))

    def read_block(at: jax.Array, width: int) -> Keys:
        def part(x: jax.Array | None, axis: int = 2) -> jax.Array | None:
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, at, width, axis)

        return Keys(
            part(old.k, 3 if old.transposed else 2), part(old.v), old.transposed, part(old.k_scale), part(old.v_scale)
        )

    out = over_cache(sums, q.dtype, scored, read_block, start, old.v.shape[2])
    return merge_heads(out.astype(v.dtype))


def over_chunk(
    dtype: Any, scored: Callable[..., jax.Array], k: jax.Array, v: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `sums` of `over_cache` after causal attention of a chunk's queries to the chunk itself.

    Args:
      dtype, scored: as in `over_cache`.
      k, v: [B, K, T, H] of the chunk.
      place: [X], the position of each query in the chunk.
    """
    mask = jnp.arange(k.shape[2]) <= place[:, None]
    scores = jnp.where(mask, scored(k), NEG_INF)  # [B, K, G, X, T]
    row_max = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - row_max)
    if k.shape[2] > MAX_DECODE_TOKENS:
        out = weighted_sum(weights, v, dtype)
    else:  # A draft whose values are not finite must not reach the tokens before it: 0 * NaN is NaN.
        values = weights[..., None] * v[:, :, None, None].astype(jnp.float32)
        out = jnp.sum(jnp.where(mask[..., None], values, 0), axis=-2)
    return row_max, jnp.sum(weights, axis=-1, keepdims=True), out


def over_cache(
    sums: tuple[jax.Array, ...],
    dtype: Any,
    scored: Callable[..., jax.Array],
    read_block: Callable[[jax.Array, int], Keys],
    start: jax.Array,
    S: int,
) -> jax.Array:
    """Continues a softmax over the cached positions, in blocks of `KEY_BLOCK` (arXiv 2205.14135, section 3.1).

    Args:
      sums: of the keys already attended to, float32: maximum and sum of exponentials [B, K, G, X, 1], and weighted
        sum of values [B, K, G, X, H].
      dtype: of products.
      scored: the score function of the queries, from `grouped`.
      read_block: from the first position of a block and its width to the cached keys and values there.
      start: [B] int32, the number of real positions of each row; blocks past the longest row are not visited.
      S: positions of the cache.

    Returns:
      [B, K, G, X, H] float32.
    """
    width = min(KEY_BLOCK, S)

    def visit(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row_max, denominator, numerator = sums
        at = jnp.minimum(i * width, S - width)  # the last block may overlap the one before
        place = at + jnp.arange(width)
        mask = (place >= i * width) & (place < start[:, None])
        here = read_block(at, width)
        scores = scored(here.k, here.transposed, here.k_scale)
        scores = jnp.where(mask[:, None, None, None], scores, NEG_INF)
        new_max = jnp.maximum(row_max, jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - new_max), jnp.exp(row_max - new_max)
        denominator = denominator * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        return new_max, denominator, numerator * rescale + weighted_sum(weights, here.v, dtype, here.v_scale)

    _, denominator, numerator = jax.lax.fori_loop(0, -(-jnp.max(start) // width), visit, sums)
    return numerator / denominator


def decode(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
    """Causal attention of a few tokens over themselves and the cached positions before them, all at once.

    Args:
      q: [B, T, N, H], T at most `MAX_DECODE_TOKENS`.
      k, v: [B, K, T, H] of the tokens.
      old: cached keys and values of S positions, of which the first start[b] are real.

    Returns:
      [B, T, N, H].
    """
    T, S = q.shape[1], old.v.shape[2]
    q, scored = grouped(q, k.shape[1])
    own_max, own_denominator, own_numerator = over_chunk(q.dtype, scored, k, v, jnp.arange(T))
    scores = scored(old.k, old.transposed, old.k_scale)
    scores = jnp.where((jnp.arange(S) < start[:, None])[:, None, None, None], scores, NEG_INF)
    row_max = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own_max)
    weights, own_rescale = jnp.exp(scores - row_max), jnp.exp(own_max - row_max)
    denominator = jnp.sum(weights, axis=-1, keepdims=True) + own_rescale * own_denominator
    out = (weighted_sum(weights, old.v, q.dtype, old.v_scale) + own_rescale * own_numerator) / denominator
    return merge_heads(out.astype(v.dtype))

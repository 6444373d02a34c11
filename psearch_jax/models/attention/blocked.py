"""Attention in blocks of queries, for float32 and for devices without a kernel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from psearch_jax.models.attention.scores import ATTENTION_OUTPUT, NEG_INF, group_heads, merge_heads, scale_and_group

QUERY_BLOCK, MOST_BLOCKS = 64, 16  # minimum size and maximum number of blocks


@jax.custom_vjp
def blocked_attention(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None) -> jax.Array:
    """Causal attention by blocks of queries, each against the keys up to its own end.

    `begin` [B, T] is the start of each position's segment; None: each row is one segment.
    The backward pass recomputes the attention weights from the scores' log-sum-exp (arXiv 2205.14135, section 3.1).
    Storing them, or differentiating through the softmax, would read and write them several times more.
    """
    return _blocked_forward(q, k, v, begin)[0]


def _blocks(T: int) -> list[tuple[int, int]]:
    """The range [first, last) of query positions of each block."""
    size = max(QUERY_BLOCK, -(-T // MOST_BLOCKS))
    return [(first, min(first + size, T)) for first in range(0, T, size)]


def _scores(score: Callable[..., jax.Array], k: jax.Array, begin: Any, block: tuple[int, int]) -> jax.Array:
    """Scores [B, K, G, X, S] of a block's queries from `scale_and_group`; NEG_INF where it may not attend."""
    first, last = block
    position = jnp.arange(last)
    mask = (position <= jnp.arange(first, last)[:, None])[None]
    if begin is not None:
        mask = mask & (position >= begin[:, first:last, None])
    return jnp.where(mask[:, None, None], score(k[:, :, :last]), NEG_INF)


def _blocked_forward(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None) -> tuple[jax.Array, Any]:
    out, log_sums = checkpoint_name(_attend(q, k, v, begin), ATTENTION_OUTPUT)
    return out, (q, k, v, begin, out, log_sums)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None) -> tuple[jax.Array, Any]:
    """The output, and the log-sum-exp of each block's scores."""
    K, outputs, log_sums = k.shape[1], [], []
    for first, last in _blocks(q.shape[1]):
        _, score = scale_and_group(q[:, first:last], K)
        scores = _scores(score, k, begin, (first, last))
        row_max = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - row_max)
        denominator = jnp.sum(weights, axis=-1, keepdims=True)
        numerator = jnp.einsum("BKGXS,BKSH->BKGXH", weights.astype(q.dtype), v[:, :, :last])
        outputs.append(merge_heads((numerator / denominator).astype(q.dtype)))
        log_sums.append(row_max + jnp.log(denominator))
    return jnp.concatenate(outputs, axis=1), log_sums


def _blocked_backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, begin, out, log_sums = residuals
    K, H, dtype = k.shape[1], q.shape[-1], q.dtype
    wide = dtype == jnp.float32
    # The gradients of k and v are summed as [B, K, H, S]: otherwise XLA for CPUs would transpose all scores for them.
    dq, (dk, dv) = [], (jnp.zeros(x.swapaxes(2, 3).shape, jnp.float32) for x in (k, v))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The backward pass is traced outside `products.precision`, so the same precision is set here.
    with jax.default_matmul_precision("highest") if wide else contextlib.nullcontext():
        for (first, last), log_sum in zip(_blocks(q.shape[1]), log_sums, strict=True):
            queries, score = scale_and_group(q[:, first:last], K)
            d_out, outputs = (group_heads(x[:, first:last], K) for x in (gradient, out))
            weights = jnp.exp(_scores(score, k, begin, (first, last)) - log_sum)
            d_weights = product("BKGXH,BKSH->BKGXS", d_out, v[:, :, :last])
            mean = jnp.sum(d_out.astype(jnp.float32) * outputs.astype(jnp.float32), axis=-1, keepdims=True)
            d_scores = (weights * (d_weights - mean)).astype(dtype)
            dq.append(merge_heads(product("BKGXS,BKSH->BKGXH", d_scores, k[:, :, :last])))
            dk = dk.at[..., :last].add(product("BKGXH,BKGXS->BKHS", queries, d_scores))
            dv = dv.at[..., :last].add(product("BKGXH,BKGXS->BKHS", d_out, weights.astype(dtype)))
    # In float32, `scale_and_group` scales the queries, so `queries`, and with it `dk`, is already scaled.
    dq, dk = jnp.concatenate(dq, axis=1) * H**-0.5, dk if wide else dk * H**-0.5
    dk, dv = dk.swapaxes(2, 3), dv.swapaxes(2, 3)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


blocked_attention.defvjp(_blocked_forward, _blocked_backward)

"""Attention in blocks of queries, for float32 and for devices without a kernel.

`rowwise_attention` computes one row at a time, so that its scores stay in a CPU's cache.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from psearch_jax.models.attention.scores import ATTENTION_OUTPUT, NEG_INF, group_heads, grouped, merge_heads

QUERY_BLOCK, MOST_BLOCKS = 64, 16  # minimum size and maximum number of blocks


def rowwise_attention(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None = None) -> jax.Array:
    """`blocked_attention`, one row at a time."""
    return blocked_attention(q, k, v, begin, True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None, by_row: bool = False
) -> jax.Array:
    """Causal attention by blocks of queries, each against the keys up to its own end.

    All rows are computed at once, or one after the other with `by_row`.

    `begin` [B, T] is the start of each position's segment; None: each row is one segment.
    The backward pass recomputes the attention weights from the scores' log-sum-exp (arXiv 2205.14135, section 3.1).
    Storing them, or differentiating through the softmax, would read and write them several times more.
    """
    return _blocked_forward(q, k, v, begin, by_row)[0]


def _each_row(by_row: bool, function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`; with `by_row` one row at a time, so that its scores stay in the processor's cache."""
    if not by_row:
        return function(*arrays)

    def one(row: Any) -> Any:
        return jax.tree.map(lambda x: x[0], function(*jax.tree.map(lambda x: x[None], row)))

    return jax.lax.map(one, arrays)


def _blocks(T: int) -> list[tuple[int, int]]:
    """The range [first, last) of query positions of each block."""
    size = max(QUERY_BLOCK, -(-T // MOST_BLOCKS))
    return [(first, min(first + size, T)) for first in range(0, T, size)]


def _scores(scored: Callable[..., jax.Array], k: jax.Array, begin: Any, block: tuple[int, int]) -> jax.Array:
    """Scores [B, K, G, X, S] of a block's queries from `grouped`, float32; NEG_INF where a query may not attend."""
    first, last = block
    place = jnp.arange(last)
    mask = (place <= jnp.arange(first, last)[:, None])[None]
    if begin is not None:
        mask = mask & (place >= begin[:, first:last, None])
    return jnp.where(mask[:, None, None], scored(k[:, :, :last]), NEG_INF)


def _blocked_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None, by_row: bool
) -> tuple[jax.Array, Any]:
    out, log_sums = checkpoint_name(_each_row(by_row, _attended, q, k, v, begin), ATTENTION_OUTPUT)
    return out, (q, k, v, begin, out, log_sums)


def _attended(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None) -> tuple[jax.Array, Any]:
    """`causal`, and the log-sum-exp of each block's scores."""
    K, outputs, log_sums = k.shape[1], [], []
    for first, last in _blocks(q.shape[1]):
        _, scored = grouped(q[:, first:last], K)
        scores = _scores(scored, k, begin, (first, last))
        row_max = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - row_max)
        denominator = jnp.sum(weights, axis=-1, keepdims=True)
        numerator = jnp.einsum("BKGXS,BKSH->BKGXH", weights.astype(q.dtype), v[:, :, :last])
        outputs.append(merge_heads((numerator / denominator).astype(q.dtype)))
        log_sums.append(row_max + jnp.log(denominator))
    return jnp.concatenate(outputs, axis=1), log_sums


def _blocked_backward(by_row: bool, residuals: Any, gradient: jax.Array) -> tuple:
    return *_each_row(by_row, _pulled_back, *residuals, gradient), None


def _pulled_back(q, k, v, begin, out, log_sums, gradient) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v."""
    K, H, dtype = k.shape[1], q.shape[-1], q.dtype
    wide = dtype == jnp.float32
    # The gradients of k and v are summed as [B, K, H, S]: otherwise XLA for CPUs would transpose all scores for them.
    dq, (dk, dv) = [], (jnp.zeros(x.swapaxes(2, 3).shape, jnp.float32) for x in (k, v))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The backward pass is traced outside `products.precision`, so the same precision is set here.
    with jax.default_matmul_precision("highest") if wide else contextlib.nullcontext():
        for (first, last), log_sum in zip(_blocks(q.shape[1]), log_sums, strict=True):
            queries, scored = grouped(q[:, first:last], K)
            d_out, outputs = (group_heads(x[:, first:last], K) for x in (gradient, out))
            weights = jnp.exp(_scores(scored, k, begin, (first, last)) - log_sum)
            d_weights = product("BKGXH,BKSH->BKGXS", d_out, v[:, :, :last])
            mean = jnp.sum(d_out.astype(jnp.float32) * outputs.astype(jnp.float32), axis=-1, keepdims=True)
            d_scores = (weights * (d_weights - mean)).astype(dtype)
            dq.append(merge_heads(product("BKGXS,BKSH->BKGXH", d_scores, k[:, :, :last])))
            dk = dk.at[..., :last].add(product("BKGXH,BKGXS->BKHS", queries, d_scores))
            dv = dv.at[..., :last].add(product("BKGXH,BKGXS->BKHS", d_out, weights.astype(dtype)))
    # In float32, `grouped` scales the queries, so `queries`, and with it `dk`, is already scaled.
    dq, dk = jnp.concatenate(dq, axis=1) * H**-0.5, dk if wide else dk * H**-0.5
    dk, dv = dk.swapaxes(2, 3), dv.swapaxes(2, 3)
    return tuple(x.astype(like.dtype) for x, like in zip((dq, dk, dv), (q, k, v), strict=True))


blocked_attention.defvjp(_blocked_forward, _blocked_backward)

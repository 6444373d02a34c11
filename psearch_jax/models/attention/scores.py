"""What the implementations of attention share: scores of grouped heads, and sums of values weighted by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

NEG_INF = -1e30  # a finite stand-in: the softmax of a row of only -inf would be NaN
ATTENTION_OUTPUT = "attended"  # name for remat policies of what the backward pass keeps of attention (not in `cudnn`)


def scale_and_group(q: jax.Array, K: int) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """Queries [B, X, N, H] as [B, K, G, X, H], and a function from keys to float32 scores [B, K, G, X, S]."""
    H = q.shape[-1]
    wide = q.dtype == jnp.float32  # then scale the queries, because they are fewer than the scores
    q = group_heads(q * H**-0.5 if wide else q, K)

    def score(k: jax.Array) -> jax.Array:
        scores = jnp.einsum("BKGXH,BKSH->BKGXS", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
        return scores if wide else scores * H**-0.5

    return q, score


def group_heads(x: jax.Array, K: int) -> jax.Array:
    """[B, X, N, H] as [B, K, G, X, H]."""
    B, X, N, H = x.shape
    return x.reshape(B, X, K, N // K, H).transpose(0, 2, 3, 1, 4)


def merge_heads(out: jax.Array) -> jax.Array:
    """[B, K, G, X, H] as [B, X, N, H]."""
    B, K, G, X, H = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(B, X, K * G, H)


def weighted_sum(weights: jax.Array, v: jax.Array, dtype: Any) -> jax.Array:
    """Sums of values [B, K, S, H] weighted by `weights` [B, K, G, X, S]: float32, from products in `dtype`."""
    product = functools.partial(jnp.einsum, "BKGXS,BKSH->BKGXH", preferred_element_type=jnp.float32)
    return product(weights.astype(dtype), v.astype(dtype))

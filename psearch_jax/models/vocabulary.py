"""Log-probs and entropies over the vocabulary: computed for a chunk of positions at a time, and recomputed in the
backward pass, so that the logits of a complete row never exist at once.

M positions, V columns of the head, of which a device has V / n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.models.attention.scores import NEG_INF

Score = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]  # (head, h, t) as in `by_chunks`


def score_wanted(
    score: Score, chunk: int, head: jax.Array, hidden: jax.Array, targets: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of `targets` and entropies at the wanted positions of a device's rows; 0 elsewhere.

    Args:
      score: from the head, states [M, D] and targets [M] to both, each [M].
      chunk: positions that are scored at a time.
      hidden: [B, T, D]; targets, wanted: [B, T].
    """
    B, T, D = hidden.shape
    chunk = min(chunk, B * T)
    # The wanted positions of all rows come first, then the others.
    order = jnp.argsort(~wanted.reshape(-1), stable=True)
    order = jnp.concatenate([order, B * T + jnp.arange(-(B * T) % chunk, dtype=order.dtype)])
    unique = {"unique_indices": True}  # also those past the end, which pad the last chunk
    flat = (jnp.asarray(x).reshape(B * T, *x.shape[2:]) for x in (hidden, targets))
    h, t = (x.at[order].get(mode="fill", fill_value=0, **unique) for x in flat)
    results = by_chunks(score, chunk, head, h, t, jnp.sum(wanted))
    chosen, entropy = (jnp.zeros(B * T).at[order].set(x, mode="drop", **unique).reshape(B, T) for x in results)
    return jnp.where(wanted, chosen, 0.0), jnp.where(wanted, entropy, 0.0)


def score_logits(logits: jax.Array, t: jax.Array, split: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the targets t [M] and entropies [M] of the softmax of logits [M, V].

    Args:
      split: the device has only V / n of the columns, and this mesh axis the others.
    """
    columns = logits.shape[1]

    def over_all(x: jax.Array, reduce: Callable = jax.lax.psum) -> jax.Array:
        return reduce(x, split) if split else x

    first = jax.lax.axis_index(split) * columns if split else 0
    row_max = over_all(jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)), jax.lax.pmax)
    logits -= row_max
    table = logits - jnp.log(over_all(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True)))
    column = t - first
    chosen = jnp.take_along_axis(table, jnp.clip(column, 0, columns - 1)[..., None], axis=-1)[..., 0]
    if split:
        chosen = over_all(jnp.where((column >= 0) & (column < columns), chosen, 0.0))
    entropy = -over_all(jnp.sum(jnp.exp(table) * jnp.where(table > NEG_INF / 2, table, 0.0), axis=-1))
    return chosen, entropy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_chunks(
    score: Score, chunk: int, head: jax.Array, h: jax.Array, t: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the targets and entropies at the first `count` of M positions, `chunk` at a time; 0 after them.

    The number of iterations depends on `count`. JAX differentiates such a loop only in forward mode, hence the custom
    backward pass.
    """
    return _by_chunks_forward(score, chunk, head, h, t, count)[0]


def _by_chunks_forward(
    score: Score, chunk: int, head: jax.Array, h: jax.Array, t: jax.Array, count: jax.Array
) -> tuple:
    def body(i: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = score(head, *_chunks(i, chunk, h, t))
        return tuple(jax.lax.dynamic_update_slice_in_dim(a, x, i * chunk, 0) for a, x in zip(out, parts, strict=True))

    zeros = jnp.zeros(t.shape, jnp.float32)
    return jax.lax.fori_loop(0, -(-count // chunk), body, (zeros, zeros)), (head, h, t, count)


def _by_chunks_backward(score: Score, chunk: int, residuals: tuple[Any, ...], gradients: Any) -> tuple:
    head, h, t, count = residuals

    def body(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, targets, *d_out = _chunks(i, chunk, h, t, *gradients)
        d_head, d_states = jax.vjp(lambda head, h: score(head, h, targets), head, states)[1](tuple(d_out))
        return sums[0] + d_head, jax.lax.dynamic_update_slice_in_dim(sums[1], d_states, i * chunk, 0)

    zeros = jnp.zeros_like(head), jnp.zeros_like(h)
    return *jax.lax.fori_loop(0, -(-count // chunk), body, zeros), None, None


def _chunks(i: jax.Array, chunk: int, *arrays: jax.Array) -> list[jax.Array]:
    """The positions of chunk i of each array."""
    return [jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in arrays]


by_chunks.defvjp(_by_chunks_forward, _by_chunks_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_head(part: jax.Array, axis: str, dtype: jnp.dtype) -> jax.Array:
    """A device's rows [D / n, V] -> those of all n devices on a mesh axis, [D, V], rounded to and sent in `dtype`.

    They are returned in the part's own dtype, so that a loop accumulates their gradient in it (the compiler removes
    the two conversions). The gradient is also sent in it.
    """
    return jax.lax.all_gather(part.astype(dtype), axis, axis=0, tiled=True).astype(part.dtype)


def _gather_forward(part: jax.Array, axis: str, dtype: jnp.dtype) -> tuple[jax.Array, None]:
    return gather_head(part, axis, dtype), None


def _gather_backward(axis: str, dtype: jnp.dtype, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(gradient, axis, scatter_dimension=0, tiled=True),)


gather_head.defvjp(_gather_forward, _gather_backward)

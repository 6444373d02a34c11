"""Passes over the vocabulary: log-probs and entropies of chunks of positions, and gathering the head on a mesh.

M positions, V columns of the head. On a CPU the logits [M, V] of a chunk do not fit into the processor's caches, and
the elementwise operations of a softmax take several times as long as the product. So it goes over blocks of columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from psearch_jax.models.attention.scores import NEG_INF

BLOCK = 16384  # maximum columns of a block

Scored = tuple[jax.Array, jax.Array, jax.Array]  # log-probs of the targets, entropies, log-sum-exps, each [M]


class Pass(NamedTuple):
    """How a chunk of positions is computed; `head` is a tree of arrays, h the [M, D] states, t the [M] targets.

    Attributes:
      forward: (head, h, t) -> Scored.
      backward: (head, h, t, what `forward` returned, the gradients of its first two) -> the gradients of head (None if
        it `is_frozen`) and h.
    """

    forward: Callable[[Any, jax.Array, jax.Array], Scored]
    backward: Callable[[Any, jax.Array, jax.Array, Scored, tuple[jax.Array, jax.Array]], tuple[Any, jax.Array]]


def is_frozen(head: Any) -> bool:
    """Whether the head is stored as its bits (products.bits), so that it has no gradient."""
    return any(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(head))


def at_once(forward: Callable[[Any, jax.Array, jax.Array], Scored]) -> Pass:
    """All columns at once; the backward pass computes `forward` again."""

    def backward(head: Any, h: jax.Array, t: jax.Array, _: Scored, gradients: tuple) -> tuple[Any, jax.Array]:
        return jax.vjp(lambda head, h: forward(head, h, t)[:2], head, h)[1](gradients)

    return Pass(forward, backward)


def n_blocks(columns: int) -> int:
    """The smallest number of equal blocks of at most `BLOCK` columns; 1 if the columns do not divide into few."""
    least = -(-columns // BLOCK)
    return next((n for n in range(least, 4 * least) if columns % n == 0), 1)


def by_blocks(logits: Callable[[Any, jax.Array, jax.Array], jax.Array]) -> Pass:
    """One block of columns after the other, with a running softmax (arXiv 1805.02867, algorithm 3).

    The backward pass computes the logits again, and the softmax from the log-sum-exps of the forward pass.

    Args:
      logits: (a block of the head, h, the index of the block) -> [M, columns of a block] float32. The arrays of `head`
        have a leading axis of blocks.
    """

    def forward(head: Any, h: jax.Array, t: jax.Array) -> Scored:
        def add(sums: tuple[jax.Array, ...], block: tuple[jax.Array, Any]) -> tuple[tuple[jax.Array, ...], None]:
            row_max, denominator, weighted, target_logit = sums
            index, part = block
            out = logits(part, h, index)
            new_max = jnp.maximum(row_max, jnp.max(out, axis=-1))
            above, rescale = out - new_max[:, None], jnp.exp(row_max - new_max)
            powers = jnp.exp(above)
            weighted = rescale * (weighted + (row_max - new_max) * denominator) + jnp.sum(powers * above, axis=-1)
            denominator = rescale * denominator + jnp.sum(powers, axis=-1)
            here, place = jnp.divmod(t, out.shape[1])
            chosen = jnp.take_along_axis(out, place[:, None], axis=-1)[:, 0]
            return (new_max, denominator, weighted, jnp.where(here == index, chosen, target_logit)), None

        zero = jnp.zeros(t.shape, jnp.float32)
        (row_max, denominator, weighted, target_logit), _ = jax.lax.scan(
            add, (zero + NEG_INF, zero, zero, zero), _listed(head)
        )
        log_total = jnp.log(denominator)
        return target_logit - row_max - log_total, log_total - weighted / denominator, row_max + log_total

    def backward(head: Any, h: jax.Array, t: jax.Array, scored: Scored, gradients: tuple) -> tuple[Any, jax.Array]:
        d_chosen, d_entropy, entropy, log_sum = (x[:, None] for x in (*gradients, *scored[1:]))

        def add(dh: jax.Array, block: tuple[jax.Array, Any]) -> tuple[jax.Array, list[Any]]:
            index, part = block
            if is_frozen(head):
                out, pull = jax.vjp(lambda h: logits(part, h, index), h)
            else:
                out, pull = jax.vjp(lambda part, h: logits(part, h, index), part, h)
            is_target = t[:, None] == index * out.shape[1] + jnp.arange(out.shape[1])
            log_weights = out - log_sum
            weights = jnp.exp(log_weights)
            *d_part, dh_part = pull(d_chosen * (is_target - weights) - d_entropy * weights * (log_weights + entropy))
            return dh + dh_part, d_part

        dh, d_head = jax.lax.scan(add, jnp.zeros_like(h), _listed(head))
        return (d_head[0] if d_head else None), dh

    return Pass(forward, backward)


def _listed(head: Any) -> tuple[jax.Array, Any]:
    """The blocks of a head and their indices, to scan over."""
    return jnp.arange(jax.tree.leaves(head)[0].shape[0], dtype=jnp.int32), head


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_chunks(
    visit: Pass, chunk: int, head: Any, h: jax.Array, t: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the targets and entropies at the first `count` of M positions, `chunk` at a time; 0 after them.

    The number of iterations depends on `count`. JAX differentiates such a loop only in forward mode, hence the custom
    backward pass.
    """
    return _by_chunks_forward(visit, chunk, head, h, t, count)[0]


def _by_chunks_forward(visit: Pass, chunk: int, head: Any, h: jax.Array, t: jax.Array, count: jax.Array) -> tuple:
    def body(i: jax.Array, out: Scored) -> Scored:
        parts = visit.forward(head, *_chunks(i, chunk, h, t))
        return tuple(jax.lax.dynamic_update_slice_in_dim(a, x, i * chunk, 0) for a, x in zip(out, parts, strict=True))

    zeros = jnp.zeros(t.shape, jnp.float32)
    scored = jax.lax.fori_loop(0, -(-count // chunk), body, (zeros, zeros, zeros))
    return scored[:2], (head, h, t, count, scored)


def _by_chunks_backward(visit: Pass, chunk: int, residuals: tuple[Any, ...], gradients: Any) -> tuple:
    head, h, t, count, scored = residuals

    def body(i: jax.Array, sums: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        states, targets, *rest = _chunks(i, chunk, h, t, *scored, *gradients)
        d_head, d_states = visit.backward(head, states, targets, tuple(rest[:3]), tuple(rest[3:]))
        dh = jax.lax.dynamic_update_slice_in_dim(sums[1], d_states, i * chunk, 0)
        return jax.tree.map(jnp.add, sums[0], d_head), dh

    zeros = None if is_frozen(head) else jax.tree.map(jnp.zeros_like, head), jnp.zeros_like(h)
    return *jax.lax.fori_loop(0, -(-count // chunk), body, zeros), None, None


def _chunks(i: jax.Array, chunk: int, *arrays: jax.Array) -> list[jax.Array]:
    """The positions of chunk i of each array."""
    return [jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in arrays]


by_chunks.defvjp(_by_chunks_forward, _by_chunks_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(part: jax.Array, axis: str, dtype: jnp.dtype) -> jax.Array:
    """A device's rows [D / n, V] -> those of all n devices on a mesh axis, [D, V], rounded to and sent in `dtype`.

    They are returned in the part's own dtype, so that a loop accumulates their gradient in it (the compiler removes
    the two conversions). The gradient is also sent in it.
    """
    return jax.lax.all_gather(part.astype(dtype), axis, axis=0, tiled=True).astype(part.dtype)


def _gathered_forward(part: jax.Array, axis: str, dtype: jnp.dtype) -> tuple[jax.Array, None]:
    return gathered(part, axis, dtype), None


def _gathered_backward(axis: str, dtype: jnp.dtype, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(gradient, axis, scatter_dimension=0, tiled=True),)


gathered.defvjp(_gathered_forward, _gathered_backward)

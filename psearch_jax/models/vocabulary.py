"""The parts of a pass over the vocabulary that have a custom backward pass: its loop, and gathering the head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_chunks(
    one: Callable, chunk: int, head: Any, h: jax.Array, t: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`one(head, h, t)` for the first `count` of [M, D] states and [M] targets, `chunk` at a time; 0 after them.

    The number of iterations depends on `count`. JAX differentiates such a loop only in forward mode, hence the custom
    backward pass, which recomputes every chunk. `head` is a tree of arrays.
    """

    def body(i: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        parts = one(head, *(jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in (h, t)))
        return tuple(jax.lax.dynamic_update_slice_in_dim(a, x, i * chunk, 0) for a, x in zip(out, parts, strict=True))

    zeros = jnp.zeros(t.shape, jnp.float32)
    return jax.lax.fori_loop(0, -(-count // chunk), body, (zeros, zeros))


def _by_chunks_forward(one: Callable, chunk: int, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    return by_chunks(one, chunk, *arguments), arguments


def _by_chunks_backward(one: Callable, chunk: int, arguments: tuple[Any, ...], gradients: Any) -> tuple:
    head, h, t, count = arguments

    def body(i: jax.Array, sums: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        states, targets, *g = (jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in (h, t, *gradients))
        _, pull = jax.vjp(lambda head, states: one(head, states, targets), head, states)
        of_head, of_states = pull(tuple(g))
        return jax.tree.map(jnp.add, sums[0], of_head), jax.lax.dynamic_update_slice_in_dim(
            sums[1], of_states, i * chunk, 0
        )

    zeros = jax.tree.map(jnp.zeros_like, (head, h))
    return *jax.lax.fori_loop(0, -(-count // chunk), body, zeros), None, None


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

"""What a pass over the vocabulary needs a backward pass of its own for: its loop, and the gathering of the head."""

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

    A loop that ends where the work ends, which JAX differentiates forward only: hence the backward pass of its own. It
    computes every chunk anew. `head` is a tree of arrays.
    """

    def body(i: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = one(head, *(jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in (h, t)))
        return tuple(jax.lax.dynamic_update_slice_in_dim(a, x, i * chunk, 0) for a, x in zip(out, found, strict=True))

    zeros = jnp.zeros(t.shape, jnp.float32)
    return jax.lax.fori_loop(0, -(-count // chunk), body, (zeros, zeros))


def _by_chunks_forward(one: Callable, chunk: int, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    return by_chunks(one, chunk, *arguments), arguments


def _by_chunks_backward(one: Callable, chunk: int, arguments: tuple[Any, ...], gradients: Any) -> tuple:
    head, h, t, count = arguments

    def body(i: jax.Array, sums: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        mine, targets, *g = (jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in (h, t, *gradients))
        _, pull = jax.vjp(lambda head, mine: one(head, mine, targets), head, mine)
        of_head, of_mine = pull(tuple(g))
        return jax.tree.map(jnp.add, sums[0], of_head), jax.lax.dynamic_update_slice_in_dim(
            sums[1], of_mine, i * chunk, 0
        )

    zeros = jax.tree.map(jnp.zeros_like, (head, h))
    return *jax.lax.fori_loop(0, -(-count // chunk), body, zeros), None, None


by_chunks.defvjp(_by_chunks_forward, _by_chunks_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(part: jax.Array, axis: str, dtype: jnp.dtype) -> jax.Array:
    """A device's rows [D / n, V] -> those of all n along a mesh axis, [D, V], rounded to `dtype`, to travel in it.

    They are handed on in the part's own dtype, so that a loop adds up their gradient in it (the compiler takes the two
    conversions away), and the gradient travels in it too.
    """
    return jax.lax.all_gather(part.astype(dtype), axis, axis=0, tiled=True).astype(part.dtype)


def _gathered_forward(part: jax.Array, axis: str, dtype: jnp.dtype) -> tuple[jax.Array, None]:
    return gathered(part, axis, dtype), None


def _gathered_backward(axis: str, dtype: jnp.dtype, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(gradient, axis, scatter_dimension=0, tiled=True),)


gathered.defvjp(_gathered_forward, _gathered_backward)

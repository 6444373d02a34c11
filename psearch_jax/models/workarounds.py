"""Forms of computations that only the compiler asks for.

XLA's backends compile the plain forms slowly or with copies. Each function names the backend and the versions of jax
in which that was seen. tests/models/test_products.py fails once `multiply_left` can go; the others need a profile, or
the text of the compiled program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from psearch_jax.models.lora import KERNELS

Weights = Mapping[str, jax.Array]  # of one layer, by name


class Unstacked(NamedTuple):
    """What decoding reads in place of the model's stacked weights.

    Attributes:
      layers: the weights of each; with `kernels_left`, a kernel NAME [*in, *out] is NAME_left [*out, *in] in float32.
      head: with `kernels_left` [V, D] in float32; in a copy for one call None; else [D, V].
    """

    layers: tuple[Weights, ...]
    head: jax.Array | None


def unstack(weights: Weights, layers: int, head: jax.Array | None, kernels_left: bool) -> Unstacked:
    """Copies the weights of each layer into separate arrays, before a loop of many decode steps.

    jax 0.10 to 0.12, GPUs and CPUs: XLA does not multiply by a slice of an array in place. In the loop over the layers
    it first copies every kernel, so each step reads the weights a second time and writes them.

    Args:
      weights: of all layers, each [L, ...].
      head: [D, V], or None to leave it where it is.
      kernels_left: transpose kernels and head for `multiply_left`.
    """
    each = tuple({name: x[layer] for name, x in weights.items()} for layer in range(layers))
    if not kernels_left or head is None:
        return Unstacked(each, head)
    return Unstacked(tuple(map(_transpose_kernels, each)), head.T.astype(jnp.float32))


def _transpose_kernels(layer: Weights) -> Weights:
    out = dict(layer)
    for name, (inner, outer) in KERNELS.items():
        order = (*range(len(inner), len(inner) + len(outer)), *range(len(inner)))
        out[f"{name}_left"] = jnp.transpose(out.pop(name), order).astype(jnp.float32)
    return out


def multiply_left(x: jax.Array, left: jax.Array) -> jax.Array:
    """x [M, K] times the transpose of a kernel that is stored as `left` [N, K], for a few rows, in float32.

    jax 0.10 to 0.12, CPUs: XLA first copies the second operand of every product into another layout. If the kernel
    were second, a product of a few rows would be mostly copying; so here the rows are second. The barriers keep XLA
    from merging neighbouring operations into the product, which would swap the operands again.
    """
    operand = jax.lax.optimization_barrier(x.T)
    return jax.lax.optimization_barrier(jnp.matmul(left, operand)).T


def store_transposed(x: jax.Array) -> jax.Array:
    """The transpose of a matrix, stored as such.

    jax 0.10 to 0.12, CPUs with 16-bit products: XLA multiplies 16-bit operands at the speed of float32 if the second
    one is the transpose of a stored array.
    """
    return jax.lax.optimization_barrier(x.T)


def look_up(table: jax.Array, ids: jax.Array, dtype: Any, is_cpu: bool) -> jax.Array:
    """Rows of an embedding [V, D] at ids [...], in `dtype`.

    jax 0.10 to 0.12, CPUs in 16 bits: XLA would convert the complete table to float32 before the loop that decodes.
    """
    if is_cpu and table.dtype != dtype:
        table, ids = jax.lax.optimization_barrier((table, ids))
    return jnp.take(table, ids, axis=0).astype(dtype)


def separate_input(x: jax.Array) -> jax.Array:
    """x, as another array to the compiler.

    jax 0.10 to 0.12, GPUs: where a kernel and its adapter multiply the same x, XLA concatenates both at every token.
    """
    return jax.lax.optimization_barrier(x)

"""Frozen matrices in both orders, for training adapters in 16 bits on a CPU.

On a CPU, XLA multiplies 16-bit operands at twice the speed of float32 only if the second one is stored as [K, N]. The
backward pass multiplies by the transpose of every kernel, and a tied head is the transpose of the embedding; without
stored transposes, both products are as slow as float32. So frozen matrices are transposed once, and stored as their
bits in both orders (see products.bits).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import DecoderConfig
from psearch_jax.models.lora import KERNELS, axis_sizes
from psearch_jax.models.products import bits
from psearch_jax.models.vocabulary import n_blocks
from psearch_jax.runtime import platforms
from psearch_jax.sharding import is_one_cpu


class TransposedKernels(nnx.Module):
    """For every kernel, `NAME_transposed` [L, outputs, inputs], with the axes of each side merged."""

    def __init__(self, config: DecoderConfig):
        sizes = axis_sizes(config)
        for name, (inner, outer) in KERNELS.items():
            inputs, outputs = (math.prod(sizes[c] for c in side) for side in (inner, outer))
            setattr(self, f"{name}_transposed", nnx.Param(jnp.zeros((config.layers, outputs, inputs))))


class Transposed(nnx.Module):
    """The kernels' transposes, and the head in the order that the model does not store.

    Attributes:
      head, head_transposed: [n, D, V/n] and [n, V/n, D], the head in both orders by blocks of its columns
        (vocabulary.by_blocks); None for a model without a head.
    """

    def __init__(self, config: DecoderConfig, head: bool):
        self.layers = TransposedKernels(config)
        n = n_blocks(config.vocab_rows)
        D, columns = config.width, config.vocab_rows // n
        self.head = nnx.Param(jnp.zeros((n, D, columns))) if head else None
        self.head_transposed = nnx.Param(jnp.zeros((n, columns, D))) if head else None


def multiplies_slowly_transposed(mesh: Mesh, dtype: Any) -> bool:
    """Whether products with the transpose of a stored matrix are slower than with the matrix: on a single CPU, in a
    16-bit dtype for which it has instructions."""
    return is_one_cpu(mesh) and jnp.dtype(dtype).itemsize == 2 and platforms.cpu_multiplies(dtype)


@functools.partial(jax.jit, static_argnames="head")
def _both_orders(weights: nnx.State, head: bool) -> dict[tuple[str, ...], jax.Array]:
    flat, layers = dict(nnx.to_flat_state(weights)), weights["layers"]
    out = {}
    for name, (inner, _) in KERNELS.items():
        kernel = layers[name].get_value()
        inputs = math.prod(kernel.shape[1 : 1 + len(inner)])
        matrices = kernel.reshape(kernel.shape[0], inputs, -1).swapaxes(1, 2)
        out["layers", name] = bits(kernel)
        out["transposed", "layers", f"{name}_transposed"] = bits(matrices)
    if head:
        untied = flat.get(("lm_head",))
        transposed = flat["embedding",].get_value() if untied is None else untied.get_value().T  # [V, D]
        blocks = bits(transposed.reshape(n_blocks(transposed.shape[0]), -1, transposed.shape[1]))
        out["transposed", "head"], out["transposed", "head_transposed"] = blocks.swapaxes(1, 2), blocks
    return out


def with_head(weights: nnx.State, head: jax.Array) -> nnx.State:
    """The weights of a model with a tied head, plus that head [D, V] as in an untied model; copies no array."""
    return nnx.from_flat_state([*nnx.to_flat_state(weights), (("lm_head",), nnx.Param(head, axes=("embed", "vocab")))])


def with_transposed(weights: nnx.State, head: bool) -> nnx.State:
    """`weights` and the transposes of their matrices, for a model with `transposed`.

    The matrices of layers and head are copied; the other weights are not. Without `head`, that of the head is left
    out, as for a model with a value head.
    """
    made = {path: nnx.Param(x) for path, x in _both_orders(weights, head).items()}
    return nnx.from_flat_state(dict(nnx.to_flat_state(weights)) | made)

"""Frozen matrices in both orders, for training adapters in 16 bits on a CPU.

XLA multiplies 16-bit operands on a CPU at twice the speed of float32 only where the second one is stored [K, N]. The
backward pass multiplies by the transpose of every kernel, and a tied head is the transpose of the embedding; read
from what is stored, both are as slow as float32. Matrices that are not trained are therefore transposed once. The
layers' bfloat16 matrices are stored as their bits, in both orders (products.bits says why).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from psearch_jax import platforms
from psearch_jax.config import DecoderConfig
from psearch_jax.models.lora import KERNELS, axis_sizes
from psearch_jax.models.products import bits
from psearch_jax.sharding import is_one_cpu


class TransposedKernels(nnx.Module):
    """For every kernel `NAME_transposed` [L, outputs, inputs], the axes of each side merged."""

    def __init__(self, config: DecoderConfig):
        sizes = axis_sizes(config)
        for name, (inner, outer) in KERNELS.items():
            inputs, outputs = (math.prod(sizes[c] for c in side) for side in (inner, outer))
            setattr(self, f"{name}_transposed", nnx.Param(jnp.zeros((config.layers, outputs, inputs))))


class Transposed(nnx.Module):
    """The kernels' transposes, and the head in the order in which the model does not have it.

    Attributes:
      head: [D, V] of a tied head, [V, D] of another; None without one.
    """

    def __init__(self, config: DecoderConfig, head: bool):
        self.layers = TransposedKernels(config)
        shape = (config.width, config.vocab_rows)
        self.head = nnx.Param(jnp.zeros(shape if config.tied else shape[::-1])) if head else None


def multiplies_slowly_transposed(mesh: Mesh, dtype: Any) -> bool:
    """Whether a device multiplies by a stored matrix faster than by the transpose of one: one CPU, in 16 bits for
    which it has instructions."""
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
        out["transposed", "head"] = flat.get(("lm_head",), flat["embedding",]).get_value().T
    return out


def with_head(weights: nnx.State, head: jax.Array) -> nnx.State:
    """The weights of a model with a tied head, not copied, with that head [D, V] as in a model without."""
    return nnx.from_flat_state([*nnx.to_flat_state(weights), (("lm_head",), nnx.Param(head, axes=("embed", "vocab")))])


def with_transposed(weights: nnx.State, head: bool) -> nnx.State:
    """`weights` and the transposes of their matrices, as a model with `transposed` takes them.

    The layers' matrices are copied, all else is not. Without `head` the head's transpose is left out, as for a model
    with a value head.
    """
    made = {path: nnx.Param(x) for path, x in _both_orders(weights, head).items()}
    return nnx.from_flat_state(dict(nnx.to_flat_state(weights)) | made)

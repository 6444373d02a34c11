"""The weights of each layer in separate arrays, for decoding.

XLA (of jax 0.10 and 0.12, for GPUs and CPUs) does not multiply by a slice of an array in place: in the loop over the
layers it first copies every kernel, so each step reads the weights a second time and writes them. So the weights are
copied once, before a loop of many steps; on a CPU also into the layout in which products of a few rows are fastest.
In 16 bits on a CPU, `prefill` and `extend` also use the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from psearch_jax.models.lora import KERNELS

Weights = Mapping[str, jax.Array]  # of one layer, by name


class Unstacked(NamedTuple):
    """What is read in place of the model's stacked weights.

    Attributes:
      layers: the weights of each; with `left_operands`, a kernel NAME [*in, *out] is NAME_left [*out, *in] in float32.
      head: with `left_operands`, [V, D] in float32; else None.
    """

    layers: tuple[Weights, ...]
    head: jax.Array | None


def unstack(weights: Weights, layers: int, head: jax.Array, left_operands: bool) -> Unstacked:
    """Copies the weights of each layer into separate arrays.

    Args:
      weights: of all layers, each [L, ...].
      head: [D, V].
      left_operands: transpose kernels and head for `products.product_left`.
    """
    each = tuple({name: x[layer] for name, x in weights.items()} for layer in range(layers))
    if not left_operands:
        return Unstacked(each, None)
    return Unstacked(tuple(map(_as_left_operands, each)), head.T.astype(jnp.float32))


def _as_left_operands(layer: Weights) -> Weights:
    out = dict(layer)
    for name, (inner, outer) in KERNELS.items():
        order = (*range(len(inner), len(inner) + len(outer)), *range(len(inner)))
        out[f"{name}_left"] = jnp.transpose(out.pop(name), order).astype(jnp.float32)
    return out

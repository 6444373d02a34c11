"""The weights of each layer in arrays of their own, for decoding.

XLA (of jax 0.10 and 0.12, for GPUs and CPUs) does not multiply by a slice of an array where it lies: in the loop over
the layers it copies every kernel first, and a step that reads the weights once reads and writes them again. So they
are copied once, before a loop of many steps, on a CPU also into the order in which a few rows are multiplied fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from psearch_jax.models.lora import KERNELS

Weights = Mapping[str, jax.Array]  # of a layer, by name


class Apart(NamedTuple):
    """What decoding reads in place of the model's own stacks.

    Attributes:
      layers: the weights of each; with `across` a kernel NAME [*in, *out] is NAME_across [*out, *in], in float32.
      head: with `across` [V, D] in float32, else None.
    """

    layers: tuple[Weights, ...]
    head: jax.Array | None


def taken_apart(weights: Weights, layers: int, head: jax.Array, across: bool) -> Apart:
    """Copies of the weights of each layer.

    Args:
      weights: of all layers, each [L, ...].
      head: [D, V].
      across: turn kernels and head for `products.product_across`.
    """
    each = tuple({name: x[layer] for name, x in weights.items()} for layer in range(layers))
    if not across:
        return Apart(each, None)
    return Apart(tuple(map(_turned, each)), head.T.astype(jnp.float32))


def _turned(layer: Weights) -> Weights:
    out = dict(layer)
    for name, (inner, outer) in KERNELS.items():
        order = (*range(len(inner), len(inner) + len(outer)), *range(len(inner)))
        out[f"{name}_across"] = jnp.transpose(out.pop(name), order).astype(jnp.float32)
    return out

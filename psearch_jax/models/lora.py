"""Low-rank adapters (LoRA, arXiv 2106.09685): every kernel W of the layers is frozen, and W + scale a b is used.

Letters in shapes: L layers, r rank, others in decoder.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora

# kernel -> (its contracted axes, its other axes), as letters
KERNELS: dict[str, tuple[str, str]] = {
    "q_kernel": ("D", "NH"),
    "k_kernel": ("D", "KH"),
    "v_kernel": ("D", "KH"),
    "o_kernel": ("NH", "D"),
    "gate_kernel": ("D", "F"),
    "up_kernel": ("D", "F"),
    "down_kernel": ("F", "D"),
}
LOGICAL = {"D": "embed", "N": "heads", "K": "kv_heads", "H": None, "F": "mlp"}


def axis_sizes(config: DecoderConfig) -> dict[str, int]:
    """The sizes of parameters' axes by their letters."""
    c = config
    return {"V": c.vocab_rows, "D": c.width, "N": c.heads, "K": c.kv_heads, "H": c.head_dim, "F": c.mlp}


class Adapters(nnx.Module):
    """For every kernel, `NAME_a` [L, *contracted, r] and `NAME_b` [L, r, *others], which starts at 0."""

    def __init__(self, config: DecoderConfig, rank: int, rngs: nnx.Rngs):
        sizes = axis_sizes(config)
        for name, (inner, outer) in KERNELS.items():
            inputs, outputs = ([sizes[c] for c in axes] for axes in (inner, outer))
            in_axes, out_axes = (map(LOGICAL.get, axes) for axes in (inner, outer))
            a = jax.random.normal(rngs.params(), (config.layers, *inputs, rank), jnp.float32)
            a, b = a / math.sqrt(math.prod(inputs)), jnp.zeros((config.layers, rank, *outputs), jnp.float32)
            setattr(self, f"{name}_a", nnx.LoRAParam(a, axes=("layers", *in_axes, None)))
            setattr(self, f"{name}_b", nnx.LoRAParam(b, axes=("layers", None, *out_axes)))


def abstract_adapters(config: DecoderConfig, lora: Lora) -> nnx.State:
    """The adapters as ShapeDtypeStructs, in the model's tree structure."""
    return _in_model(nnx.eval_shape(lambda: Adapters(config, lora.rank, nnx.Rngs(params=0))))


def init_adapters(config: DecoderConfig, lora: Lora, seed: int) -> nnx.State:
    """New adapters, float32, from the `params` stream of `seed`: a is normal with std 1/sqrt(inputs), b is 0."""
    return _in_model(Adapters(config, lora.rank, nnx.Rngs(params=seed)))


def abstract_trained(weights: nnx.State, config: DecoderConfig, lora: Lora | None) -> nnx.State:
    """The trained parameters, as ShapeDtypeStructs: all weights, or with `lora` the adapters and any value head."""
    if lora is None:
        return weights
    return join_adapters(abstract_adapters(config, lora), value_head(weights))


def value_head(weights: nnx.State) -> nnx.State:
    """Only the value head; an empty state if the model has none."""
    return nnx.from_flat_state([item for item in nnx.to_flat_state(weights) if item[0] == ("value_head",)])


def _in_model(adapters: Adapters) -> nnx.State:
    flat = nnx.to_flat_state(nnx.state(adapters, nnx.LoRAParam))
    return nnx.from_flat_state({("adapters", *path): variable for path, variable in flat})


def join_adapters(base: nnx.State, adapters: nnx.State) -> nnx.State:
    """One tree of both, for a model with adapters; copies no array."""
    return nnx.from_flat_state([*nnx.to_flat_state(base), *nnx.to_flat_state(adapters)])


def split_adapters(params: nnx.State) -> tuple[nnx.State, nnx.State | None]:
    """The inverse of `join_adapters`; None if there are no adapters."""
    flat = nnx.to_flat_state(params)
    base, low = ([item for item in flat if (item[0][0] == "adapters") == mine] for mine in (False, True))
    return nnx.from_flat_state(base), nnx.from_flat_state(low) if low else None


@functools.partial(jax.jit, static_argnames=("lora", "dtype"))
def merge_kernel(
    kernel: jax.Array, a: jax.Array, b: jax.Array, layer: jax.Array, lora: Lora, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """W + scale a b of one layer, summed in float32 and rounded to `dtype` once, for a model without adapters.

    Most of what adapters learn in their first updates is smaller than half the spacing of 16-bit values, so the
    rounded sum is a different policy from the trained one. So only exports are merged.

    Args:
      kernel, a, b: the stacks [L, ...], [L, ..., r], [L, r, ...].

    Returns:
      The sum [...], the sum of the squared rounding errors, and that of the squares of what the adapters add.
    """
    w, a, b = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (kernel, a, b))
    product = jnp.matmul(a.reshape(-1, lora.rank), b.reshape(lora.rank, -1), precision="highest")
    added = lora.scale * product.reshape(w.shape)
    exact = w.astype(jnp.float32) + added
    out = exact.astype(dtype)
    return out, jnp.sum((out.astype(jnp.float32) - exact) ** 2), jnp.sum(added**2)

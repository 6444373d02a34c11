"""Low-rank adapters (LoRA, arXiv 2106.09685): every kernel W of the layers stays as it is, and W + scale a b is used.

Letters in shapes: L layers, r rank, others in qwen2.py.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from psearch_jax.config import Lora, Qwen2Config

# kernel -> (its contracted axes, its other axes), by their letters
KERNELS: dict[str, tuple[str, str]] = {
    "q_kernel": ("D", "NH"),
    "k_kernel": ("D", "KH"),
    "v_kernel": ("D", "KH"),
    "o_kernel": ("NH", "D"),
    "gate_kernel": ("D", "F"),
    "up_kernel": ("D", "F"),
    "down_kernel": ("F", "D"),
}
_LOGICAL = {"D": "embed", "N": "heads", "K": "kv_heads", "H": None, "F": "mlp"}


class Adapters(nnx.Module):
    """For every kernel `NAME_a` [L, *contracted, r] and `NAME_b` [L, r, *others], which starts at 0."""

    def __init__(self, config: Qwen2Config, rank: int, rngs: nnx.Rngs):
        sizes = {
            "D": config.width,
            "N": config.heads,
            "K": config.kv_heads,
            "H": config.head_dim,
            "F": config.mlp,
        }
        for name, (inner, outer) in KERNELS.items():
            inputs, outputs = tuple(sizes[c] for c in inner), tuple(sizes[c] for c in outer)
            a = jax.random.normal(rngs.params(), (config.layers, *inputs, rank), jnp.float32)
            b = jnp.zeros((config.layers, rank, *outputs), jnp.float32)
            a_axes, b_axes = (
                ("layers", *(_LOGICAL[c] for c in inner), None),
                ("layers", None, *map(_LOGICAL.get, outer)),
            )
            setattr(self, f"{name}_a", nnx.LoRAParam(a / math.sqrt(math.prod(inputs)), axes=a_axes))
            setattr(self, f"{name}_b", nnx.LoRAParam(b, axes=b_axes))


def abstract_adapters(config: Qwen2Config, lora: Lora) -> nnx.State:
    """The adapters as ShapeDtypeStructs, in the tree in which the model holds them."""
    return _in_model(nnx.eval_shape(lambda: Adapters(config, lora.rank, nnx.Rngs(params=0))))


def init_adapters(config: Qwen2Config, lora: Lora, seed: int) -> nnx.State:
    """Fresh adapters, float32, from the `params` stream of `seed`: a normal with std 1/sqrt(inputs), b 0."""
    return _in_model(Adapters(config, lora.rank, nnx.Rngs(params=seed)))


def _in_model(adapters: Adapters) -> nnx.State:
    flat = nnx.to_flat_state(nnx.state(adapters, nnx.LoRAParam))
    return nnx.from_flat_state({("adapters", *path): variable for path, variable in flat})


def merged(base: nnx.State, adapters: nnx.State, lora: Lora, dtype: Any) -> nnx.State:
    """The parameters that compute the same without adapters, in `dtype`; one layer's product exists at a time."""
    low = {path[-1]: variable.get_value() for path, variable in nnx.to_flat_state(adapters)}

    def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        def one(wab: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            w, a, b = wab
            product = jnp.matmul(a.reshape(-1, lora.rank), b.reshape(lora.rank, -1), precision="highest")
            return (w.astype(jnp.float32) + lora.scale * product.reshape(w.shape)).astype(dtype)

        return jax.lax.map(one, (kernel, a, b))

    def value(path: tuple[str, ...], variable: nnx.Variable) -> nnx.Variable:
        if path[-1] not in KERNELS:
            return variable.replace(variable.get_value().astype(dtype))
        a, b = (low[f"{path[-1]}_{side}"] for side in "ab")
        return variable.replace(add(variable.get_value(), a, b))

    return nnx.from_flat_state({path: value(path, v) for path, v in nnx.to_flat_state(base)})

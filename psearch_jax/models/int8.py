"""Int8 quantization for sampling: kernels by output channel, the cache by position and head.

Each value is an integer in -127..127, and each line of values has a float32 scale: symmetric, rounded to nearest.
Products still have 16-bit or float32 operands, because the integers are widened where they are read, and the scale
multiplies the result. So int8 saves memory and memory traffic. Embedding, head, norms and biases are not quantized.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from psearch_jax.config import DecoderConfig
from psearch_jax.models.lora import KERNELS, LOGICAL, axis_sizes

MAX_INT8 = 127


class Scales(nnx.Module):
    """For every kernel, `NAME_scale` [L, *others], float32: one per output (letters as in lora.py)."""

    def __init__(self, config: DecoderConfig):
        sizes = axis_sizes(config)
        for name, (_, outer) in KERNELS.items():
            ones = jnp.ones((config.layers, *(sizes[c] for c in outer)), jnp.float32)
            setattr(self, f"{name}_scale", nnx.Param(ones, axes=("layers", *map(LOGICAL.get, outer))))


def quantize(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """x as int8, and the float32 scales of its lines along `axes`.

    Zeros have scale 0. A non-finite value makes its line's scale NaN or infinite, and so every result that uses it.
    """
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / MAX_INT8
    number = jnp.round(wide / jnp.where(scale == 0, 1, scale))
    return jnp.clip(number, -MAX_INT8, MAX_INT8).astype(jnp.int8), jnp.squeeze(scale, axes)


def with_kernels(copy: nnx.State, params: nnx.State) -> nnx.State:
    """`copy` with the kernels of `params` in int8, plus `Scales`, for a model with `int8`."""
    flat, layers = dict(nnx.to_flat_state(copy)), params["layers"]
    for name, (inner, outer) in KERNELS.items():
        number, scale = quantize(layers[name].get_value(), tuple(range(1, 1 + len(inner))))
        flat["layers", name] = flat["layers", name].replace(number)
        axes = ("layers", *map(LOGICAL.get, outer))
        flat["scales", f"{name}_scale"] = nnx.Param(scale, axes=axes)
    return nnx.from_flat_state(flat)

"""Attention by cuDNN's kernel, for GPUs from Ampere on, in 16 bits."""

from __future__ import annotations

from typing import Any

import jax

MIN_CAPABILITY = (8, 0)  # compute capability of Ampere; a T4 has 7.5


def capability(device: Any) -> tuple[int, ...]:
    """The CUDA compute capability of a device, "8.0" as (8, 0); () if it has none, like a CPU or an AMD GPU."""
    words = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's flash attention, which applies the scale to its float32 scores."""
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=q.shape[-1] ** -0.5, implementation="cudnn")

"""Attention by cuDNN's kernel, for GPUs from Ampere on, in 16 bits.

JAX passes cuDNN no segments, only a length per row. So the trajectories of a packed row are first moved to rows of
their own, whose positions past the length the kernel skips, and the results are moved back. The moves cost little
compared with the products and the attention; padding the rows of every other operation would cost a third of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MIN_CAPABILITY = (8, 0)  # compute capability of Ampere; a T4 has 7.5
# Maximum trajectories per packed row. Queries, keys, values and output take this many times the memory: of one layer
# at a time, or with model.remat=none of all layers, because cuDNN's gradient stores them.
SEGMENTS = 4


def capability(device: Any) -> tuple[int, ...]:
    """The CUDA compute capability of a device, "8.0" as (8, 0); () if it has none, like a CPU or an AMD GPU."""
    words = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """cuDNN's flash attention, which applies the scale to its float32 scores.

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H].
      segments: [B, T] int32: 1, 2, ... up to `SEGMENTS` for the trajectories of a row, which follow each other from
        its first position, and 0 for the padding after them; None: each row is one trajectory.

    Returns:
      [B, T, N, H], 0 at the padding after `segments`.
    """
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if segments is None:
        return _attention(q, k, v)
    B, T = segments.shape
    numbers = jnp.arange(1, SEGMENTS + 1)
    length = jnp.sum(segments[:, None] == numbers[:, None], axis=2)  # [B, SEGMENTS]
    start = jnp.cumsum(length, axis=1) - length
    position = jnp.arange(T)
    # Of each position of the separate rows its position in the packed row, and the inverse.
    to_separate = (start[..., None] + position).reshape(B, -1)
    to_separate = jnp.where((position < length[..., None]).reshape(B, -1), to_separate, -1)
    row = jnp.maximum(segments - 1, 0)
    to_packed = row * T + position - jnp.take_along_axis(start, row, axis=1)
    to_packed = jnp.where(segments > 0, to_packed, -1)

    def separate(x: jax.Array) -> jax.Array:
        return _move(x, to_separate, to_packed).reshape(B * SEGMENTS, *x.shape[1:])

    # A row without a trajectory attends to one position, because a softmax over none may be NaN.
    lengths = jnp.maximum(length.reshape(-1), 1).astype(jnp.int32)
    out = _attention(*map(separate, (q, k, v)), query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    return _move(out.reshape(B, SEGMENTS * T, *out.shape[2:]), to_packed, to_separate)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, **lengths: jax.Array) -> jax.Array:
    scale = q.shape[-1] ** -0.5
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale, implementation="cudnn", **lengths)


@jax.custom_vjp
def _move(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """x [B, S, ...] at the positions `source` [B, R], and 0 where they are -1.

    `target` [B, S] is the inverse, with -1 at positions of x that are not taken. With it the gradient is also read by
    position; the transpose of a gather would add numbers one by one.
    """
    taken = jnp.take_along_axis(x, jnp.maximum(source, 0).reshape(*source.shape, *[1] * (x.ndim - 2)), axis=1)
    return jnp.where((source >= 0).reshape(*source.shape, *[1] * (x.ndim - 2)), taken, 0)


def _move_forward(x: jax.Array, source: jax.Array, target: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _move(x, source, target), (source, target)


def _move_backward(indices: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[Any, ...]:
    source, target = indices
    nothing = [np.zeros(x.shape, jax.dtypes.float0) for x in indices]
    return _move(gradient, target, source), *nothing


_move.defvjp(_move_forward, _move_backward)

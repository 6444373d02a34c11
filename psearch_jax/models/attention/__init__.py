"""Attention of complete rows, `causal`, by four implementations; attention.cached has attention to a cache.

`implementation_for` chooses by dtype and devices: in 16 bits `splash` (a Pallas kernel, for TPUs) and `cudnn` (for
GPUs); in float32, and where there is no kernel, `blocked`; on a CPU `rowwise`, which is `blocked` row by row. None
holds all scores of a row at once. All can also attend only within the trajectories of a packed row.
All of them scale in float32: for 16-bit queries the scores, because such a query times H**-0.5 would be rounded again.
Letters: B rows, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from psearch_jax.models.attention.blocked import blocked_attention, rowwise_attention
from psearch_jax.models.attention.cudnn import MIN_CAPABILITY, SEGMENTS, capability, cudnn_attention
from psearch_jax.models.attention.splash import splash_attention
from psearch_jax.sharding import COMPUTE, spec

Implementation = Literal["blocked", "rowwise", "splash", "cudnn"]


def implementation_for(mesh: Mesh, dtype: Any) -> Implementation:
    """The implementation of `causal` for the devices of a mesh and a compute dtype.

    Kernels are only for 16 bits: cuDNN has none for float32, and the precision of products inside a kernel cannot be
    set for its backward pass. cuDNN also has none for GPUs before Ampere, such as a T4.
    """
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return "rowwise"
    if jnp.dtype(dtype).itemsize != 2:
        return "blocked"
    if devices[0].platform == "tpu":
        return "splash"
    return "cudnn" if all(capability(device) >= MIN_CAPABILITY for device in devices) else "blocked"


def max_segments(implementation: Implementation) -> int | None:
    """The maximum number of trajectories in a packed row; None: any number."""
    return SEGMENTS if implementation == "cudnn" else None


def causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    implementation: Implementation = "blocked",
    segments: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of rows over themselves, or of each trajectory in a row over itself.

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H], the cache's layout.
      segments: [B, T] int32, equal within a trajectory, whose positions are contiguous; None: each row is one
        trajectory. `cudnn` needs them numbered as in `cudnn_attention`.

    Returns:
      [B, T, N, H].
    """
    if implementation == "splash":
        return on_each_device(splash_attention, q, k, v, segments)
    if implementation == "cudnn":
        return on_each_device(cudnn_attention, q, k, v, segments)
    starts = None if segments is None else _segment_starts(segments)
    if implementation == "rowwise":
        return on_each_device(rowwise_attention, q, k, v, starts)
    return blocked_attention(q, k, v, starts)


def _segment_starts(segments: jax.Array) -> jax.Array:
    """The start of each position's segment, [B, T]: a mask from starts costs less than one from equal segments."""
    T = segments.shape[1]
    changes = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(changes, jnp.arange(T, dtype=jnp.int32), 0), axis=1)


def on_each_device(
    kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """Runs `kernel(q, k, v)` on each device of the mesh for its own rows and heads, without the partitioner.

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H].
      segments: None, or [B, T], then passed to the kernel too.

    Returns:
      [B, T, N, H].
    """
    mesh, more = jax.sharding.get_abstract_mesh(), () if segments is None else (segments,)
    if mesh.empty or mesh.size == 1:
        return kernel(q, k, v, *more)
    # If the query heads of one kv head are split over devices, the kv head is repeated for each of them.
    copies = math.lcm(k.shape[1], mesh.shape["tensor"]) // k.shape[1]
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=1) for x in (k, v))
    place = spec(("rows", None, "heads", None), COMPUTE, mesh, q.shape)
    kv_place = spec(("rows", "kv_heads", None, None), COMPUTE, mesh, k.shape)
    places = (place, kv_place, kv_place, *(spec(("rows", None), COMPUTE, mesh, x.shape) for x in more))
    return jax.shard_map(kernel, in_specs=places, out_specs=place, check_vma=False)(q, k, v, *more)

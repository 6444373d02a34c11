"""Attention of complete rows, `attend_causally`, in three forms; attention.cached has attention to a cache.

`choose_backend` (models/backend.py) chooses by dtype and devices: in 16 bits `splash` (a Pallas kernel, for TPUs) and
`cudnn` (for GPUs); in float32, and where there is no kernel, `blocked`. None holds all scores of a row at once. All
can also attend only within the trajectories of a packed row.
All of them scale in float32: for 16-bit queries the scores, because such a query times H**-0.5 would be rounded again.
Letters: B rows, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from psearch_jax.models.attention.blocked import blocked_attention
from psearch_jax.models.attention.cudnn import cudnn_attention
from psearch_jax.models.attention.splash import splash_attention
from psearch_jax.sharding import COMPUTE, spec


def attend_causally(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attention: Literal["blocked", "splash", "cudnn"] = "blocked",
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
    if attention == "splash":
        return on_each_device(splash_attention, q, k, v, segments)
    if attention == "cudnn":
        return on_each_device(cudnn_attention, q, k, v, segments)
    return blocked_attention(q, k, v, None if segments is None else _find_segment_starts(segments))


def _find_segment_starts(segments: jax.Array) -> jax.Array:
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
    q_spec = spec(("rows", None, "heads", None), COMPUTE, mesh, q.shape)
    kv_spec = spec(("rows", "kv_heads", None, None), COMPUTE, mesh, k.shape)
    specs = (q_spec, kv_spec, kv_spec, *(spec(("rows", None), COMPUTE, mesh, x.shape) for x in more))
    return jax.shard_map(kernel, in_specs=specs, out_specs=q_spec, check_vma=False)(q, k, v, *more)

"""Keys and values of every layer and row, kept across turns.

```
position   0 . . . . . . . . . . . . . . . S-1
row 0      p p p p p s s s s o o o o s . . .      p prompt, s sampled, o observation, . not written yet
row 1      p p p s s s s s . . . . . . . . .
```
Each row has its own length: a write goes to the row's own positions, and readers mask the positions past them. So
rows of different lengths share one array without padding between turns.

A call may concern only a few rows, `rows` [R]: their indices among the B rows, or -1 for none. On a mesh, the i-th
part of `rows` contains only rows of the i-th part of the cache, so that each device finds them in its own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.config import DecoderConfig
from psearch_jax.sharding import on_own_rows

AXES = (None, "rows", "kv_heads", None, None)  # of keys and of values
# The number of positions is a multiple of it. Otherwise XLA for TPU swaps rows and positions in the layout, to pad
# less, and a program that changes one row then copies the full cache into another layout and back.
CACHE_MULTIPLE = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    k: jax.Array  # [L, B, K, S, H]
    v: jax.Array  # [L, B, K, S, H]

    @classmethod
    def zeros(cls, config: DecoderConfig, rows: int, positions: int, dtype: Any) -> KVCache:
        """An empty cache of at least `positions`, with zeros: a masked value counts 0 times, and 0 x NaN is NaN."""
        shape = (config.layers, rows, config.kv_heads, positions + -positions % CACHE_MULTIPLE, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @classmethod
    def of(cls, k: jax.Array, v: jax.Array, dtype: Any) -> KVCache:
        """A cache in `dtype` with the k and v [L, B, K, T, H] that a model returned, padded with zeros."""
        padding = ((0, 0), (0, 0), (0, 0), (0, -k.shape[3] % CACHE_MULTIPLE), (0, 0))
        return cls(*(jnp.pad(x, padding).astype(dtype) for x in (k, v)))

    @property
    def positions(self) -> int:
        """S."""
        return self.v.shape[3]


def read(
    cache: KVCache, layer: jax.Array, span: int | None = None, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, K, span, H] of one layer.

    Reading the cache dominates the cost of decoding, so only the first `span` positions, and only R rows, are read.
    """
    L, B, K, S, H = cache.v.shape

    def take(first: Any, x: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.maximum(rows - first, 0), axis=1)

    def part(x: jax.Array) -> jax.Array:
        out = jax.lax.dynamic_slice(x, (layer, 0, 0, 0, 0), (1, B, K, span or S, H))
        return (out if rows is None else on_own_rows(take, out, AXES, (rows, ("rows",))))[0]

    return part(cache.k), part(cache.v)


def write(
    cache: KVCache, k: jax.Array, v: jax.Array, start: jax.Array, count: jax.Array, rows: jax.Array | None = None
) -> KVCache:
    """Writes `count[b]` new positions of row b, or of row `rows[b]`, at `start[b]`; positions past S are dropped.

    Args:
      k, v: [L, B, K, T, H], of which the first `count[b]` of T are real.
      start, count: [B] int32.
      rows: None for all rows in order, or [R]; B above is then R.
    """
    size = cache.positions
    offset = jnp.arange(k.shape[3])
    # An index of `size` is out of bounds, so mode="drop" writes nothing. A clamped dynamic_update_slice would instead
    # overwrite live keys.
    target = jnp.where(offset < count[:, None], start[:, None] + offset, size)
    if rows is not None:
        target = jnp.where(rows[:, None] < 0, size, target)

    def put(old: jax.Array, new: jax.Array, target: jax.Array, local: jax.Array) -> jax.Array:
        # Every leading index is explicit, so that complete lines of H are written. With L or K as slices, XLA's TPU
        # backend changes the cache's layout for the write, and so transposes all of it at every token.
        L, _, K = new.shape[:3]
        at = jnp.arange(L)[:, None, None, None], local[:, None, None], jnp.arange(K)[:, None], target[:, None]
        return old.at[at].set(new, mode="drop")

    def put_own(first: Any, old: jax.Array, new: jax.Array, target: jax.Array, rows: jax.Array) -> jax.Array:
        return put(old, new, target, jnp.maximum(rows - first, 0))

    def put_rows(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if rows is None:  # XLA splits the write over devices only if the rows are a plain `arange`
            return put(old, new, target, jnp.arange(new.shape[1]))
        return on_own_rows(put_own, old, AXES, (new, AXES), (target, ("rows", None)), (rows, ("rows",)))

    return KVCache(put_rows(cache.k, k), put_rows(cache.v, v))


def copy_rows(cache: KVCache, source: KVCache, index: jax.Array, rows: jax.Array) -> KVCache:
    """Makes row `rows[r]` a copy of row `index[r]` of `source`, padded with zeros.

    Zeros, because a masked position contributes 0 times its value: a NaN or infinity of the row's last rollout would
    come through. Masking the values where they are read would take time at every token.

    Args:
      source: a cache with at most as many positions as `cache`.
      index: [R] int32.
      rows: [R] int32; at -1 nothing is copied.
    """

    # Layer by layer: with rows split over devices, `take` gathers its full operand.
    def copy_layer(layer: jax.Array, cache: KVCache) -> KVCache:
        def copy(old: jax.Array, new: jax.Array) -> jax.Array:
            taken = jnp.take(jax.lax.dynamic_index_in_dim(new, layer, keepdims=False), index, axis=0)
            pads = [(0, a - b) for a, b in zip(old.shape[2:], new.shape[2:], strict=True)]  # only positions
            taken = jnp.pad(taken, [(0, 0), *pads])
            return on_own_rows(_replace_rows, old, AXES, (taken, AXES[1:]), (rows, ("rows",)), (layer, ()))

        return jax.tree.map(copy, cache, source)

    return jax.lax.fori_loop(0, cache.k.shape[0], copy_layer, cache)


def _replace_rows(first: Any, old: jax.Array, values: jax.Array, rows: jax.Array, layer: jax.Array) -> jax.Array:
    """Writes `values` [R, ...] to the rows [R] of one layer of `old`."""

    # Row by row: for a scatter of full rows, XLA's TPU backend copies the cache.
    def replace_row(r: jax.Array, old: jax.Array) -> jax.Array:
        at = (layer, jnp.maximum(rows[r] - first, 0), *[0] * (old.ndim - 2))
        before = jax.lax.dynamic_slice(old, at, (1, 1, *old.shape[2:]))
        return jax.lax.dynamic_update_slice(old, jnp.where(rows[r] < 0, before, values[r]), at)

    return jax.lax.fori_loop(0, rows.shape[0], replace_row, old)

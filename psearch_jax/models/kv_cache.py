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

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.config import DecoderConfig
from psearch_jax.models.attention.cached import MAX_DECODE_TOKENS
from psearch_jax.models.int8 import quantize
from psearch_jax.sharding import on_own_rows

AXES = (None, "rows", "kv_heads", None, None)  # of keys and of values; scales lack the last
# The number of positions is a multiple of it. Otherwise XLA for TPU swaps rows and positions in the layout, to pad
# less, and a program that changes one row then copies the full cache into another layout and back.
CACHE_MULTIPLE = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    k: jax.Array  # [L, B, K, S, H], with `k_transposed` [L, B, K, H, S]
    v: jax.Array  # [L, B, K, S, H]
    # A score is a sum over H. With adjacent positions a CPU computes many scores at once, about three times faster.
    # To a matrix unit the order does not matter, and an accelerator writes a position faster as one line of H.
    k_transposed: bool = field(default=False, metadata={"static": True})
    # In int8, the scale of each line of H (models/int8.py): float32 [L, B, K, S].
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @classmethod
    def zeros(
        cls, config: DecoderConfig, rows: int, positions: int, dtype: Any, k_transposed: bool = False
    ) -> KVCache:
        """An empty cache of at least `positions`, with zeros: a masked value counts 0 times, and 0 x NaN is NaN."""
        shape = (config.layers, rows, config.kv_heads, positions + -positions % CACHE_MULTIPLE, config.head_dim)
        k, v = (jnp.zeros(shape, dtype) for _ in range(2))
        scales = (jnp.zeros(shape[:-1], jnp.float32) for _ in range(2)) if _is_int8(dtype) else ()
        return cls(k.swapaxes(3, 4) if k_transposed else k, v, k_transposed, *scales)

    @classmethod
    def of(cls, k: jax.Array, v: jax.Array, dtype: Any, k_transposed: bool = False) -> KVCache:
        """A cache in `dtype` with the k and v [L, B, K, T, H] that a model returned, padded with zeros."""
        padding = ((0, 0), (0, 0), (0, 0), (0, -k.shape[3] % CACHE_MULTIPLE), (0, 0))
        (k, k_scale), (v, v_scale) = (stored(jnp.pad(x, padding), dtype) for x in (k, v))
        return cls(k.swapaxes(3, 4) if k_transposed else k, v, k_transposed, k_scale, v_scale)

    @property
    def positions(self) -> int:
        """S."""
        return self.v.shape[3]


def _is_int8(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)


def stored(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Lines of H in the cache's dtype, and in int8 their scales."""
    return quantize(x, (x.ndim - 1,)) if _is_int8(dtype) else (x.astype(dtype), None)


def read(
    cache: KVCache, layer: jax.Array, span: int | None = None, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Keys [B, K, span, H], or [B, K, H, span] with `k_transposed`, and values [B, K, span, H] of one layer; the
    scales of both [B, K, span], or None.

    Reading the cache dominates the cost of decoding, so only the first `span` positions, and only R rows, are read.
    """

    def part(x: jax.Array | None, axis: int = 3) -> jax.Array | None:
        if x is None:
            return None
        sizes = [1, *x.shape[1:]]
        sizes[axis] = span or cache.positions
        here = jax.lax.dynamic_slice(x, (layer, *[0] * (x.ndim - 1)), sizes)
        if rows is not None:
            here = on_own_rows(_taken, here, AXES[: x.ndim], (rows, ("rows",)))
        return here[0]

    return part(cache.k, 4 if cache.k_transposed else 3), part(cache.v), part(cache.k_scale), part(cache.v_scale)


def _taken(first: Any, x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(x, jnp.maximum(rows - first, 0), axis=1)


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

    def local(
        first: Any, old: jax.Array, new: jax.Array, target: jax.Array, rows: jax.Array, transposed: bool = False
    ):
        return _put(old, new, target, jnp.maximum(rows - first, 0), transposed)

    def put(old: jax.Array | None, new: jax.Array | None, transposed: bool = False) -> jax.Array | None:
        if old is None or new is None:
            return None
        if rows is None and old.ndim == 4 and new.shape[3] <= MAX_DECODE_TOKENS:
            # Scales of a decode step: to scatter single numbers, XLA for TPU would convert all scales to another
            # layout, and back for the kernel that reads them, at every token.
            for t in range(new.shape[3]):
                here = jnp.arange(size) == target[:, t : t + 1]  # [B, S]
                old = jnp.where(here[:, None], new[..., t : t + 1], old)
            return old
        if rows is None:
            return _put(old, new, target, jnp.arange(new.shape[1]), transposed)
        axes = AXES[: old.ndim]
        places = ((new, axes), (target, ("rows", None)), (rows, ("rows",)))
        return on_own_rows(functools.partial(local, transposed=transposed), old, axes, *places)

    transposed = cache.k_transposed
    (k, k_scale), (v, v_scale) = (stored(x, cache.v.dtype) for x in (k, v))
    scales = put(cache.k_scale, k_scale), put(cache.v_scale, v_scale)
    return KVCache(put(cache.k, k, transposed), put(cache.v, v), transposed, *scales)


def _put(old: jax.Array, new: jax.Array, target: jax.Array, place: jax.Array, transposed: bool = False) -> jax.Array:
    """`new` [L, R, K, T, H], or [L, R, K, T], at the rows `place` [R] and positions `target` [R, T] of `old`."""
    # Every leading index is explicit, so that complete lines of H are written. With L or K as slices, XLA's TPU
    # backend changes the cache's layout for the write, and so transposes all of it at every token.
    L, _, K = new.shape[:3]
    at = jnp.arange(L)[:, None, None, None], place[:, None, None], jnp.arange(K)[:, None], target[:, None]
    at = (*at[:3], slice(None), at[3]) if transposed else at
    return old.at[at].set(new, mode="drop")


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
    def one(layer: jax.Array, cache: KVCache) -> KVCache:
        def copied(old: jax.Array, new: jax.Array) -> jax.Array:
            taken = jnp.take(jax.lax.dynamic_index_in_dim(new, layer, keepdims=False), index, axis=0)
            pads = [(0, a - b) for a, b in zip(old.shape[2:], new.shape[2:], strict=True)]  # only positions
            axes = AXES[: old.ndim]
            taken = jnp.pad(taken, [(0, 0), *pads])
            return on_own_rows(_replaced, old, axes, (taken, axes[1:]), (rows, ("rows",)), (layer, ()))

        return jax.tree.map(copied, cache, source)

    return jax.lax.fori_loop(0, cache.k.shape[0], one, cache)


def _replaced(first: Any, old: jax.Array, values: jax.Array, rows: jax.Array, layer: jax.Array) -> jax.Array:
    """Writes `values` [R, ...] to the rows [R] of one layer of `old`."""

    # Row by row: for a scatter of full rows, XLA's TPU backend copies the cache.
    def one(r: jax.Array, old: jax.Array) -> jax.Array:
        at = (layer, jnp.maximum(rows[r] - first, 0), *[0] * (old.ndim - 2))
        here = jax.lax.dynamic_slice(old, at, (1, 1, *old.shape[2:]))
        new = jnp.where(rows[r] < 0, here, values[r])
        return jax.lax.dynamic_update_slice(old, new, at)

    return jax.lax.fori_loop(0, rows.shape[0], one, old)

"""Keys and values of every layer and row, kept across turns.

```
position   0 . . . . . . . . . . . . . . . S-1
row 0      p p p p p s s s s o o o o s . . .      p prompt, s sampled, o observation, . not written yet
row 1      p p p s s s s s . . . . . . . . .
```
Each row has its own length: a write goes to the row's own positions, and a read masks what lies past them, so rows
of different lengths share one array without padding between turns.

A call may be about a few rows alone, `rows` [R]: their places among the B, or -1 where there is none. On a mesh the
r-th part of them lies in the r-th part of the rows, so that each device finds its own in its own memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.config import Qwen2Config
from psearch_jax.sharding import on_own_rows

AXES = (None, "rows", "kv_heads", None, None)  # of keys and of values
# Positions are a multiple of it: of others XLA for TPU lays the rows where positions would be, to pad less, and a
# program that changes one row then copies the whole cache into another layout and back.
LINES = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    k: jax.Array  # [L, B, K, S, H], with `keys_across` [L, B, K, H, S]
    v: jax.Array  # [L, B, K, S, H]
    # A score is a sum over H. A CPU adds many of them up at once where positions lie side by side, and is some three
    # times faster so; a matrix unit does not mind, and an accelerator writes a position faster as one line of H.
    keys_across: bool = field(default=False, metadata={"static": True})

    @classmethod
    def zeros(cls, config: Qwen2Config, rows: int, positions: int, dtype: Any, keys_across: bool = False) -> KVCache:
        """An empty cache of at least `positions`. Zeros, not garbage: masked keys must not turn into NaN."""
        shape = (config.layers, rows, config.kv_heads, positions + -positions % LINES, config.head_dim)
        k, v = (jnp.zeros(shape, dtype) for _ in range(2))
        return cls(k.swapaxes(3, 4) if keys_across else k, v, keys_across)

    @classmethod
    def of(cls, k: jax.Array, v: jax.Array, keys_across: bool = False) -> KVCache:
        """The cache of what a model returned, k and v [L, B, K, T, H], with zeros behind it."""
        behind = ((0, 0), (0, 0), (0, 0), (0, -k.shape[3] % LINES), (0, 0))
        k, v = jnp.pad(k, behind), jnp.pad(v, behind)
        return cls(k.swapaxes(3, 4) if keys_across else k, v, keys_across)

    @property
    def positions(self) -> int:
        """S."""
        return self.v.shape[3]


def read(
    cache: KVCache, layer: jax.Array, span: int | None = None, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Keys [B, K, span, H], or [B, K, H, span] with `keys_across`, and values [B, K, span, H] of one layer.

    Reading the cache is what decoding costs; so no more of it than the first `span` positions, or than R rows.
    """
    out = []
    for x, axis in ((cache.k, 4 if cache.keys_across else 3), (cache.v, 3)):
        sizes = [1, *x.shape[1:]]
        sizes[axis] = span or cache.positions
        here = jax.lax.dynamic_slice(x, (layer, 0, 0, 0, 0), sizes)
        if rows is not None:
            here = on_own_rows(_taken, here, AXES, (rows, ("rows",)))
        out.append(here[0])
    return out[0], out[1]


def _taken(first: Any, x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(x, jnp.maximum(rows - first, 0), axis=1)


def write(
    cache: KVCache, k: jax.Array, v: jax.Array, start: jax.Array, count: jax.Array, rows: jax.Array | None = None
) -> KVCache:
    """Writes `count[b]` new positions of row b, or of row `rows[b]`, at `start[b]`; what would land past S is dropped.

    Args:
      k, v: [L, B, K, T, H], of which the first `count[b]` of T are real.
      start, count: [B] int32.
      rows: None for all of them in order, or [R]; B is R above.
    """
    size = cache.positions
    offset = jnp.arange(k.shape[3])
    # An index of `size` is out of bounds, and mode="drop" leaves the cache as it is there. A clamped
    # dynamic_update_slice would overwrite live keys instead.
    target = jnp.where(offset < count[:, None], start[:, None] + offset, size)
    across = cache.keys_across
    if rows is None:
        place = jnp.arange(k.shape[1])
        return KVCache(_put(cache.k, k, target, place, across), _put(cache.v, v, target, place), across)
    target = jnp.where(rows[:, None] < 0, size, target)

    def local(first: Any, old: jax.Array, new: jax.Array, target: jax.Array, rows: jax.Array, across: bool = False):
        return _put(old, new, target, jnp.maximum(rows - first, 0), across)

    places = ((target, ("rows", None)), (rows, ("rows",)))
    return KVCache(
        on_own_rows(functools.partial(local, across=across), cache.k, AXES, (k, AXES), *places),
        on_own_rows(local, cache.v, AXES, (v, AXES), *places),
        across,
    )


def _put(old: jax.Array, new: jax.Array, target: jax.Array, place: jax.Array, across: bool = False) -> jax.Array:
    """`new` [L, R, K, T, H] at the rows `place` [R] and positions `target` [R, T] of `old`."""
    # Every leading index is spelled out, so that what is written is whole lines of H. With L or K as slices, XLA's TPU
    # backend lays the cache out for the write, and transposes all of it at every token.
    L, _, K = new.shape[:3]
    at = jnp.arange(L)[:, None, None, None], place[:, None, None], jnp.arange(K)[:, None], target[:, None]
    at = (*at[:3], slice(None), at[3]) if across else at
    return old.at[at].set(new.astype(old.dtype), mode="drop")


def copy_rows(cache: KVCache, source: KVCache, index: jax.Array, rows: jax.Array) -> KVCache:
    """Makes row `rows[r]` a copy of row `index[r]` of `source`, with zeros behind it.

    Zeros, because a masked position counts 0 times its value: a NaN or an infinity of the row's last rollout would
    come through, and to mask the values where they are read would cost at every token.

    Args:
      source: a cache with at most as many positions as `cache`.
      index: [R] int32.
      rows: [R] int32; where it is -1 nothing is copied.
    """
    behind = cache.positions - source.positions

    # Layer by layer: where rows are split over devices, taking some gathers all of the source.
    def one(layer: jax.Array, caches: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out = []
        for old, new, across in zip(caches, (source.k, source.v), (source.keys_across, False), strict=True):
            taken = jnp.take(jax.lax.dynamic_index_in_dim(new, layer, keepdims=False), index, axis=0)
            pads = [(0, 0)] * 4
            pads[3 if across else 2] = (0, behind)

            out.append(
                on_own_rows(_replaced, old, AXES, (jnp.pad(taken, pads), AXES[1:]), (rows, ("rows",)), (layer, ()))
            )
        return tuple(out)

    k, v = jax.lax.fori_loop(0, cache.k.shape[0], one, (cache.k, cache.v))
    return KVCache(k, v, cache.keys_across)


def _replaced(first: Any, old: jax.Array, values: jax.Array, rows: jax.Array, layer: jax.Array) -> jax.Array:
    """`values` [R, ...] at the rows [R] of one layer of `old`."""

    # Row by row: for a scatter of whole rows XLA's TPU backend copies the cache.
    def one(r: jax.Array, old: jax.Array) -> jax.Array:
        at = (layer, jnp.maximum(rows[r] - first, 0), 0, 0, 0)
        here = jax.lax.dynamic_slice(old, at, (1, 1, *old.shape[2:]))
        new = jnp.where(rows[r] < 0, here, values[r].astype(old.dtype))
        return jax.lax.dynamic_update_slice(old, new, at)

    return jax.lax.fori_loop(0, rows.shape[0], one, old)

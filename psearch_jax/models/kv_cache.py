"""Keys and values of every layer and row, kept across turns.

```
position   0 . . . . . . . . . . . . . . . S-1
row 0      p p p p p s s s s o o o o s . . .      p prompt, s sampled, o observation, . not written yet
row 1      p p p s s s s s . . . . . . . . .
```
Each row has its own length: a write goes to the row's own positions, and a read masks what lies past them, so rows
of different lengths share one array without padding between turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from psearch_jax.config import Qwen2Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    k: jax.Array  # [L, B, K, S, H]
    v: jax.Array  # [L, B, K, S, H]

    @classmethod
    def zeros(cls, config: Qwen2Config, rows: int, positions: int, dtype) -> KVCache:
        """An empty cache. Zeros, not garbage: masked keys must not turn into NaN."""
        shape = (config.layers, rows, config.kv_heads, positions, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KVCache, k: jax.Array, v: jax.Array, start: jax.Array, count: jax.Array) -> KVCache:
    """Writes `count[b]` new positions of row b at `start[b]`; what would land past S is dropped.

    Args:
      k, v: [L, B, K, T, H], of which the first `count[b]` of T are real.
      start, count: [B] int32.
    """
    size = cache.k.shape[3]
    offset = jnp.arange(k.shape[3])
    # An index of `size` is out of bounds, and mode="drop" leaves the cache as it is there. A clamped
    # dynamic_update_slice would overwrite live keys instead.
    target = jnp.where(offset < count[:, None], start[:, None] + offset, size)

    # Every leading index is spelled out, so that what is written is whole lines of H. With L or K as slices, XLA's TPU
    # backend lays the cache out for the write, and transposes all of it at every token.
    L, B, K = k.shape[:3]
    at = jnp.arange(L)[:, None, None, None], jnp.arange(B)[:, None, None], jnp.arange(K)[:, None], target[:, None]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[at].set(new.astype(old.dtype), mode="drop")

    return KVCache(put(cache.k, k), put(cache.v, v))


def copy_rows(cache: KVCache, source: KVCache, index: jax.Array) -> KVCache:
    """Makes row b a copy of row `index[b]` of `source`, with zeros behind it; -1 leaves row b as it is.

    Zeros, because a masked position counts 0 times its value: a NaN or an infinity of the row's last rollout would
    come through, and to mask the values where they are read would cost at every token.

    Args:
      source: a cache with at most as many positions as `cache`.
      index: [B] int32.
    """
    behind = ((0, 0), (0, 0), (0, cache.k.shape[3] - source.k.shape[3]), (0, 0))
    keep = (index < 0)[:, None, None, None]

    # Layer by layer: where rows are split over devices, taking some gathers all of the source.
    def one(layer: jax.Array, caches: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out = []
        for old, new in zip(caches, (source.k, source.v), strict=True):
            taken = jnp.take(jax.lax.dynamic_index_in_dim(new, layer, keepdims=False), jnp.maximum(index, 0), axis=0)
            here = jax.lax.dynamic_slice_in_dim(old, layer, 1)[0]
            here = jnp.where(keep, here, jnp.pad(taken.astype(here.dtype), behind))
            out.append(jax.lax.dynamic_update_index_in_dim(old, here, layer, 0))
        return tuple(out)

    return KVCache(*jax.lax.fori_loop(0, cache.k.shape[0], one, (cache.k, cache.v)))

"""Attention to a cache that reads only the real positions of each row, for TPUs: of decode steps and of passages.

A Pallas kernel reads the cache in place and follows a list of work. An entry is a block of queries of a row with a
block of keys: for each block of queries the row's cached blocks, and then those of the tokens themselves. A row of 200
positions has one cached block, a row of 6,000 twelve. Letters as in models/attention; R of the B rows of the cache.

It was compiled for v5e, v5p and v6e and interpreted, but never run on a TPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.models.attention.scores import NEG_INF, group_heads, merge_heads
from psearch_jax.models.kv_cache import AXES, KVCache
from psearch_jax.sharding import COMPUTE, on_own_rows, spec

# Of each entry its block of queries, as row * blocks + block, and its block of keys; and the number of entries.
Work = tuple[jax.Array, jax.Array, jax.Array]

# Maximum query positions per entry, and cached positions. Scores of G heads, in float32, must fit into a core's memory
# several times. Query positions are a multiple of the rows of a register in 16 bits.
QUERIES, KEYS, REGISTER_ROWS = 128, 512, 16
# Bytes of keys that an entry should move, so that its start-up cost is small in comparison; and the minimum positions
# of a block: with smaller blocks, the saving on a row's last, half-empty block would not pay.
ENTRY_BYTES, MIN_BLOCK_POSITIONS = 128 * 1024, 128


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    start: jax.Array,
    rows: jax.Array | None,
    work: Work,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of tokens over themselves and the cached positions before them, as `cached.attend_chunk`.

    Args:
      q: [R, T, N, H].
      k, v: [R, K, T, H] of the tokens.
      cache: of which the first start[r] positions of row rows[r] are real.
      layer: [] int32.
      start: [R] int32; 0 where rows[r] is -1.
      rows: [R] int32, as in models/kv_cache.py; default: all in order.
      work: from `list_work`, the same for all layers.

    Returns:
      [R, T, N, H].
    """
    T, N, H = q.shape[1:]
    rows = jnp.arange(q.shape[0], dtype=jnp.int32) if rows is None else rows
    own = ("rows", "kv_heads", None, None)

    def local(first: Any, q, k, v, layer, start, rows, pairs, blocks, entries, cached_k, cached_v):
        first = first // q.shape[0] * cached_k.shape[1]  # from the device's first of R rows to its first of B rows
        scalars = (layer.reshape(1), jnp.maximum(rows - first, 0), start, pairs, blocks)
        scalars = tuple(x.astype(jnp.int32) for x in scalars)
        q = group_heads(q, k.shape[1])  # [R, K, G, T, H]
        q = q.swapaxes(2, 3) if T == 1 else q  # the heads of one token form one block of queries
        X = q.shape[3]
        tile = _block_queries(X)
        # The last block is filled up; the mask hides these keys from real queries.
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -X % tile), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, q.shape[3] - T), (0, 0))) for x in (k, v))
        out = _call_kernel(q, k, v, scalars, entries, cached_k, cached_v, tile, T, interpret)[:, :, :, :X]
        return merge_heads(out.swapaxes(2, 3) if T == 1 else out)

    arrays = ((k, own), (v, own), (layer, ()), (start, ("rows",)), (rows, ("rows",)))
    lists = tuple((x, ("rows",)) for x in work)
    return on_own_rows(local, q, ("rows", None, "heads", None), *arrays, *lists, (cache.k, AXES), (cache.v, AXES))


def _block_queries(X: int) -> int:
    """Query positions per block, of X in all."""
    return min(QUERIES, X + -X % REGISTER_ROWS)


def block_positions(positions: int, head_dim: int, itemsize: int) -> int:
    """Cached positions per block: a power of two, or all of a short cache."""
    wanted = ENTRY_BYTES // (head_dim * itemsize)
    return min(positions, KEYS, max(MIN_BLOCK_POSITIONS, 2 ** int(math.log2(max(wanted, 1)))))


def list_work(start: jax.Array, cache: KVCache, T: int, heads: int) -> Work:
    """The work of each device's rows, one device after another, for T tokens of each row.

    It depends on no layer, and is computed once for all of them.
    """
    K, S, H = cache.v.shape[2:]
    size = block_positions(S, H, cache.v.dtype.itemsize)
    X = heads // K if T == 1 else T

    def local(start: jax.Array) -> Work:
        pairs, blocks, entries = list_entries(start, size, -(-X // _block_queries(X)), -(-S // size))
        return pairs, blocks, entries[None]

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(start)
    sharding = spec(("rows",), COMPUTE, mesh, start.shape)
    return jax.shard_map(local, in_specs=sharding, out_specs=(sharding,) * 3, check_vma=False)(start)


def list_entries(start: jax.Array, size: int, query_blocks: int, key_blocks: int) -> Work:
    """The entries for rows of `start` [R] cached positions.

    Args:
      size: cached positions per block.
      query_blocks: blocks of queries of each row.
      key_blocks: blocks of a full row of the cache.

    Returns:
      [entries] int32 each, and the number of real entries, []. Blocks of keys count from the row's first cached one,
      and continue with the blocks of its tokens, as wide as those of queries.
    """
    keys = (-(-start // size))[:, None] + 1 + jnp.arange(query_blocks)  # [R, query_blocks]
    entry = jnp.arange(start.shape[0] * (query_blocks * key_blocks + query_blocks * (query_blocks + 1) // 2))
    ends = jnp.cumsum(keys.reshape(-1))
    # Compare every entry with every row: a binary search is a loop, which XLA would run again in every layer.
    pair = jnp.minimum(jnp.searchsorted(ends, entry, side="right", method="compare_all"), ends.shape[0] - 1)
    block = entry - (ends - keys.reshape(-1))[pair]
    return pair.astype(jnp.int32), block.astype(jnp.int32), ends[-1].astype(jnp.int32)


def _call_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scalars: tuple[jax.Array, ...],
    entries: jax.Array,
    cached_k: jax.Array,
    cached_v: jax.Array,
    tile: int,
    T: int,
    interpret: bool,
) -> jax.Array:
    """Attention [R, K, G, X, H] of a device's rows and heads; q [R, K, G, X, H] and k, v [R, K, X, H], X a multiple of
    `tile`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    R, K, G, X, H = q.shape
    S = cached_v.shape[3]
    size, blocks = block_positions(S, H, cached_v.dtype.itemsize), X // tile

    def query_index_map(head, i, layer, rows, start, pair, block):
        return pair[i] // blocks, head, 0, pair[i] % blocks, 0

    def own_index_map(head, i, layer, rows, start, pair, block):
        row = pair[i] // blocks
        return row, head, jnp.maximum(block[i] - pl.cdiv(start[row], size), 0), 0

    def cache_index_map(head, i, layer, rows, start, pair, block):
        row = pair[i] // blocks
        # While the tokens' own keys are visited, the block stays the same, and is not read again.
        last = jnp.maximum(pl.cdiv(start[row], size) - 1, 0)
        return layer[0], rows[row], head, jnp.minimum(block[i], last), 0

    queries, own = pl.BlockSpec((1, 1, G, tile, H), query_index_map), pl.BlockSpec((1, 1, tile, H), own_index_map)
    cached, half_full = pl.BlockSpec((1, 1, 1, size, H), cache_index_map), S // 2 + X // 2
    return pl.pallas_call(
        functools.partial(_kernel, size=size, blocks=blocks, T=T),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(K, entries[0]),
            in_specs=[queries, own, own, cached, cached],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM((G * tile, width), jnp.float32) for width in (1, 1, H)],
        ),
        cost_estimate=pl.CostEstimate(  # the compiler cannot inspect the kernel
            flops=4 * R * K * G * X * half_full * H,
            bytes_accessed=2 * R * K * blocks * half_full * H * cached_v.dtype.itemsize,
            transcendentals=R * K * G * X * half_full,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="ragged_attention",
        interpret=interpret,
    )(*scalars, q, k, v, cached_k, cached_v)


def _kernel(layer, rows, start, pair, block, q, own_k, own_v, k, v, out, row_max, denominator, numerator, **shape):
    """One entry; `row_max`, `denominator` and `numerator` keep the running softmax of a block of queries.

    q [1, 1, G, tile, H]; own_k, own_v [1, 1, tile, H]; k, v [1, 1, 1, size, H].
    """
    from jax.experimental import pallas as pl

    size, blocks, T = shape["size"], shape["blocks"], shape["T"]
    i = pl.program_id(1)
    G, tile, H = q.shape[2:]
    length, queries = start[pair[i] // blocks], q[0, 0].reshape(G * tile, H)
    cached, query_block = pl.cdiv(length, size), pair[i] % blocks
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = functools.partial(jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32)

    @pl.when(block[i] == 0)
    def _():
        row_max[...] = jnp.full(row_max.shape, NEG_INF, jnp.float32)
        denominator[...] = jnp.zeros(denominator.shape, jnp.float32)
        numerator[...] = jnp.zeros(numerator.shape, jnp.float32)

    def add(keys: jax.Array, values: jax.Array, mask: jax.Array) -> None:
        """Continues the softmax over keys and values [Y, H], which a query attends to where `mask` is true."""
        scores = jnp.where(mask, H**-0.5 * product(queries, keys, (((1,), (1,)), ((), ()))), NEG_INF)
        new_max = jnp.maximum(row_max[...], jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - new_max), jnp.exp(row_max[...] - new_max)
        row_max[...] = new_max
        denominator[...] = denominator[...] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        added = product(weights.astype(q.dtype), values, (((1,), (0,)), ((), ())))
        numerator[...] = numerator[...] * rescale + added

    @pl.when(block[i] < cached)
    def _():
        first = block[i] * size
        is_real = first + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < length
        mask = first + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < length
        # Values past the row's end are arbitrary: replace them, because 0 * NaN is NaN.
        add(k[0, 0, 0].astype(q.dtype), jnp.where(is_real, v[0, 0, 0].astype(q.dtype), 0), mask)

    @pl.when(block[i] >= cached)
    def _():
        first = (block[i] - cached) * tile
        position = query_block * tile + jax.lax.broadcasted_iota(jnp.int32, (G * tile, tile), 0) % tile
        key = first + jax.lax.broadcasted_iota(jnp.int32, (G * tile, tile), 1)
        add(own_k[0, 0], own_v[0, 0], key <= jnp.minimum(position, T - 1))

    @pl.when(block[i] == cached + query_block)
    def _():
        out[0, 0] = (numerator[...] / denominator[...]).astype(out.dtype).reshape(G, tile, H)

"""Attention of a chunk of tokens that continues cache rows, which reads only the rows' real positions.

The kernels read the cache in place, where `attention.cached.chunk_attention` first copies the rows out of it. On a
TPU, a Pallas kernel follows a work list: an entry is a block of keys for a block of a row's queries, first the cached
keys, then those of the chunk itself up to the queries. On a GPU, a program for each block of queries goes over the
same keys. A CPU uses `chunk_attention`. Letters as in models/attention; R rows of the B rows of the cache.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.config import DecoderConfig
from psearch_jax.models import ragged
from psearch_jax.models.attention import Implementation
from psearch_jax.models.attention.scores import NEG_INF, group_heads, merge_heads
from psearch_jax.models.kv_cache import AXES, KVCache
from psearch_jax.models.ragged import Work
from psearch_jax.sharding import on_own_rows

# Of the TPU kernel: query positions per entry, and maximum cached positions. Scores of G heads, in float32, must fit
# into a core's memory several times. Query positions are a multiple of the rows of a register in 16 bits.
TPU_QUERIES, TPU_KEYS, TPU_ROWS = 128, 512, 16
GPU_QUERIES = 64  # query positions per program of the GPU kernel


def applies(form: Implementation, k_transposed: bool, config: DecoderConfig, mesh: Any) -> bool:
    """Whether a model with attention `form` uses these kernels: on a TPU or GPU where it decodes by length."""
    return not k_transposed and ragged.applies(form, k_transposed, config, mesh)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    start: jax.Array,
    rows: jax.Array,
    form: Implementation,
    interpret: bool = False,
    listed: Work | None = None,
) -> jax.Array:
    """Causal attention of a chunk over itself and the cached positions before it, as `chunk_attention`.

    Args:
      q: [R, T, N, H].
      k, v: [R, K, T, H] of the chunk.
      cache: of which the first start[r] positions of row rows[r] are real.
      layer: [] int32.
      start: [R] int32; 0 where rows[r] is -1.
      rows: [R] int32, as in models/kv_cache.py.
      form: the model's attention, for which `applies` is true.
      listed: `work_list` of the chunk, the same for all layers; default: computed here, where it is needed.

    Returns:
      [R, T, N, H].
    """
    own = ("rows", "kv_heads", None, None)
    if listed is None:
        listed = work_list(start, cache, q.shape[1], form)
    scales = [(x, AXES[:4]) for x in (cache.k_scale, cache.v_scale) if x is not None]
    kernel = functools.partial(_on_gpu if form == "cudnn" else _on_tpu, interpret=interpret)
    lists = [(x, ("rows",)) for x in listed or ()]

    def local(first: Any, q, k, v, layer, start, rows, *arrays):
        cached = arrays[len(lists)]
        first = first // q.shape[0] * cached.shape[1]  # from the device's first of R rows to its first of B rows
        scalars = (layer.reshape(1), jnp.maximum(rows - first, 0), start)
        scalars = tuple(x.astype(jnp.int32) for x in scalars)
        T, tile = q.shape[1], _query_positions(q.shape[1], form)
        # The last block of queries is filled up; causal attention never sees these positions.
        q = jnp.pad(q, ((0, 0), (0, -T % tile), (0, 0), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -T % tile), (0, 0))) for x in (k, v))
        return kernel(group_heads(q, k.shape[1]), k, v, scalars, *arrays, tile=tile)[:, :T]

    return on_own_rows(
        local,
        q,
        ("rows", None, "heads", None),
        *((k, own), (v, own), (layer, ()), (start, ("rows",)), (rows, ("rows",))),
        *(*lists, (cache.k, AXES), (cache.v, AXES), *scales),
    )


def _query_positions(T: int, form: Implementation) -> int:
    """Query positions per block, for a chunk of T."""
    return GPU_QUERIES if form == "cudnn" else min(TPU_QUERIES, T + -T % TPU_ROWS)


def _key_positions(cache_positions: int, head_dim: int, itemsize: int) -> int:
    """Cached positions per block on a TPU."""
    return min(TPU_KEYS, ragged.block_positions(1, head_dim, itemsize, cache_positions))


def work_list(start: jax.Array, cache: KVCache, T: int, form: Implementation) -> Work | None:
    """`work` of each device's rows for a TPU's kernel, as `ragged.work_list`, for a chunk of T; None on a GPU."""
    if form != "splash":
        return None
    S, H = cache.v.shape[3:]
    size, blocks = _key_positions(S, H, cache.v.dtype.itemsize), -(-T // _query_positions(T, form))
    return ragged.on_own_starts(lambda start: work(start, size, blocks, -(-S // size)), start)


def work(start: jax.Array, size: int, query_blocks: int, key_blocks: int) -> Work:
    """What each entry of the TPU's kernel computes.

    Args:
      start: [R] int32, cached positions of each row.
      size: cached positions per block.
      query_blocks: blocks of queries of each row.
      key_blocks: blocks of a full row of the cache.

    Returns:
      For each entry, [entries] int32, the row and its block of queries, as row * query_blocks + block, and the block
      of keys; and the number of real entries. Keys count from the row's first cached block, and continue with the
      blocks of the chunk, as wide as those of queries.
    """
    R = start.shape[0]
    keys = (-(-start // size))[:, None] + 1 + jnp.arange(query_blocks)  # [R, query_blocks]
    entry = jnp.arange(R * (query_blocks * key_blocks + query_blocks * (query_blocks + 1) // 2))
    ends = jnp.cumsum(keys.reshape(-1))
    # Compare every entry with every row: a binary search is a loop.
    pair = jnp.minimum(jnp.searchsorted(ends, entry, side="right", method="compare_all"), ends.shape[0] - 1)
    block = entry - (ends - keys.reshape(-1))[pair]
    return pair.astype(jnp.int32), block.astype(jnp.int32), ends[-1].astype(jnp.int32)


def _on_tpu(
    q: jax.Array, k, v, scalars, pair, block, entries, cached_k, cached_v, *scales, tile: int, interpret: bool
) -> jax.Array:
    """`attend` on a TPU, for a device's rows and heads. q [R, K, G, T, H], T a multiple of `tile`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    R, K, G, T, H = q.shape
    S = cached_v.shape[3]
    size, blocks = _key_positions(S, H, cached_v.dtype.itemsize), T // tile

    def query_index_map(head, i, layer, rows, start, pair, block):
        return pair[i] // blocks, head, 0, pair[i] % blocks, 0

    def chunk_index_map(head, i, layer, rows, start, pair, block):
        row = pair[i] // blocks
        return row, head, jnp.maximum(block[i] - pl.cdiv(start[row], size), 0), 0

    def cached_block(i, start, pair, block):
        # While the chunk's own keys are visited, the block stays the same, and is not read again.
        return jnp.minimum(block[i], jnp.maximum(pl.cdiv(start[pair[i] // blocks], size) - 1, 0))

    def cache_index_map(head, i, layer, rows, start, pair, block):
        return layer[0], rows[pair[i] // blocks], head, cached_block(i, start, pair, block), 0

    def scale_index_map(head, i, layer, rows, start, pair, block):
        return layer[0], rows[pair[i] // blocks], 0, cached_block(i, start, pair, block)

    queries, chunk = pl.BlockSpec((1, 1, G, tile, H), query_index_map), pl.BlockSpec((1, 1, tile, H), chunk_index_map)
    cached, lines = pl.BlockSpec((1, 1, 1, size, H), cache_index_map), pl.BlockSpec((1, 1, K, size), scale_index_map)
    half_full = S // 2 + T // 2
    out = pl.pallas_call(
        functools.partial(_tpu_kernel, size=size, blocks=blocks),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars) + 2,
            grid=(K, entries[0]),
            in_specs=[queries, chunk, chunk, cached, cached, *[lines] * len(scales)],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM((G * tile, width), jnp.float32) for width in (1, 1, H)],
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * R * K * G * T * half_full * H,
            bytes_accessed=2 * R * K * blocks * half_full * H * cached_v.dtype.itemsize,
            transcendentals=R * K * G * T * half_full,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="ragged_chunk",
        interpret=interpret,
    )(*scalars, pair, block, q, k, v, cached_k, cached_v, *scales)
    return merge_heads(out)


def _tpu_kernel(layer, rows, start, pair, block, q, own_k, own_v, k, v, *others, size: int, blocks: int) -> None:
    """One entry; `row_max`, `denominator` and `numerator` keep the running softmax of a block of queries.

    q [1, 1, G, tile, H]; own_k, own_v [1, 1, tile, H]; k, v [1, 1, 1, size, H].
    """
    from jax.experimental import pallas as pl

    *scales, out, row_max, denominator, numerator = others  # scales of keys and of values, in int8
    head, i = pl.program_id(0), pl.program_id(1)
    G, tile, H = q.shape[2:]
    length, queries = start[pair[i] // blocks], q[0, 0].reshape(G * tile, H)
    cached, at = pl.cdiv(length, size), pair[i] % blocks
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = functools.partial(jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32)

    @pl.when(block[i] == 0)
    def _():
        row_max[...] = jnp.full(row_max.shape, NEG_INF, jnp.float32)
        denominator[...] = jnp.zeros(denominator.shape, jnp.float32)
        numerator[...] = jnp.zeros(numerator.shape, jnp.float32)

    def add(keys: jax.Array, new: jax.Array, mask: jax.Array, k_scale: Any = 1.0, v_scale: Any = 1.0) -> None:
        """Continues the softmax over keys and values [X, H], which a query attends to where `mask` is true."""
        scores = H**-0.5 * product(queries, keys, (((1,), (1,)), ((), ())))
        scores = jnp.where(mask, scores * k_scale, NEG_INF)
        new_max = jnp.maximum(row_max[...], jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - new_max), jnp.exp(row_max[...] - new_max)
        row_max[...] = new_max
        denominator[...] = denominator[...] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights * v_scale).astype(q.dtype)
        numerator[...] = numerator[...] * rescale + product(weights, new, (((1,), (0,)), ((), ())))

    @pl.when(block[i] < cached)
    def _():
        first = block[i] * size
        real = first + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < length
        mask = first + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < length
        # Values past the row's end are arbitrary: replace them, because 0 * NaN is NaN.
        new = jnp.where(real, v[0, 0, 0].astype(q.dtype), 0)
        add(k[0, 0, 0].astype(q.dtype), new, mask, *(jnp.where(mask, x[0, 0, pl.ds(head, 1)], 0) for x in scales))

    @pl.when(block[i] >= cached)
    def _():
        first = (block[i] - cached) * tile
        place = at * tile + jax.lax.broadcasted_iota(jnp.int32, (G * tile, tile), 0) % tile
        add(own_k[0, 0], own_v[0, 0], first + jax.lax.broadcasted_iota(jnp.int32, (G * tile, tile), 1) <= place)

    @pl.when(block[i] == cached + at)
    def _():
        out[0, 0] = (numerator[...] / denominator[...]).astype(out.dtype).reshape(G, tile, H)


def _on_gpu(q: jax.Array, k, v, scalars, cached_k, cached_v, *scales, tile: int, interpret: bool) -> jax.Array:
    """`attend` on a GPU, for a device's rows and heads. q [R, K, G, T, H], T a multiple of `tile`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    layer, (cached_k, cached_v, *scales) = ragged.addressable(scalars[0], (cached_k, cached_v, *scales))
    R, K, G, T, H = q.shape
    width = min(ragged.GPU_BLOCK, 2 ** int(math.log2(cached_v.shape[3])))
    queries = pl.BlockSpec((None, None, None, tile, H), lambda r, n, i: (r, n // G, n % G, i, 0))
    arrays = (layer, *scalars[1:], k, v, cached_k, cached_v, *scales)
    out = pl.pallas_call(
        functools.partial(_gpu_kernel, width=width, group=G),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(R, K * G, T // tile),
        in_specs=[queries, *(pl.BlockSpec(x.shape, lambda *_, ndim=x.ndim: (0,) * ndim) for x in arrays)],
        out_specs=queries,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name="ragged_chunk",
        interpret=interpret,
    )(q, *arrays)
    return merge_heads(out)


def _gpu_kernel(q, layer, rows, start, own_k, own_v, k, v, *others, width: int, group: int) -> None:
    """The queries [tile, H] of one head and row, over the row's cached positions and then the chunk's."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *scales, out = others
    r, head, part = pl.program_id(0), pl.program_id(1) // group, pl.program_id(2)
    at, length, queries, dtype = (layer[0], rows[r], head), start[r], q[...], q.dtype
    (tile, H), S = q.shape, k.shape[3]
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    def add(sums: tuple, keys: jax.Array, new: jax.Array, mask: jax.Array, k_scale: Any = 1.0, v_scale: Any = 1.0):
        row_max, denominator, numerator = sums
        scores = H**-0.5 * product(queries, keys, (((1,), (1,)), ((), ())))
        scores = jnp.where(mask, scores * k_scale, NEG_INF)
        new_max = jnp.maximum(row_max, jnp.max(scores, axis=1))
        weights, rescale = jnp.exp(scores - new_max[:, None]), jnp.exp(row_max - new_max)
        denominator = denominator * rescale + jnp.sum(weights, axis=1)
        return (
            new_max,
            denominator,
            numerator * rescale[:, None] + product((weights * v_scale).astype(dtype), new, (((1,), (0,)), ((), ()))),
        )

    def add_cached(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = jnp.minimum(i * width, S - width)  # the cache's last block may overlap the one before
        place = first + jnp.arange(width)
        mask = (place >= i * width) & (place < length)

        def load_lines(x: Any) -> jax.Array:
            return triton.load(x.at[*at, pl.ds(first, width), :], mask=mask[:, None], other=0).astype(dtype)

        def load_scales(x: Any) -> jax.Array:
            return triton.load(x.at[*at, pl.ds(first, width)], mask=mask, other=0)[None]

        return add(sums, load_lines(k), load_lines(v), mask[None], *map(load_scales, scales))

    def add_chunk(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        keys, new = (triton.load(x.at[r, head, pl.ds(i * tile, tile), :]) for x in (own_k, own_v))
        mask = i * tile + jnp.arange(tile) <= part * tile + jnp.arange(tile)[:, None]
        return add(sums, keys, new, mask)

    sums = jnp.full(tile, NEG_INF, jnp.float32), jnp.zeros(tile, jnp.float32), jnp.zeros((tile, H), jnp.float32)
    sums = jax.lax.fori_loop(0, (length + width - 1) // width, add_cached, sums)
    _, denominator, numerator = jax.lax.fori_loop(0, part + 1, add_chunk, sums)
    out[...] = (numerator / denominator[:, None]).astype(dtype)

"""Decoding attention that reads only the real positions of each row's cache, block by block.

On a TPU, a Pallas kernel reads the cache in place, following a work list with one entry per block of each row: a row
of 200 positions has one, a row of 6,000 twelve. A GPU runs many programs at once, so its Pallas kernel has one program
per part of each row. Programs past a row's end return at once, and the partial results are summed afterwards. On a
CPU, a loop runs over groups of rows and over each group's blocks up to its longest row, so that a block is used while
it is in the processor's cache. Letters as in models/attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.config import DecoderConfig
from psearch_jax.models.attention import Implementation
from psearch_jax.models.attention.cached import KEY_BLOCK, Keys, over_cache, over_chunk
from psearch_jax.models.attention.scores import NEG_INF, group_heads, grouped, merge_heads
from psearch_jax.models.attention.splash import LANES
from psearch_jax.models.kv_cache import AXES, KVCache
from psearch_jax.sharding import COMPUTE, on_own_rows, spec

Work = tuple[jax.Array, jax.Array, jax.Array]  # of each entry its row and block, and the number of entries

# Bytes of keys that an entry should move, so that its start-up cost is small in comparison; and the minimum positions
# of a block: with smaller blocks, the saving on a row's last, half-empty block would not pay.
ENTRY_BYTES, MIN_BLOCK_POSITIONS = 128 * 1024, 128
# Maximum bytes of keys per loop iteration on a CPU: more would leave the processor's cache before they are used, and
# far fewer are not worth an iteration.
CPU_BYTES = 2**20
# Of the GPU kernel: positions per program, positions per load, and the minimum query rows of its products.
GPU_PART, GPU_BLOCK, GPU_QUERIES = 512, 64, 16
TRITON = "jax.experimental.pallas.triton"


def applies(implementation: Implementation, k_transposed: bool, config: DecoderConfig, mesh: Any) -> bool:
    """Whether a model with this attention decodes by length on a mesh; `k_transposed` marks the cache of a CPU.

    On a TPU it does with `splash` (16 bits), if a line of H fills registers. On a GPU it does with `cudnn`, if H is a
    power of two, at least 16, and JAX still has Pallas for Triton (0.12 announces its removal). Each device needs the
    keys of its queries.
    """
    parts, H = 1 if mesh.empty else mesh.shape["tensor"], config.head_dim
    divisible = config.heads % parts == 0 and config.kv_heads % parts == 0
    if k_transposed:
        return divisible
    if implementation == "splash":
        return divisible and H % LANES == 0
    return divisible and implementation == "cudnn" and H >= 16 and H & (H - 1) == 0 and find_spec(TRITON) is not None


def block_positions(kv_heads: int, head_dim: int, itemsize: int, positions: int) -> int:
    """Positions per entry of the work list: a power of two, or all of a short cache."""
    wanted = ENTRY_BYTES // (kv_heads * head_dim * itemsize)
    return min(positions, max(MIN_BLOCK_POSITIONS, 2 ** int(math.log2(max(wanted, 1)))))


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    start: jax.Array,
    implementation: Implementation,
    interpret: bool = False,
    listed: Work | None = None,
) -> jax.Array:
    """Attention of a few tokens over themselves and the cached positions before them, as `attention.cached.decode`.

    Args:
      q: [B, T, N, H], T at most `MAX_DECODE_TOKENS`.
      k, v: [B, K, T, H] of the tokens.
      cache: of which the first start[b] positions of row b are real.
      layer: [] int32.
      start: [B] int32.
      implementation: the model's attention, for which `applies` is true.
      listed: `work_list` of the cache, the same for all layers; default: computed here, where it is needed.

    Returns:
      [B, T, N, H].
    """
    own = ("rows", "kv_heads", None, None)
    if listed is None:
        listed = work_list(start, cache, implementation)
    scales = [(x, AXES[:4]) for x in (cache.k_scale, cache.v_scale) if x is not None]
    kernel = functools.partial(_on_gpu if implementation == "cudnn" else _on_tpu, interpret=interpret)
    decode_local = _by_groups if cache.k_transposed else kernel
    lists = [(x, ("rows",)) for x in listed or ()]
    return on_own_rows(
        lambda first, *arrays: decode_local(*arrays),
        q,
        ("rows", None, "heads", None),
        *((k, own), (v, own), (layer, ()), (start, ("rows",)), *lists, (cache.k, AXES), (cache.v, AXES), *scales),
    )


def work_list(start: jax.Array, cache: KVCache, implementation: Implementation) -> Work | None:
    """`work` of each device's rows for a TPU's kernel, [devices over rows * n] int32 each; None on other machines.

    It depends on no layer. Computed in each of them, it took a twentieth of a decode step's estimated cycles.
    """
    if cache.k_transposed or implementation != "splash":
        return None
    mesh = jax.sharding.get_abstract_mesh()
    K, S, H = cache.v.shape[2:]
    size = block_positions(K // (1 if mesh.empty else mesh.shape["tensor"]), H, cache.v.dtype.itemsize, S)
    return on_own_starts(lambda start: work(start, size, start.shape[0] * -(-S // size)), start)


def on_own_starts(listed: Callable[[jax.Array], Work], start: jax.Array) -> Work:
    """The work list of each device for its own rows, one after another, from a function of their `start`."""
    mesh = jax.sharding.get_abstract_mesh()

    def local(start: jax.Array) -> Work:
        row, block, entries = listed(start)
        return row, block, entries[None]

    if mesh.empty or mesh.size == 1:
        return local(start)
    place = spec(("rows",), COMPUTE, mesh, start.shape)
    return jax.shard_map(local, in_specs=place, out_specs=(place,) * 3, check_vma=False)(start)


def group_rows(rows: int, line_bytes: int) -> int:
    """Rows per group on a CPU: a divisor of `rows`; a block of one row has `line_bytes` bytes of keys."""
    return max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * line_bytes <= CPU_BYTES))


def _by_groups(q, k, v, layer, start, cached_k, cached_v, *scales) -> jax.Array:
    """`decode` on a CPU, for a device's rows and heads.

    cached_k [L, B, K, H, S], cached_v [L, B, K, S, H]; in int8 also the scales [L, B, K, S] of both.
    """
    B, K, S, H = cached_v.shape[1:]
    place = jnp.arange(q.shape[1])
    R = group_rows(B, K * min(KEY_BLOCK, S) * H * q.dtype.itemsize)

    def group(g: jax.Array, out: jax.Array) -> jax.Array:
        queries, own_k, own_v, length = (jax.lax.dynamic_slice_in_dim(x, g * R, R) for x in (q, k, v, start))
        _, scored = grouped(queries, K)

        def read_block(at: jax.Array, width: int) -> Keys:
            keys = jax.lax.dynamic_slice(cached_k, (layer, g * R, 0, 0, at), (1, R, K, H, width))[0]
            values = jax.lax.dynamic_slice(cached_v, (layer, g * R, 0, at, 0), (1, R, K, width, H))[0]
            block_scales = (jax.lax.dynamic_slice(x, (layer, g * R, 0, at), (1, R, K, width))[0] for x in scales)
            return Keys(keys, values, True, *block_scales)

        sums = over_chunk(q.dtype, scored, own_k, own_v, place)
        attended = merge_heads(over_cache(sums, q.dtype, scored, read_block, length, S).astype(out.dtype))
        return jax.lax.dynamic_update_slice_in_dim(out, attended, g * R, 0)

    return jax.lax.fori_loop(0, B // R, group, jnp.zeros_like(q))


def work(start: jax.Array, block: int, entries: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row and the block of each entry, [entries] int32, and the number of real entries.

    A row without cached positions still has one entry: its token attends to itself.
    """
    blocks = jnp.maximum(1, -(-start // block))
    ends = jnp.cumsum(blocks)
    entry = jnp.arange(entries)
    # Compare every entry with every row: a binary search is a loop, which XLA would run again in every layer.
    row = jnp.searchsorted(ends, entry, side="right", method="compare_all")
    row = jnp.minimum(row, start.shape[0] - 1)
    return row.astype(jnp.int32), (entry - (ends - blocks)[row]).astype(jnp.int32), ends[-1].astype(jnp.int32)


def _on_tpu(q, k, v, layer, start, row, block, entries, cached_k, cached_v, *scales, interpret: bool) -> jax.Array:
    """`decode` on a TPU, for a device's rows and heads, by the work list (row, block, [1] number of entries).

    In int8 with the `scales` of keys and of values.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    B, T, N, H = q.shape
    K, S = cached_v.shape[2:4]
    X = T * N // K
    size = block_positions(K, H, cached_v.dtype.itemsize, S)
    scalars = (jnp.reshape(layer, 1).astype(jnp.int32), row, block, start.astype(jnp.int32))

    def row_index_map(i, layer, row, block, start):
        return row[i], 0, 0, 0

    def cache_index_map(i, layer, row, block, start):
        return layer[0], row[i], 0, block[i], 0

    def scale_index_map(i, layer, row, block, start):
        return layer[0], row[i], 0, block[i]

    queries, own = pl.BlockSpec((1, K, X, H), row_index_map), pl.BlockSpec((1, K, T, H), row_index_map)
    cached = pl.BlockSpec((1, 1, K, size, H), cache_index_map)
    out = pl.pallas_call(
        functools.partial(_tpu_kernel, size=size),
        out_shape=jax.ShapeDtypeStruct((B, K, X, H), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(entries[0],),
            in_specs=[
                queries,
                own,
                own,
                cached,
                cached,
                *[pl.BlockSpec((1, 1, K, size), scale_index_map)] * len(scales),
            ],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM((K, X, width), jnp.float32) for width in (1, 1, H)],
        ),
        cost_estimate=_cost(B, T * N, K, S, H, H * cached_v.dtype.itemsize + (4 if scales else 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="ragged_decode",
        interpret=interpret,
    )(*scalars, group_heads(q, K).reshape(B, K, X, H), k, v, cached_k, cached_v, *scales)
    return merge_heads(out.reshape(B, K, N // K, T, H))


def _cost(B: int, N: int, K: int, S: int, H: int, line_bytes: int) -> Any:
    """The cost estimate for the compiler, which cannot inspect the kernel: N queries per row, rows half full."""
    from jax.experimental import pallas as pl

    return pl.CostEstimate(
        flops=2 * B * N * S * H, bytes_accessed=B * K * S * line_bytes, transcendentals=B * N * S // 2
    )


def _tpu_kernel(layer, row, block, start, q, own_k, own_v, k, v, *others, size: int) -> None:
    """One entry; `row_max`, `denominator` and `numerator` keep the running softmax over all entries of a row.

    q [1, K, G * T, H], the tokens of a head next to each other; own_k, own_v [1, K, T, H].
    """
    from jax.experimental import pallas as pl

    *scales, out, row_max, denominator, numerator = others  # scales of keys and of values, in int8
    i = pl.program_id(0)
    first, length = block[i] * size, start[row[i]]
    scale = q.shape[-1] ** -0.5
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    @pl.when(block[i] == 0)
    def _():
        T, wide = own_k.shape[2], q[0].astype(jnp.float32)
        token = jax.lax.broadcasted_iota(jnp.int32, row_max.shape, 1) % T

        def scores_of(t: int) -> jax.Array:  # [K, G * T, 1]
            scores = scale * jnp.sum(wide * own_k[0, :, pl.ds(t, 1)].astype(jnp.float32), axis=-1, keepdims=True)
            return scores if t == 0 else jnp.where(token >= t, scores, NEG_INF)

        own = [scores_of(t) for t in range(T)]
        row_max[...] = functools.reduce(jnp.maximum, own)
        weights = [jnp.exp(scores - row_max[...]) for scores in own]
        denominator[...] = sum(weights)
        numerator[...] = jnp.zeros(numerator.shape, jnp.float32)
        for t, weight in enumerate(weights):  # a value that is not finite must not reach the tokens before it
            here = weight * own_v[0, :, pl.ds(t, 1)].astype(jnp.float32)
            numerator[...] += here if t == 0 else jnp.where(token >= t, here, 0)

    real = first + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < length
    mask = first + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < length
    product = functools.partial(jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32)
    for head in range(q.shape[1]):
        # Past the cache's end, the last block reads arbitrary values: replace them, because 0 * NaN is NaN.
        here = jnp.where(real, v[0, 0, head].astype(q.dtype), 0)
        scores = scale * product(q[0, head], k[0, 0, head].astype(q.dtype), (((1,), (1,)), ((), ())))
        k_scale, v_scale = (jnp.where(mask, x[0, 0, pl.ds(head, 1)], 0) for x in scales) if scales else (1.0, 1.0)
        scores = jnp.where(mask, scores * k_scale, NEG_INF)
        new_max = jnp.maximum(row_max[head], jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - new_max), jnp.exp(row_max[head] - new_max)
        row_max[head] = new_max
        denominator[head] = denominator[head] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights * v_scale).astype(q.dtype)
        numerator[head] = numerator[head] * rescale + product(weights, here, (((1,), (0,)), ((), ())))

    @pl.when(first + size >= length)
    def _():
        out[0] = (numerator[...] / denominator[...]).astype(out.dtype)


def _on_gpu(q, k, v, layer, start, cached_k, cached_v, *scales, interpret: bool) -> jax.Array:
    """`decode` on a GPU, for a device's rows and heads; in int8 with the `scales` of keys and of values."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    layer, (cached_k, cached_v, *scales) = addressable(layer, (cached_k, cached_v, *scales))
    B, T, N, H = q.shape
    K, S = cached_v.shape[2:4]
    X, width = T * N // K, min(GPU_BLOCK, 2 ** int(math.log2(S)))
    parts, queries = -(-S // GPU_PART), max(GPU_QUERIES, 2 ** math.ceil(math.log2(X)))

    def full_array_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    def partial_result(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, queries, size), lambda b, h, p: (b, h, p, 0, 0))

    arrays = (cached_k, cached_v, *scales)
    part_max, part_denominator, part_numerator = pl.pallas_call(
        functools.partial(_gpu_kernel, width=width, group=X),
        out_shape=[jax.ShapeDtypeStruct((B, K, parts, X, size), jnp.float32) for size in (1, 1, H)],
        grid=(B, K, parts),
        in_specs=[
            full_array_spec(layer.reshape(1)),
            full_array_spec(start),
            pl.BlockSpec((None, None, queries, H), lambda b, h, p: (b, h, 0, 0)),
            *map(full_array_spec, arrays),
        ],
        out_specs=[partial_result(1), partial_result(1), partial_result(H)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name="ragged_decode",
        interpret=interpret,
    )(layer.reshape(1).astype(jnp.int32), start.astype(jnp.int32), group_heads(q, K).reshape(B, K, X, H), *arrays)
    # Add the tokens themselves as one more part.
    own = over_chunk(q.dtype, grouped(q, K)[1], k, v, jnp.arange(T))
    own_max, own_denominator, own_numerator = (x.reshape(B, K, X, -1) for x in own)
    row_max = jnp.maximum(jnp.max(part_max, axis=2), own_max)
    rescale, own_rescale = jnp.exp(part_max - row_max[:, :, None]), jnp.exp(own_max - row_max)
    out = jnp.sum(part_numerator * rescale, axis=2) + own_rescale * own_numerator
    out = out / (jnp.sum(part_denominator * rescale, axis=2) + own_rescale * own_denominator)
    return merge_heads(out.astype(q.dtype).reshape(B, K, N // K, T, H))


def addressable(layer: jax.Array, cached: Sequence[jax.Array]) -> tuple[jax.Array, Sequence[jax.Array]]:
    """The layer's index and the arrays [L, ...] of a cache, as a GPU kernel can address them: perhaps one layer only.

    Up to 4 GiB, kernels use signed 32-bit offsets, which overflow beyond 2 GiB.
    """
    if not (cached[1].dtype.itemsize == 1 and 2**31 < cached[1].size <= 2**32):
        return layer, cached
    at = layer.reshape(())
    return jnp.zeros_like(layer), [jax.lax.dynamic_index_in_dim(x, at, keepdims=True) for x in cached]


def _gpu_kernel(layer, start, q, k, v, *others, width: int, group: int) -> None:
    """One part of a row for one kv head: the maximum of its scores, the sum of their exponentials, and that of values.

    A part past the row's end gives NEG_INF, 0 and 0.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *scales, max_out, denominator_out, numerator_out = others
    row, head, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * GPU_PART
    last = jnp.minimum(first + GPU_PART, start[row])
    at_layer, S, H, dtype = layer[0], k.shape[3], q.shape[-1], q.dtype
    real = (jnp.arange(q.shape[0]) < group)[:, None]
    queries = triton.load(q, mask=real, other=0)
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    def visit(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row_max, denominator, numerator = sums
        at = jnp.minimum(first + i * width, S - width)  # the cache's last block may overlap the one before
        place = at + jnp.arange(width)
        mask = (place >= first + i * width) & (place < last)

        def load_lines(x: Any) -> jax.Array:
            here = x.at[at_layer, row, head, pl.ds(at, width), :]
            return triton.load(here, mask=mask[:, None], other=0).astype(dtype)

        def load_scales(x: Any) -> jax.Array:
            return triton.load(x.at[at_layer, row, head, pl.ds(at, width)], mask=mask, other=0)[None]

        scores = H**-0.5 * product(queries, load_lines(k), (((1,), (1,)), ((), ())))
        scores = jnp.where(mask[None], scores * load_scales(scales[0]) if scales else scores, NEG_INF)
        new_max = jnp.maximum(row_max, jnp.max(scores, axis=1))
        weights, rescale = jnp.exp(scores - new_max[:, None]), jnp.exp(row_max - new_max)
        denominator = denominator * rescale + jnp.sum(weights, axis=1)
        weights = (weights * load_scales(scales[1]) if scales else weights).astype(dtype)
        return (
            new_max,
            denominator,
            numerator * rescale[:, None] + product(weights, load_lines(v), (((1,), (0,)), ((), ()))),
        )

    R = q.shape[0]
    sums = jnp.full(R, NEG_INF, jnp.float32), jnp.zeros(R, jnp.float32), jnp.zeros((R, H), jnp.float32)
    blocks = jnp.maximum(last - first + width - 1, 0) // width
    row_max, denominator, numerator = jax.lax.fori_loop(0, blocks, visit, sums)
    triton.store(max_out, row_max[:, None], mask=real)
    triton.store(denominator_out, denominator[:, None], mask=real)
    triton.store(numerator_out, numerator, mask=real)

"""Attention in three uses: `causal` for full rows, `behind` for a chunk after a cache, `decode` for one such token.

`causal` has four implementations, chosen by dtype and devices (`implementation_for`): in 16 bits `splash` (a Pallas
kernel, for TPUs) and `cudnn` (for GPUs); in float32, and where there is no kernel, `blocked`; on a CPU `rowwise`,
which is `blocked` row by row. None holds all scores of a row at once. All but `cudnn` can also attend only within the
trajectories of a packed row (`takes_segments`).
All of them scale in float32: for 16-bit queries the scores, because such a query times H**-0.5 would be rounded again.
Letters: B rows, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from psearch_jax.models.buckets import BLOCK
from psearch_jax.sharding import COMPUTE, spec

Implementation = Literal["blocked", "rowwise", "splash", "cudnn"]
ATTENDED = "attended"  # name for remat policies of what the backward pass keeps of attention (not in `cudnn`)
NEG_INF = -1e30  # a finite stand-in: the softmax of a row of only -inf would be NaN
WHOLE_CHUNK = 256  # `behind` takes this many query positions at once
KEY_BLOCK = 256  # cached positions per block
QUERY_BLOCK, MOST_BLOCKS = 64, 16  # of full rows without a kernel: minimum size and maximum number of blocks
LANES = 128  # the width of a TPU register: the kernel needs H and T to be multiples of it
CUDNN_CAPABILITY = (8, 0)  # minimum compute capability for cuDNN's kernel: Ampere (a T4 has 7.5)


@dataclass(frozen=True)
class Keys:
    """Keys and values of S positions in one layer of a cache."""

    k: jax.Array  # [B, K, S, H], or with `across` [B, K, H, S]
    v: jax.Array  # [B, K, S, H]
    across: bool = False
    k_scale: jax.Array | None = None  # in int8, one per line of H (models/int8.py): [B, K, S]
    v_scale: jax.Array | None = None


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
    return "cudnn" if all(_capability(device) >= CUDNN_CAPABILITY for device in devices) else "blocked"


def _capability(device: Any) -> tuple[int, ...]:
    """The CUDA compute capability of a device, "8.0" as (8, 0); () if it has none, like a CPU or an AMD GPU."""
    words = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def splash_block(width: int) -> int:
    """The splash kernel's block size of queries and keys for rows of `width` positions.

    Rows are padded to a multiple of it (`splash_width`), so that no width needs small blocks: 6,196 positions are
    padded to 6,656 in blocks of 512, rather than to 6,272 in blocks of 128.
    """
    return min(BLOCK, width + -width % LANES)


def splash_width(width: int) -> int:
    """The width to which the splash kernel pads rows of `width` positions."""
    return width + -width % splash_block(width)


def takes_segments(implementation: Implementation) -> bool:
    """Whether training rows may hold several trajectories each.

    JAX passes cuDNN no segments, only a length per row, and a [T, T] mask would cost what packing saves. So rows for
    cuDNN hold one trajectory each.
    """
    return implementation != "cudnn"


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
        trajectory. `cudnn` ignores it (`takes_segments`): causal attention never sees the padding after a row's only
        trajectory.

    Returns:
      [B, T, N, H].
    """
    if implementation == "splash":
        return on_each_device(_splash, q, k, v, segments)
    if implementation == "cudnn":
        return on_each_device(_cudnn, q, k, v)
    begin = None if segments is None else _begins(segments)
    if implementation == "rowwise":
        return on_each_device(_rowwise, q, k, v, begin)
    return _blocked(q, k, v, begin)


def _begins(segments: jax.Array) -> jax.Array:
    """The start of each position's segment, [B, T]: a mask from starts costs less than one from equal segments."""
    T = segments.shape[1]
    changes = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(changes, jnp.arange(T, dtype=jnp.int32), 0), axis=1)


def _rowwise(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None = None) -> jax.Array:
    return _blocked(q, k, v, begin, True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None, rowwise: bool = False) -> jax.Array:
    """`causal` by blocks of queries, each against the keys up to its own end; all rows at once, or `rowwise`.

    `begin` [B, T] is the start of each position's segment; None: each row is one segment.
    The backward pass recomputes the attention weights from the scores' log-sum-exp (arXiv 2205.14135, section 3.1).
    Storing them, or differentiating through the softmax, would read and write them several times more.
    """
    return _blocked_forward(q, k, v, begin, rowwise)[0]


def _each_row(rowwise: bool, of_rows: Callable[..., Any], *arrays: Any) -> Any:
    """`of_rows(*arrays)`; with `rowwise` one row at a time, so that its scores stay in the processor's cache."""
    if not rowwise:
        return of_rows(*arrays)

    def one(row: Any) -> Any:
        return jax.tree.map(lambda x: x[0], of_rows(*jax.tree.map(lambda x: x[None], row)))

    return jax.lax.map(one, arrays)


def _blocks(T: int) -> list[tuple[int, int]]:
    """The range [first, last) of query positions of each block."""
    size = max(QUERY_BLOCK, -(-T // MOST_BLOCKS))
    return [(first, min(first + size, T)) for first in range(0, T, size)]


def _scores(scored: Callable[..., jax.Array], k: jax.Array, begin: Any, block: tuple[int, int]) -> jax.Array:
    """Scores [B, K, G, X, S] of a block's queries from `grouped`, float32; NEG_INF where a query may not attend."""
    first, last = block
    place = jnp.arange(last)
    seen = (place <= jnp.arange(first, last)[:, None])[None]
    if begin is not None:
        seen = seen & (place >= begin[:, first:last, None])
    return jnp.where(seen[:, None, None], scored(k[:, :, :last]), NEG_INF)


def _blocked_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None, rowwise: bool
) -> tuple[jax.Array, Any]:
    out, log_sums = checkpoint_name(_each_row(rowwise, _attended, q, k, v, begin), ATTENDED)
    return out, (q, k, v, begin, out, log_sums)


def _attended(q: jax.Array, k: jax.Array, v: jax.Array, begin: jax.Array | None) -> tuple[jax.Array, Any]:
    """`causal`, and the log-sum-exp of each block's scores."""
    K, outputs, log_sums = k.shape[1], [], []
    for first, last in _blocks(q.shape[1]):
        _, scored = grouped(q[:, first:last], K)
        scores = _scores(scored, k, begin, (first, last))
        most = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - most)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        values = jnp.einsum("BKGXS,BKSH->BKGXH", weights.astype(q.dtype), v[:, :, :last])
        outputs.append(merge_heads((values / total).astype(q.dtype)))
        log_sums.append(most + jnp.log(total))
    return jnp.concatenate(outputs, axis=1), log_sums


def _blocked_backward(rowwise: bool, kept: Any, gradient: jax.Array) -> tuple:
    return *_each_row(rowwise, _pulled_back, *kept, gradient), None


def _pulled_back(q, k, v, begin, out, log_sums, gradient) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v."""
    K, H, dtype = k.shape[1], q.shape[-1], q.dtype
    wide = dtype == jnp.float32
    of_q, of_k, of_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The backward pass is traced outside `products.precision`, so the same precision is set here.
    with jax.default_matmul_precision("highest") if wide else contextlib.nullcontext():
        for (first, last), log_sum in zip(_blocks(q.shape[1]), log_sums, strict=True):
            queries, scored = grouped(q[:, first:last], K)
            of_out, own = (_stacked(x[:, first:last], K) for x in (gradient, out))
            weights = jnp.exp(_scores(scored, k, begin, (first, last)) - log_sum)
            change = product("BKGXH,BKSH->BKGXS", of_out, v[:, :, :last])
            mean = jnp.sum(of_out.astype(jnp.float32) * own.astype(jnp.float32), axis=-1, keepdims=True)
            of_scores = (weights * (change - mean)).astype(dtype)
            of_q.append(merge_heads(product("BKGXS,BKSH->BKGXH", of_scores, k[:, :, :last])))
            of_k = of_k.at[:, :, :last].add(product("BKGXS,BKGXH->BKSH", of_scores, queries))
            of_v = of_v.at[:, :, :last].add(product("BKGXS,BKGXH->BKSH", weights.astype(dtype), of_out))
    # In float32, `grouped` scales the queries, so `queries`, and with it `of_k`, is already scaled.
    of_q, of_k = jnp.concatenate(of_q, axis=1) * H**-0.5, of_k if wide else of_k * H**-0.5
    return tuple(x.astype(like.dtype) for x, like in zip((of_q, of_k, of_v), (q, k, v), strict=True))


_blocked.defvjp(_blocked_forward, _blocked_backward)


def behind(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
    """Causal attention of a chunk over itself and the cached positions before it.

    The cache is not written. It is read in blocks of `KEY_BLOCK` positions, up to the end of the longest row. One
    softmax covers these blocks and the chunk, kept as a running maximum and sums (arXiv 2205.14135).

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H] of the chunk.
      old: cached keys and values of S positions, of which the first start[b] are real.

    Returns:
      [B, T, N, H].
    """
    T = q.shape[1]
    block = functools.partial(_behind_block, k=k, v=v, old=old, start=start)
    if T <= WHOLE_CHUNK:
        return block(q, jnp.int32(0))
    blocks = -(-T // WHOLE_CHUNK)
    padded = jnp.pad(q, ((0, 0), (0, blocks * WHOLE_CHUNK - T), (0, 0), (0, 0)))
    pieces = padded.reshape(q.shape[0], blocks, WHOLE_CHUNK, *q.shape[2:]).swapaxes(0, 1)
    out = jax.lax.map(lambda x: block(*x), (pieces, WHOLE_CHUNK * jnp.arange(blocks)))
    return out.swapaxes(0, 1).reshape(padded.shape)[:, :T]


def _behind_block(q: jax.Array, first: jax.Array, *, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array):
    """`behind` for the queries [B, X, N, H] at positions `first` .. first + X - 1 of the chunk."""
    X, T = q.shape[1], k.shape[2]
    q, scored = grouped(q, k.shape[1])
    own = jnp.arange(T) <= first + jnp.arange(X)[:, None]
    scores = jnp.where(own, scored(k), NEG_INF)
    most = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _weighed(weights, v, q.dtype)

    def look(at: jax.Array, width: int) -> Keys:
        def part(x: jax.Array | None, axis: int = 2) -> jax.Array | None:
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, at, width, axis)

        return Keys(part(old.k, 3 if old.across else 2), part(old.v), old.across, part(old.k_scale), part(old.v_scale))

    out = over_cache((most, total, out), q.dtype, scored, look, start, old.v.shape[2])
    return merge_heads(out.astype(v.dtype))


def over_cache(
    sums: tuple[jax.Array, ...],
    dtype: Any,
    scored: Callable[..., jax.Array],
    look: Callable[[jax.Array, int], Keys],
    start: jax.Array,
    S: int,
) -> jax.Array:
    """Continues a softmax over the cached positions, in blocks of `KEY_BLOCK` (arXiv 2205.14135, section 3.1).

    Args:
      sums: of the keys already attended to, float32: maximum and sum of exponentials [B, K, G, X, 1], and weighted
        sum of values [B, K, G, X, H].
      dtype: of products.
      scored: the score function of the queries, from `grouped`.
      look: from the first position of a block and its width to the cached keys and values there.
      start: [B] int32, the number of real positions of each row; blocks past the longest row are not visited.
      S: positions of the cache.

    Returns:
      [B, K, G, X, H] float32.
    """
    width = min(KEY_BLOCK, S)

    def visit(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, out = sums
        at = jnp.minimum(i * width, S - width)  # the last block may overlap the one before
        place = at + jnp.arange(width)
        real = (place >= i * width) & (place < start[:, None])
        here = look(at, width)
        scores = scored(here.k, here.across, here.k_scale)
        scores = jnp.where(real[:, None, None, None], scores, NEG_INF)
        now = jnp.maximum(most, jnp.max(scores, axis=-1, keepdims=True))
        weights, kept = jnp.exp(scores - now), jnp.exp(most - now)
        total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
        return now, total, out * kept + _weighed(weights, here.v, dtype, here.v_scale)

    _, total, out = jax.lax.fori_loop(0, -(-jnp.max(start) // width), visit, sums)
    return out / total


def decode(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
    """Attention of one token over itself and the cached positions before it.

    Args:
      q: [B, 1, N, H].
      k, v: [B, K, 1, H] of the token.
      old: cached keys and values of S positions, of which the first start[b] are real.

    Returns:
      [B, 1, N, H].
    """
    S = old.v.shape[2]
    q, scored = grouped(q, k.shape[1])
    own = scored(k)
    scores = scored(old.k, old.across, old.k_scale)
    scores = jnp.where((jnp.arange(S) < start[:, None])[:, None, None, None], scores, NEG_INF)
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own)
    weights, of_own = jnp.exp(scores - most), jnp.exp(own - most)
    total = jnp.sum(weights, axis=-1, keepdims=True) + of_own
    out = (_weighed(weights, old.v, q.dtype, old.v_scale) + of_own * v[:, :, None].astype(jnp.float32)) / total
    return merge_heads(out.astype(v.dtype))


def grouped(q: jax.Array, K: int) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """Queries [B, X, N, H] as [B, K, G, X, H], and a function from keys to float32 scores [B, K, G, X, S]."""
    H = q.shape[-1]
    wide = q.dtype == jnp.float32  # then scale the queries, because they are fewer than the scores
    q = _stacked(q * H**-0.5 if wide else q, K)

    def scored(k: jax.Array, across: bool = False, scale: jax.Array | None = None) -> jax.Array:
        """k [B, K, S, H], or with `across` [B, K, H, S]; in int8 with the `scale` [B, K, S] of its lines."""
        of_keys = "BKHS" if across else "BKSH"
        scores = jnp.einsum(f"BKGXH,{of_keys}->BKGXS", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
        scores = scores if wide else scores * H**-0.5
        return scores if scale is None else scores * scale[:, :, None, None]

    return q, scored


def _stacked(x: jax.Array, K: int) -> jax.Array:
    """[B, X, N, H] as [B, K, G, X, H]."""
    B, X, N, H = x.shape
    return x.reshape(B, X, K, N // K, H).transpose(0, 2, 3, 1, 4)


def merge_heads(out: jax.Array) -> jax.Array:
    """[B, K, G, X, H] as [B, X, N, H]."""
    B, K, G, X, H = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(B, X, K * G, H)


def _weighed(weights: jax.Array, v: jax.Array, dtype: Any, scale: jax.Array | None = None) -> jax.Array:
    """Sums of values [B, K, S, H] weighted by `weights` [B, K, G, X, S]: float32, from products in `dtype`.

    Values in int8 have a `scale` [B, K, S].
    """
    weights = weights if scale is None else weights * scale[:, :, None, None]
    product = functools.partial(jnp.einsum, "BKGXS,BKSH->BKGXH", preferred_element_type=jnp.float32)
    return product(weights.astype(dtype), v.astype(dtype))


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


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's flash attention, which applies the scale to its float32 scores."""
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=q.shape[-1] ** -0.5, implementation="cudnn")


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """JAX's block-sparse flash attention for TPUs. q [B, T, N, H], k and v [B, K, T, H] -> [B, T, N, H]."""
    # Imported here: without a TPU the kernel's module is not needed and may not exist.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, N, H = q.shape[1:]
    q, k = _scaled(q.swapaxes(1, 2), k)
    width, size = splash_width(T), splash_block(T)

    def padded(x: jax.Array) -> jax.Array:  # causal: no real query attends to a padded key
        return jnp.pad(x, ((0, 0), (0, 0), (0, width - T), (0, -x.shape[-1] % LANES)))

    sizes = kernels.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((width, width))] * N)
    kernel = kernels.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
    if segments is None:
        out = jax.vmap(kernel)(padded(q), padded(k), padded(v))
    else:
        own = jnp.pad(segments, ((0, 0), (0, width - T)))
        out = jax.vmap(kernel)(padded(q), padded(k), padded(v), kernels.SegmentIds(own, own))
    return out[:, :, :T, :H].swapaxes(1, 2)


def _scaled(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys whose products are those of q and k times H**-0.5: the splash kernel itself does not scale.

    In 16 bits the scaled query would be rounded again, unless the scale is a power of two (head dim 64). So the
    rounding error `rest` is appended to the rounded query `hi` and the key is repeated: the kernel's float32 sum
    [hi, rest] . [k, k] is scaled to a precision of 2**-17. This costs a product over twice the head dim, about 2% of a
    7B step over rows of 2,000 positions.
    """
    scale = q.shape[-1] ** -0.5
    exact = q.astype(jnp.float32) * scale
    hi = exact.astype(q.dtype)
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:
        return hi, k
    rest = jax.lax.stop_gradient(exact - hi.astype(jnp.float32)).astype(q.dtype)  # the gradient is only that of `hi`
    return jnp.concatenate([hi, rest], axis=-1), jnp.concatenate([k, k], axis=-1)

"""Attention in three uses: `causal` for whole rows, `behind` for a chunk behind a cache, `decode` for one id there.

`causal` has three forms, chosen by dtype and devices (`implementation_for`): in 16 bits `splash` (a Pallas kernel, for
TPUs) and `cudnn` (for GPUs), in float32 and where there is no kernel `blocked`. None holds all scores of a row.
`blocked` and `splash` also attend within the trajectories of a packed row (`takes_segments`).
All of them scale in float32, the scores of 16-bit queries: such a query times H**-0.5 would be rounded a second time.
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
from jax.sharding import Mesh

from psearch_jax.buckets import BLOCK
from psearch_jax.sharding import COMPUTE, spec

Implementation = Literal["blocked", "splash", "cudnn"]
NEG_INF = -1e30  # a finite stand-in: a row of -inf alone would softmax to NaN
WHOLE_CHUNK = 256  # up to so many query positions, all scores exist at once
KEY_BLOCK = 256  # cached positions that a chunk looks at at once
QUERY_BLOCK, MOST_BLOCKS = 64, 16  # of whole rows without a kernel: the least block, and how many there are at most
LANES = 128  # the width of a TPU register: what the kernel wants H and T to be a multiple of
CUDNN_CAPABILITY = (8, 0)  # of a GPU, from which on cuDNN has the kernel: Ampere (a T4 has 7.5)


@dataclass(frozen=True)
class Keys:
    """What one layer of a cache holds of S positions."""

    k: jax.Array  # [B, K, S, H], or `across` [B, K, H, S]
    v: jax.Array  # [B, K, S, H]
    across: bool = False


def implementation_for(mesh: Mesh, dtype: Any) -> Implementation:
    """The form of `causal` for the devices of a mesh and a dtype of computation.

    Kernels are for 16 bits: cuDNN has none for float32, and the precision of products inside one cannot be asked for
    in its backward pass. Nor has cuDNN one for GPUs before Ampere, as a T4.
    """
    devices = list(mesh.devices.flat)
    if jnp.dtype(dtype).itemsize != 2:
        return "blocked"
    if devices[0].platform == "tpu":
        return "splash"
    return "cudnn" if all(_capability(device) >= CUDNN_CAPABILITY for device in devices) else "blocked"


def _capability(device: Any) -> tuple[int, ...]:
    """The CUDA compute capability of a device, "8.0" as (8, 0); () of what has none, as a CPU or an AMD GPU."""
    words = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else ()


def splash_block(width: int) -> int:
    """The block of queries and keys that the splash kernel takes for rows of `width` positions.

    Rows are padded to a multiple of it inside (`splash_width`), so that no width is left with small blocks: 6,196
    positions were 6,272 in blocks of 128, and are 6,656 in blocks of 512.
    """
    return min(BLOCK, width + -width % LANES)


def splash_width(width: int) -> int:
    """What the splash kernel pads rows of `width` positions to."""
    return width + -width % splash_block(width)


def takes_segments(implementation: Implementation) -> bool:
    """Whether rows may hold several trajectories each: what decides it for training.

    JAX gives cuDNN no segments, only a length per row; a mask as long as the row is wide for every query would undo
    what packing saves. Rows for cuDNN hold one trajectory each.
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
      k, v: [B, K, T, H], as the cache holds them.
      segments: [B, T] int32, equal within a trajectory, whose positions lie side by side; None: a row is one. `cudnn`
        does not look at it (`takes_segments`): to causal attention a row's padding behind its one trajectory is
        nothing.

    Returns:
      [B, T, N, H].
    """
    if implementation == "splash":
        return on_each_device(_splash, q, k, v, segments)
    if implementation == "cudnn":
        return on_each_device(_cudnn, q, k, v)
    return _blocked(q, k, v, segments)


@jax.custom_vjp
def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    """`causal` block by block of queries, each against the keys up to its own end.

    What the backward pass needs of the scores is computed anew from their log-sum-exp (arXiv 2205.14135, section 3.1):
    kept, or differentiated through the softmax, they would be read and written several times more.
    """
    return _blocked_forward(q, k, v, segments)[0]


def _blocks(T: int) -> list[tuple[int, int]]:
    """First and last of the query positions of each block."""
    size = max(QUERY_BLOCK, -(-T // MOST_BLOCKS))
    return [(first, min(first + size, T)) for first in range(0, T, size)]


def _scores(scored: Callable[..., jax.Array], k: jax.Array, segments: Any, block: tuple[int, int], G: int):
    """Scores [B, K, G * X, S] of a block's queries by `_grouped`, float32, NEG_INF where one may not look."""
    first, last = block
    seen = (jnp.arange(last) <= jnp.arange(first, last)[:, None])[None]
    if segments is not None:
        seen = seen & (segments[:, first:last, None] == segments[:, None, :last])
    return jnp.where(jnp.tile(seen, (1, G, 1))[:, None], scored(k[:, :, :last]), NEG_INF)


def _blocked_forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> tuple[jax.Array, Any]:
    K = k.shape[1]
    G, found, log_sums = q.shape[2] // K, [], []
    for first, last in _blocks(q.shape[1]):
        _, scored = _grouped(q[:, first:last], K)
        scores = _scores(scored, k, segments, (first, last), G)
        most = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - most)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        values = jnp.einsum("BKXS,BKSH->BKXH", weights.astype(q.dtype), v[:, :, :last])
        found.append(_apart((values / total).astype(q.dtype), last - first))
        log_sums.append(most + jnp.log(total))
    out = jnp.concatenate(found, axis=1)
    return out, (q, k, v, segments, out, log_sums)


def _blocked_backward(kept: Any, gradient: jax.Array) -> tuple:
    q, k, v, segments, out, log_sums = kept
    K, H, dtype = k.shape[1], q.shape[-1], q.dtype
    G, wide = q.shape[2] // K, dtype == jnp.float32
    of_q, of_k, of_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # A backward pass is traced outside of `qwen2.precision`, which asks for the same.
    with jax.default_matmul_precision("highest") if wide else contextlib.nullcontext():
        for (first, last), log_sum in zip(_blocks(q.shape[1]), log_sums, strict=True):
            mine, scored = _grouped(q[:, first:last], K)
            of_out, own = (_stacked(x[:, first:last], K) for x in (gradient, out))
            weights = jnp.exp(_scores(scored, k, segments, (first, last), G) - log_sum)
            change = product("BKXH,BKSH->BKXS", of_out, v[:, :, :last])
            mean = jnp.sum(of_out.astype(jnp.float32) * own.astype(jnp.float32), axis=-1, keepdims=True)
            of_scores = (weights * (change - mean)).astype(dtype)
            of_q.append(_apart(product("BKXS,BKSH->BKXH", of_scores, k[:, :, :last]), last - first))
            of_k = of_k.at[:, :, :last].add(product("BKXS,BKXH->BKSH", of_scores, mine))
            of_v = of_v.at[:, :, :last].add(product("BKXS,BKXH->BKSH", weights.astype(dtype), of_out))
    # `mine` is scaled already where the queries are, and not the scores.
    of_q, of_k = jnp.concatenate(of_q, axis=1) * H**-0.5, of_k if wide else of_k * H**-0.5
    return *(x.astype(like.dtype) for x, like in zip((of_q, of_k, of_v), (q, k, v), strict=True)), None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def behind(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
    """Causal attention of a chunk over itself and the cached positions before it.

    The cache is only read, in blocks of `KEY_BLOCK` positions and no further than the longest row reaches; one softmax
    runs over all of them and the chunk, kept as its running maximum and sums (arXiv 2205.14135).

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
    X, N = q.shape[1:3]
    K, T = k.shape[1:3]
    q, scored = _grouped(q, K)
    own = jnp.tile(jnp.arange(T) <= first + jnp.arange(X)[:, None], (N // K, 1))
    scores = jnp.where(own, scored(k), NEG_INF)
    most = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _weighed(weights, v)

    S = old.v.shape[2]
    width = min(KEY_BLOCK, S)

    def visit(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, out = sums
        at = jnp.minimum(i * width, S - width)  # the last block may overlap the one before
        k = jax.lax.dynamic_slice_in_dim(old.k, at, width, 3 if old.across else 2)
        place = at + jnp.arange(width)
        real = (place >= i * width) & (place < start[:, None])
        scores = jnp.where(real[:, None, None], scored(k, old.across), NEG_INF)
        now = jnp.maximum(most, jnp.max(scores, axis=-1, keepdims=True))
        weights, kept = jnp.exp(scores - now), jnp.exp(most - now)
        total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
        return now, total, out * kept + _weighed(weights, jax.lax.dynamic_slice_in_dim(old.v, at, width, 2))

    _, total, out = jax.lax.fori_loop(0, -(-jnp.max(start) // width), visit, (most, total, out))
    return _apart((out / total).astype(v.dtype), X)


def decode(q: jax.Array, k: jax.Array, v: jax.Array, old: Keys, start: jax.Array) -> jax.Array:
    """Attention of one id over itself and the cached positions before it.

    Args:
      q: [B, 1, N, H].
      k, v: [B, K, 1, H] of the id.
      old: cached keys and values of S positions, of which the first start[b] are real.

    Returns:
      [B, 1, N, H].
    """
    H, S = q.shape[3], old.v.shape[2]
    q, scored = _grouped(q, k.shape[1])  # [B, K, G, H]
    own = scored(k)
    if old.across:
        # On a CPU sums like these, in which XLA reads the cache where it lies, beat its batched products of a matrix
        # with so few rows, for which a slice of the cache is copied first.
        wide = q.astype(jnp.float32) * (1.0 if q.dtype == jnp.float32 else H**-0.5)
        scores = jnp.sum(wide[..., None] * old.k[:, :, None].astype(jnp.float32), axis=3)
    else:
        scores = scored(old.k)
    scores = jnp.where((jnp.arange(S) < start[:, None])[:, None, None], scores, NEG_INF)
    most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own)
    weights, of_own = jnp.exp(scores - most), jnp.exp(own - most)
    if old.across:
        out = jnp.sum(weights[..., None] * old.v[:, :, None].astype(jnp.float32), axis=3)
    else:
        out = _weighed(weights, old.v, q.dtype)
    total = jnp.sum(weights, axis=-1, keepdims=True) + of_own
    out = (out + of_own * v.astype(jnp.float32)) / total
    return _apart(out.astype(v.dtype), 1)


def _grouped(q: jax.Array, K: int) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """Queries [B, X, N, H] as [B, K, G * X, H], and the function from keys to their float32 scores [B, K, G * X, S].

    The G heads of a kv head are stacked along the query positions, which makes every product a plain batched one.
    """
    H = q.shape[-1]
    wide = q.dtype == jnp.float32  # then the queries are scaled, of which there are fewer than scores
    q = _stacked(q * H**-0.5 if wide else q, K)

    def scored(k: jax.Array, across: bool = False) -> jax.Array:
        """k [B, K, S, H], or [B, K, H, S] where it lies `across`."""
        of_keys = "BKHS" if across else "BKSH"
        scores = jnp.einsum(f"BKXH,{of_keys}->BKXS", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
        return scores if wide else scores * H**-0.5

    return q, scored


def _stacked(x: jax.Array, K: int) -> jax.Array:
    """[B, X, N, H] as [B, K, G * X, H]: the G heads of a kv head along the query positions."""
    B, X, N, H = x.shape
    return x.reshape(B, X, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)


def _apart(out: jax.Array, X: int) -> jax.Array:
    """The inverse of `_stacked`."""
    B, K, GX, H = out.shape
    return out.reshape(B, K, GX // X, X, H).transpose(0, 3, 1, 2, 4).reshape(B, X, -1, H)


def _weighed(weights: jax.Array, v: jax.Array, dtype: Any = None) -> jax.Array:
    """Sums of values [B, K, S, H] by weights [B, K, X, S], float32; the product is one of `dtype`, or the values'."""
    dtype = dtype or v.dtype
    return jnp.einsum("BKXS,BKSH->BKXH", weights.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32)


def on_each_device(
    kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """`kernel(q, k, v)` on each device of the mesh for its own rows and heads; no partitioner looks inside.

    Args:
      q: [B, T, N, H].
      k, v: [B, K, T, H].
      segments: None, or [B, T], which the kernel then takes too.

    Returns:
      [B, T, N, H].
    """
    mesh, more = jax.sharding.get_abstract_mesh(), () if segments is None else (segments,)
    if mesh.empty or mesh.size == 1:
        return kernel(q, k, v, *more)
    # Where a device's share of the query heads begins inside the group of a kv head, that one is there for each share.
    copies = math.lcm(k.shape[1], mesh.shape["tensor"]) // k.shape[1]
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=1) for x in (k, v))
    place = spec(("rows", None, "heads", None), COMPUTE, mesh, q.shape)
    kv_place = spec(("rows", "kv_heads", None, None), COMPUTE, mesh, k.shape)
    places = (place, kv_place, kv_place, *(spec(("rows", None), COMPUTE, mesh, x.shape) for x in more))
    return jax.shard_map(kernel, in_specs=places, out_specs=place, check_vma=False)(q, k, v, *more)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's flash attention, which takes the scale and applies it to its float32 scores."""
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=q.shape[-1] ** -0.5, implementation="cudnn")


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """JAX's block-sparse flash attention for TPUs. q [B, T, N, H], k and v [B, K, T, H] -> [B, T, N, H]."""
    # Imported here: the kernel's module is of no use, and not always there, without a TPU.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, N, H = q.shape[1:]
    q, k = _scaled(q.swapaxes(1, 2), k)
    width, size = splash_width(T), splash_block(T)

    def padded(x: jax.Array) -> jax.Array:  # causal: no real query sees a padded key
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
    kernel = kernels.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
    if segments is None:
        out = jax.vmap(kernel)(padded(q), padded(k), padded(v))
    else:
        own = jnp.pad(segments, ((0, 0), (0, width - T)))
        out = jax.vmap(kernel)(padded(q), padded(k), padded(v), kernels.SegmentIds(own, own))
    return out[:, :, :T, :H].swapaxes(1, 2)


def _scaled(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys whose products are those of q and k times H**-0.5: the splash kernel itself scales nothing.

    In 16 bits the scaled query would be rounded again, unless the scale is a power of two (head dim 64). What rounding
    takes off it then stands beside it, against the same key once more, [hi, rest] . [k, k], and the kernel's float32
    sum of both is scaled to 2**-17. A product over twice the head dim is what that costs: of a 7B step over rows of
    2,000 positions some 2%.
    """
    scale = q.shape[-1] ** -0.5
    exact = q.astype(jnp.float32) * scale
    hi = exact.astype(q.dtype)
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:
        return hi, k
    rest = jax.lax.stop_gradient(exact - hi.astype(jnp.float32)).astype(q.dtype)  # the gradient is that of `hi`
    return jnp.concatenate([hi, rest], axis=-1), jnp.concatenate([k, k], axis=-1)

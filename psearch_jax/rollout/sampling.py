"""From logits to a token and its log-probability, and the random keys that make every rollout reproducible."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from psearch_jax.models.attention.scores import NEG_INF
from psearch_jax.sharding import COMPUTE, spec

_BLOCK = 256
_FOLDED = 256  # keys computed per call: one shape, compiled once


def choose(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws one token per row by inverting the cumulative distribution in two levels.

    A single float32 cumulative sum over 150,000 tokens misses 1 by more than the smallest probabilities, so a draw
    near 1 could select a masked token. So first a block of 256 is chosen, then a token inside the block. A draw that
    rounding pushes past the end selects the last token with nonzero probability.

    Where the vocabulary is split over `tensor`, each device makes blocks of its own columns, and only the sums of the
    blocks and the chosen block are communicated: the partitioner would gather the logits.

    Args:
      logits: [B, V] float32, masked tokens at -1e30.
      uniform: [B] float32 in [0, 1).

    Returns:
      [B] int32.
    """
    return _by_columns(_choose, logits, uniform)


def _choose(logits: jax.Array, uniform: jax.Array, split: str | None) -> jax.Array:
    B, V = logits.shape
    block = next((size for size in (_BLOCK, _BLOCK // 2) if V % size == 0), _BLOCK)  # to pad nothing where possible
    blocks = -(-V // block)
    p = jnp.exp(logits - _over_all(jnp.max(logits, axis=-1, keepdims=True), split, jax.lax.pmax))
    p = jnp.pad(p, ((0, 0), (0, blocks * block - V))).reshape(B, blocks, block)
    mass = jnp.sum(p, axis=-1)
    if split:
        mass = jax.lax.all_gather(mass, split, axis=1, tiled=True)  # of every device's blocks, in order
    target = uniform * jnp.sum(mass, axis=-1)
    chosen, before = _invert(mass, target)
    local = chosen - _index(split) * blocks
    inside = jnp.take_along_axis(p, jnp.clip(local, 0, blocks - 1)[:, None, None], axis=1)[:, 0]
    inside = _over_all(jnp.where(((local >= 0) & (local < blocks))[:, None], inside, 0.0), split)
    offset, _ = _invert(inside, target - before)
    return (chosen // blocks * V + chosen % blocks * block + offset).astype(jnp.int32)


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """The log-probability of one token per row, [B], without computing those of the other tokens.

    Args:
      logits: [B, V] float32.
      token: [B] int32.
    """
    return _by_columns(_log_probability, logits, token)


def _log_probability(logits: jax.Array, token: jax.Array, split: str | None) -> jax.Array:
    V = logits.shape[1]
    maximum = _over_all(jnp.max(logits, axis=-1), split, jax.lax.pmax)
    total = _over_all(jnp.sum(jnp.exp(logits - maximum[:, None]), axis=-1), split)
    local = token - _index(split) * V
    chosen = jnp.take_along_axis(logits, jnp.clip(local, 0, V - 1)[:, None], axis=1)[:, 0]
    return _over_all(jnp.where((local >= 0) & (local < V), chosen, 0.0), split) - maximum - jnp.log(total)


def _by_columns(f: Callable[..., jax.Array], logits: jax.Array, per_row: jax.Array) -> jax.Array:
    """f(logits [B, V], per_row [B], split): on each device with its own columns, if the vocabulary is split."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, split = (None, None) if mesh.empty else spec(("rows", "vocab"), COMPUTE, mesh, logits.shape)
    if split is None or mesh.shape[split] == 1:
        return f(logits, per_row, None)
    return jax.shard_map(
        functools.partial(f, split=split),
        in_specs=(PartitionSpec(rows, split), PartitionSpec(rows)),
        out_specs=PartitionSpec(rows),
        check_vma=False,
    )(logits, per_row)


def _over_all(x: jax.Array, split: str | None, reduce: Callable = jax.lax.psum) -> jax.Array:
    return reduce(x, split) if split else x


def _index(split: str | None) -> jax.Array | int:
    return jax.lax.axis_index(split) if split else 0


def _invert(mass: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the entry of `mass` [B, n] whose cumulative interval contains `target` [B], and the sum before it."""
    cumulative = jnp.cumsum(mass, axis=-1)
    n = mass.shape[-1]
    last = n - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=-1)
    index = jnp.minimum(jnp.sum(cumulative <= target[:, None], axis=-1), last)
    # Rounding of the cumulative sums can select an entry without mass: move on to the next one with mass.
    full = (mass > 0) & (jnp.arange(n) >= index[:, None])
    index = jnp.argmax(full, axis=-1)
    before = jnp.where(
        index > 0, jnp.take_along_axis(cumulative, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0], 0
    )
    return index, before


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Keeps the `top_k` likeliest tokens (0: all), and of them the smallest set whose mass reaches `top_p`. [B, V]."""
    if top_k > 0:
        threshold = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= threshold, logits, NEG_INF)
    if top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        p = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(p, axis=-1) - p < top_p  # always keeps the likeliest token
        threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= threshold, logits, NEG_INF)
    return logits


def id_words(source: str, question_id: str) -> np.ndarray:
    """The 32-bit words of SHA-256(source, id), [8] uint32: the question's part of a rollout's key."""
    digest = hashlib.sha256(f"{source}\x00{question_id}".encode()).digest()
    return np.frombuffer(digest, dtype=">u4").astype(np.uint32)


def row_keys(seed: int, step: int, words: Sequence[np.ndarray], samples: Sequence[int]) -> np.ndarray:
    """Key data of rollouts, [n, 2] uint32: a fold of seed, step, the question's words and the sample index.

    Nothing else enters, so a rollout draws the same numbers in any slot and in any batch.
    """
    n = len(words)
    w, s = np.zeros((-(-n // _FOLDED), _FOLDED, 8), np.uint32), np.zeros((-(-n // _FOLDED), _FOLDED), np.uint32)
    w.reshape(-1, 8)[:n], s.reshape(-1)[:n] = np.stack(words), np.asarray(samples, np.uint32)
    parts = [np.asarray(_fold(np.uint32(seed), np.uint32(step), *part)) for part in zip(w, s, strict=True)]
    return np.concatenate(parts)[:n]


@functools.partial(jax.jit)
def _fold(seed: jax.Array, step: jax.Array, words: jax.Array, samples: jax.Array) -> jax.Array:
    base = jax.random.fold_in(jax.random.key(seed), step)

    def one(w: jax.Array, sample: jax.Array) -> jax.Array:
        key = base
        for i in range(8):
            key = jax.random.fold_in(key, w[i])
        return jax.random.key_data(jax.random.fold_in(key, sample))

    return jax.vmap(one)(words, samples)


def uniforms(keys: jax.Array, position: jax.Array) -> jax.Array:
    """One uniform per row from its key [B] and the absolute position [B] of the token to draw. [B] float32."""
    return jax.vmap(lambda key, at: jax.random.uniform(jax.random.fold_in(key, at)))(keys, position)

"""From logits to a token and its log-probability, and the keys that make every rollout replayable."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from psearch_jax.models.decoder import NEG_INF

_BLOCK = 256
_FOLDED = 256  # keys made together: one shape, compiled once


def choose(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws one id per row by inverting the cumulative distribution in two levels.

    A single cumulative sum over 150,000 ids in float32 ends off 1 by more than the smallest probabilities, so the
    tail could fall on a masked id. Here blocks of 256 are chosen first, then an id inside the block, and what
    rounding pushes past the end goes to the last id that has mass.

    Args:
      logits: [B, V] float32, masked ids at -1e30.
      uniform: [B] float32 in [0, 1).

    Returns:
      [B] int32.
    """
    B, V = logits.shape
    blocks = -(-V // _BLOCK)
    p = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    p = jnp.pad(p, ((0, 0), (0, blocks * _BLOCK - V))).reshape(B, blocks, _BLOCK)
    mass = jnp.sum(p, axis=-1)
    block, before = _invert(mass, uniform * jnp.sum(mass, axis=-1))
    inside = jnp.take_along_axis(p, block[:, None, None], axis=1)[:, 0]
    offset, _ = _invert(inside, uniform * jnp.sum(mass, axis=-1) - before)
    return (block * _BLOCK + offset).astype(jnp.int32)


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """The log-probability of one id per row, [B]; those of the others are not computed.

    Args:
      logits: [B, V] float32.
      token: [B] int32.
    """
    most = jnp.max(logits, axis=-1)
    total = jnp.sum(jnp.exp(logits - most[:, None]), axis=-1)
    return jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - most - jnp.log(total)


def _invert(mass: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the entry of `mass` [B, n] whose cumulative interval holds `target` [B], and the sum before it."""
    cumulative = jnp.cumsum(mass, axis=-1)
    n = mass.shape[-1]
    last = n - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=-1)
    index = jnp.minimum(jnp.sum(cumulative <= target[:, None], axis=-1), last)
    # Rounding of the running sums can leave an empty entry in front; step to the next one that has mass.
    full = (mass > 0) & (jnp.arange(n) >= index[:, None])
    index = jnp.argmax(full, axis=-1)
    before = jnp.where(
        index > 0, jnp.take_along_axis(cumulative, jnp.maximum(index - 1, 0)[:, None], axis=-1)[:, 0], 0
    )
    return index, before


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Masks all but the `top_k` likeliest ids (0: all) and the smallest set whose mass reaches `top_p`. [B, V]."""
    if top_k > 0:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, NEG_INF)
    if top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        p = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(p, axis=-1) - p < top_p  # always keeps the likeliest
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, NEG_INF)
    return logits


def id_words(source: str, question_id: str) -> np.ndarray:
    """The 32-bit words of SHA-256(source, id), [8] uint32: a question's own part of its key."""
    digest = hashlib.sha256(f"{source}\x00{question_id}".encode()).digest()
    return np.frombuffer(digest, dtype=">u4").astype(np.uint32)


def row_keys(seed: int, step: int, words: Sequence[np.ndarray], samples: Sequence[int]) -> np.ndarray:
    """Key data of rollouts, [n, 2] uint32: a fold of seed, step, the question's words and the sample's index.

    Nothing of the batch enters, so a rollout draws the same numbers wherever and with whomever it runs.
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
    """One uniform per row from its key data [B, 2] and the absolute position [B] of the id to draw. [B] float32."""

    def one(key: jax.Array, at: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), at))

    return jax.vmap(one)(keys, position)

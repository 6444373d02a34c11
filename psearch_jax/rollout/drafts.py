"""Drafts of the next tokens, copied from the row itself, for `rollout.draft_tokens`.

Search agents copy: a query repeats the question, an answer repeats a passage, and every turn repeats the tags. So what
followed the row's last tokens earlier in the row is likely to follow them again (prompt lookup; arXiv 2304.04487).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LONGEST = 3  # tokens of context that a match may have


def copied(ids: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """The tokens that followed the latest earlier occurrence of each row's last tokens.

    An occurrence of the last `LONGEST` tokens is preferred to one of fewer, down to one. If it lies less than n tokens
    back, the draft repeats the tokens between it and the end.

    Args:
      ids: [B, S] int32.
      length: [B] int32, known tokens of each row, at least 1.

    Returns:
      [B, n] int32, -1 for a row whose last token did not occur before.
    """
    B, S = ids.shape
    place, last = jnp.arange(S), length - 1
    same = jnp.ones((B, S), bool)
    matched = jnp.zeros((B, S), jnp.int32)  # tokens of context that end at each position
    for back in range(LONGEST):
        wanted = jnp.take_along_axis(ids, jnp.maximum(last - back, 0)[:, None], axis=1)
        shifted = jnp.pad(ids, ((0, 0), (back, 0)), constant_values=-1)[:, :S]
        same &= (shifted == wanted) & (last >= back)[:, None]
        matched += same
    score = jnp.where((matched > 0) & (place < last[:, None]), matched * S + place, -1)
    best = jnp.argmax(score, axis=1)
    period = jnp.maximum(last - best, 1)
    source = best[:, None] + 1 + jnp.arange(n) % period[:, None]
    draft = jnp.take_along_axis(ids, jnp.minimum(source, S - 1), axis=1)
    return jnp.where(jnp.max(score, axis=1, keepdims=True) >= 0, draft, -1)

"""The policy loss of GRPO as sums and counts; the caller divides once, after micro-batches and devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from psearch_jax.config import LearningSection
from psearch_jax.metrics import Ratio

METRICS = ("loss", "kl", "entropy", "clip_fraction", "ratio", "logp_gap")
MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32; a diverged ratio must not turn the update into NaN


def k3(logp: jax.Array, ref: jax.Array) -> jax.Array:
    """The k3 estimator of KL(policy || reference) per token: exp(d) - d - 1 with d = ref - logp (joschu.net/blog)."""
    d = jnp.clip(ref - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(d) - d - 1.0


def policy_loss(
    logp: jax.Array,
    entropy: jax.Array,
    old: jax.Array,
    ref: jax.Array,
    sampler: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    length: jax.Array,
    learning: LearningSection,
    context_tokens: int,
) -> tuple[Ratio, dict[str, Ratio]]:
    """Clipped surrogate plus KL to the reference (GRPO, arXiv 2402.03300 eq. 3; asymmetric clip of arXiv 2503.14476).

    Arrays but `length` are [B, S] float32 and speak about the id at the same position; where `mask` is 0 nothing
    counts. `length` is [B] int32, the real ids of a row; 0 is a row that only fills the batch.

    Returns:
      The loss to minimise, and metrics. `token_mean` counts tokens; `sequence_mean` the rows with tokens that count;
      `constant_length` all rows x context_tokens (arXiv 2503.20783), masked ones too: a divisor that falls with the
      rows left out would raise the weight of the others.
    """
    log_ratio = jnp.clip(jnp.where(mask > 0, logp - old, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - learning.clip_low, 1.0 + learning.clip_high)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    if learning.importance_cap > 0:  # corrects for what the sampler drew from (truncated importance sampling)
        gap = jnp.clip(jnp.where(mask > 0, old - sampler, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        surrogate = surrogate * jax.lax.stop_gradient(jnp.minimum(jnp.exp(gap), learning.importance_cap))
    kl = jnp.where(mask > 0, k3(logp, ref), 0.0)
    per_token = (-surrogate + learning.kl_coefficient * kl) * mask
    tokens = jnp.sum(mask)
    if learning.aggregation == "token_mean":
        loss = Ratio(jnp.sum(per_token), tokens)
    else:
        counted = jnp.sum(mask, axis=1)
        if learning.aggregation == "sequence_mean":
            rows = jnp.sum(counted > 0).astype(jnp.float32)
            loss = Ratio(jnp.sum(jnp.sum(per_token, axis=1) / jnp.maximum(counted, 1.0)), rows)
        else:
            loss = Ratio(jnp.sum(per_token), jnp.sum(length > 0).astype(jnp.float32) * context_tokens)
    cut = (ratio * advantage > clipped * advantage) & (mask > 0)
    gap = jnp.abs(jnp.where(mask > 0, old - sampler, 0.0))
    metrics = {
        "loss": loss,
        "kl": Ratio(jnp.sum(kl), tokens),
        "entropy": Ratio(jnp.sum(entropy * mask), tokens),
        "clip_fraction": Ratio(jnp.sum(cut), tokens),
        "ratio": Ratio(jnp.sum(ratio * mask), tokens),
        "logp_gap": Ratio(jnp.sum(gap), tokens),
    }
    return loss, metrics

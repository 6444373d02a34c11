"""The losses of policy and critic as sums and counts. The caller sums over micro-batches and devices, then divides.

All arrays are [B, W] float32 and refer to the token at the same position; positions with mask 0 count nothing.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from psearch_jax.config import LearningSection
from psearch_jax.runtime.metrics import Ratio
from psearch_jax.types import MicroBatch, TrainBatch

METRICS = ("loss", "kl", "entropy", "clip_fraction", "ratio", "logp_gap", "importance", "importance_squared")
VALUE_METRICS = ("loss", "value", "clip_fraction")
VALUE_CLIP = 0.5  # a value that moves further than this in one step does not lower the loss
MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32, so a diverged ratio does not make the update NaN
NO_KL = np.inf  # as the reference's log-prob of a token, which a log-prob cannot be: the token has no KL term
MAX_KL = 10.0  # of a token, as in verl: one token that the policy has nearly unlearned does not dominate the loss


def k3(logp: jax.Array, ref: jax.Array) -> jax.Array:
    """The k3 estimator of KL(policy || reference) per token: exp(d) - d - 1 with d = ref - logp (joschu.net/blog).

    It is at most MAX_KL, and has no gradient there.
    """
    d = jnp.clip(ref - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.minimum(jnp.exp(d) - d - 1.0, MAX_KL)


def policy_ratio(logp: jax.Array, old: jax.Array, batch: MicroBatch, learning: LearningSection) -> jax.Array:
    """The ratio of policy to old policy; with `ratio=sequence` exp of a trajectory's mean log-ratio (GSPO).

    GSPO is arXiv 2507.18071 eq. 5, with `aggregation=sequence_mean`.
    """
    sampled = batch.mask > 0
    log_ratio = jnp.where(sampled, logp - old, 0.0)
    if learning.ratio == "sequence":
        tokens = _sum_by_trajectory(batch.mask, batch.segments)
        mean = _sum_by_trajectory(log_ratio, batch.segments) / jnp.maximum(tokens, 1.0)
        log_ratio = jnp.where(sampled, mean, 0.0)
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sampler_gap(logp: jax.Array, old: jax.Array, batch: MicroBatch, learning: LearningSection) -> jax.Array:
    """log p_old - log p_sampler. With `old_logprobs=sampler` the current policy is in the place of the old one.

    The sampler's policy differs from the old policy: slightly by its arithmetic, and by the age of its weights.
    """
    current = jax.lax.stop_gradient(logp if learning.old_logprobs == "sampler" else old)
    return jnp.where(batch.mask > 0, current - batch.sampler_logprobs, 0.0)


def aggregate(per_token: jax.Array, batch: MicroBatch, aggregation: str, context_tokens: int) -> Ratio:
    """The mean of a loss per token. The packing of trajectories into rows does not affect it.

    Args:
      per_token: 0 where the mask is 0.
      aggregation: `token_mean`: over the tokens of the mask; `sequence_mean`: over trajectories with such tokens, of
        each one's mean; `constant_length`: the sum over all trajectories x `context_tokens` (arXiv 2503.20783), also
        fully masked ones, because a smaller divisor would raise the weight of the others.
    """
    if aggregation == "token_mean":
        return Ratio(jnp.sum(per_token), jnp.sum(batch.mask))
    if aggregation == "sequence_mean":
        trajectories = jnp.sum(_segment_sums(batch.mask, batch.segments) > 0).astype(jnp.float32)
        tokens = _sum_by_trajectory(batch.mask, batch.segments)
        return Ratio(jnp.sum(per_token / jnp.maximum(tokens, 1.0)), trajectories)
    trajectories = jnp.sum(jnp.max(batch.segments, axis=1)).astype(jnp.float32)
    return Ratio(jnp.sum(per_token), trajectories * context_tokens)


def count_rows(batch: TrainBatch, aggregation: str, context_tokens: int) -> float:
    """What rows that are not packed would add to the count of `aggregate`."""
    if aggregation == "token_mean":
        return batch.mask.sum()
    if aggregation == "sequence_mean":
        return np.count_nonzero(batch.mask.any(axis=1))
    return np.count_nonzero(batch.length) * context_tokens


def policy_loss(
    logp: jax.Array,
    entropy: jax.Array,
    old: jax.Array,
    batch: MicroBatch,
    learning: LearningSection,
    context_tokens: int,
) -> tuple[Ratio, dict[str, Ratio]]:
    """Clipped surrogate plus KL to the reference minus entropy (GRPO, arXiv 2402.03300 eq. 3; arXiv 1707.06347 eq. 9).

    The clip is asymmetric, as in DAPO (arXiv 2503.14476). `importance_cap` weights tokens by the truncated ratio of
    old policy to sampler; where the sampler's weights are older, that is the decoupled objective (arXiv 2110.00641,
    2505.24298). With `kl_in=reward` the KL is in the advantages and not here.

    Args:
      logp, entropy: of the policy.
      old: log-probs of the old policy. It may be `stop_gradient(logp)`; the ratio is then 1 everywhere.
      batch: its `ref_logprobs` only matter where `kl_coefficient` is above 0 and in the metric `kl`, the mean over the
        tokens that have a KL term.

    Returns:
      The loss to minimise, and metrics (METRICS). `logp_gap` is the mean of |sampler_gap|; `importance` and
      `importance_squared` are the means over tokens of the importance weight, not truncated, and of its square.
    """
    advantage, mask = batch.advantage, batch.mask
    sampled = mask > 0
    ratio = policy_ratio(logp, old, batch, learning)
    clipped = jnp.clip(ratio, 1.0 - learning.clip_low, 1.0 + learning.clip_high)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    gap = sampler_gap(logp, old, batch, learning)
    importance = jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if learning.importance_cap > 0:
        surrogate = surrogate * jnp.minimum(importance, learning.importance_cap)
    has_kl = sampled & (batch.ref_logprobs != NO_KL)
    kl = jnp.where(has_kl, k3(logp, batch.ref_logprobs), 0.0)
    kl_coefficient = learning.kl_coefficient if learning.kl_in == "loss" else 0.0
    per_token = (-surrogate + kl_coefficient * kl - learning.entropy_coefficient * entropy) * mask
    loss = aggregate(per_token, batch, learning.aggregation, context_tokens)
    means = {
        "entropy": entropy * mask,
        "clip_fraction": (ratio * advantage > clipped * advantage) & sampled,
        "ratio": ratio * mask,
        "logp_gap": jnp.abs(gap),
        "importance": importance * mask,
        "importance_squared": importance**2 * mask,
    }
    tokens = jnp.sum(mask)
    metrics = {"loss": loss, "kl": Ratio(jnp.sum(kl), jnp.sum(mask * has_kl))}
    return loss, metrics | {name: Ratio(jnp.sum(values), tokens) for name, values in means.items()}


def value_loss(values: jax.Array, batch: MicroBatch) -> tuple[Ratio, dict[str, Ratio]]:
    """The mean of 0.5 * max((values - returns)^2, (clipped - returns)^2), clipped = clip(values, old +- VALUE_CLIP).

    This is as in PPO's reference code. All sampled tokens weigh the same.

    Args:
      batch: `values` are the old ones, `returns` the targets.
    """
    near = jnp.clip(values, batch.values - VALUE_CLIP, batch.values + VALUE_CLIP)
    plain, clipped = (values - batch.returns) ** 2, (near - batch.returns) ** 2
    tokens = jnp.sum(batch.mask)
    loss = Ratio(0.5 * jnp.sum(jnp.maximum(plain, clipped) * batch.mask), tokens)
    cut = jnp.sum((clipped > plain) * batch.mask)
    value = jnp.sum(values * batch.mask)
    return loss, {"loss": loss, "value": Ratio(value, tokens), "clip_fraction": Ratio(cut, tokens)}


def _segment_sums(x: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, W + 1], sums of x [B, W] over each segment of a row; column 0 sums over segment 0 (padding)."""
    return jax.vmap(partial(jax.ops.segment_sum, num_segments=x.shape[1] + 1))(x, segments)


def _sum_by_trajectory(x: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, W], at every token the sum of x over its trajectory."""
    return jnp.take_along_axis(_segment_sums(x, segments), segments, axis=1)

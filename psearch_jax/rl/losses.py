"""The losses of policy and critic as sums and counts. The caller sums over micro-batches and devices, then divides."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from psearch_jax.config import LearningSection
from psearch_jax.runtime.metrics import Ratio

METRICS = ("loss", "kl", "entropy", "clip_fraction", "ratio", "logp_gap", "displaced")
METRICS += ("importance", "importance_squared", "rejected")
VALUE_METRICS = ("loss", "value", "clip_fraction")
ROUNDING = 1e-3  # nats; a smaller loss of log-prob may only be rounding between two programs
MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32, so a diverged ratio does not make the update NaN


def k3(logp: jax.Array, ref: jax.Array, clamp: float = 0.0) -> jax.Array:
    """The k3 estimator of KL(policy || reference) per token: exp(d) - d - 1 with d = ref - logp (joschu.net/blog).

    `clamp` is its maximum (0: none), so that one token that the policy has nearly unlearned does not dominate the
    loss: its gradient would be exp(d) - 1, but is 0 above the maximum.
    """
    d = jnp.clip(ref - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    estimate = jnp.exp(d) - d - 1.0
    return jnp.minimum(estimate, clamp) if clamp else estimate


def policy_loss(
    logp: jax.Array,
    entropy: jax.Array,
    old: jax.Array,
    ref: jax.Array,
    sampler: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    segments: jax.Array,
    learning: LearningSection,
    context_tokens: int,
) -> tuple[Ratio, dict[str, Ratio]]:
    """Clipped surrogate plus KL to the reference (GRPO, arXiv 2402.03300 eq. 3; asymmetric clip of arXiv 2503.14476).

    With `ratio=sequence` every token has its trajectory's ratio, exp of the mean log-ratio; with `sequence_mean` that
    is GSPO (arXiv 2507.18071 eq. 5). `dual_clip` bounds the surrogate from below by
    `dual_clip * min(advantage, 0)` (arXiv 1912.09729 eq. 5). `importance_cap` weights tokens by the truncated ratio of
    old policy to sampler; where the sampler's weights are older, that is the decoupled objective (arXiv 2110.00641,
    2505.24298). `reject_ratio` leaves out rollouts whose geometric mean of
    p_old / p_sampler is above it or below its inverse. With `kl_in=reward` the KL
    is in the advantages and not here. `entropy_coefficient` times the entropy is subtracted (arXiv 1707.06347 eq. 9).
    `guard` is the weight of a penalty on good actions that lost likelihood (LLDS, arXiv 2512.04220). An action is the
    tokens of one turn. If its advantage is not negative and its total log-prob fell by more than ROUNDING, each of its
    tokens whose log-prob fell adds that fall to the loss.

    Arrays are [B, S] float32 and refer to the token at the same position; where `mask` is 0 nothing counts. `segments`
    is [B, S] int32: the index of the token's trajectory in its row, from 1 without gaps; 0 for padding. `old` may be
    `stop_gradient(logp)`; the ratio is then 1 everywhere.

    Returns:
      The loss to minimise, and metrics. `token_mean` divides by the number of masked-in tokens; `sequence_mean` by the
      number of trajectories with such tokens; `constant_length` by all trajectories x context_tokens (arXiv
      2503.20783), including fully masked ones, because a smaller divisor would raise the weight of the others. The
      packing of trajectories into rows does not affect the loss.
      `displaced` is the share of good actions' tokens whose action lost more than ROUNDING of total log-prob.
      `logp_gap` is the mean of |old - sampler|, or of |logp - sampler| with `old_logprobs=sampler`; `importance` and
      `importance_squared` are the means over tokens of the importance weight, not truncated, and of its square.
      `rejected` is the share of tokens in rejected rollouts. These still count where the loss divides.
    """
    counts = mask > 0
    change = log_ratio = jnp.where(counts, logp - old, 0.0)
    if learning.ratio == "sequence":
        log_ratio = jnp.where(counts, _of_own(log_ratio, segments) / jnp.maximum(_of_own(mask, segments), 1.0), 0.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1.0 - learning.clip_low, 1.0 + learning.clip_high)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    if learning.dual_clip > 0:
        surrogate = jnp.maximum(surrogate, learning.dual_clip * jnp.minimum(advantage, 0.0))
    # The sampler's policy differs from the old policy: slightly by its arithmetic, and by the age of its weights.
    current = jax.lax.stop_gradient(logp if learning.old_logprobs == "sampler" else old)
    gap = jnp.clip(jnp.where(counts, current - sampler, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_weight = _of_own(gap, segments) if learning.importance_level == "sequence" else gap
    importance = jnp.exp(jnp.clip(log_weight, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if learning.importance_cap > 0:  # truncated importance sampling
        surrogate = surrogate * jnp.minimum(importance, learning.importance_cap)
    kl = jnp.where(counts, k3(logp, ref, learning.kl_clamp), 0.0)
    kl_coefficient = learning.kl_coefficient if learning.kl_in == "loss" else 0.0
    per_token = (-surrogate + kl_coefficient * kl - learning.entropy_coefficient * entropy) * mask
    good = counts & (advantage >= 0)
    displaced = good & (_of_own(change, _actions(counts)) < -ROUNDING)
    if learning.guard > 0:
        per_token += learning.guard * jnp.where(displaced, jnp.maximum(-change, 0.0), 0.0)
    rejected = jnp.zeros_like(counts)
    if learning.reject_ratio > 0:
        mean_gap = _of_own(gap, segments) / jnp.maximum(_of_own(mask, segments), 1.0)
        rejected = counts & (jnp.abs(mean_gap) > jnp.log(learning.reject_ratio))
        per_token = jnp.where(rejected, 0.0, per_token)
    tokens = jnp.sum(mask)
    if learning.aggregation == "token_mean":
        loss = Ratio(jnp.sum(per_token), tokens)
    elif learning.aggregation == "sequence_mean":
        trajectories = jnp.sum(_by_trajectory(mask, segments) > 0).astype(jnp.float32)
        loss = Ratio(jnp.sum(per_token / jnp.maximum(_of_own(mask, segments), 1.0)), trajectories)
    else:
        trajectories = jnp.sum(jnp.max(segments, axis=1)).astype(jnp.float32)
        loss = Ratio(jnp.sum(per_token), trajectories * context_tokens)
    cut = (ratio * advantage > clipped * advantage) & counts
    distance = jnp.abs(jnp.where(counts, current - sampler, 0.0))
    metrics = {
        "loss": loss,
        "kl": Ratio(jnp.sum(kl), tokens),
        "entropy": Ratio(jnp.sum(entropy * mask), tokens),
        "clip_fraction": Ratio(jnp.sum(cut), tokens),
        "ratio": Ratio(jnp.sum(ratio * mask), tokens),
        "logp_gap": Ratio(jnp.sum(distance), tokens),
        "displaced": Ratio(jnp.sum(displaced), jnp.sum(good)),
        "importance": Ratio(jnp.sum(importance * mask), tokens),
        "importance_squared": Ratio(jnp.sum(importance**2 * mask), tokens),
        "rejected": Ratio(jnp.sum(rejected), tokens),
    }
    return loss, metrics


def value_loss(
    values: jax.Array, old: jax.Array, returns: jax.Array, mask: jax.Array, clip: float
) -> tuple[Ratio, dict[str, Ratio]]:
    """The mean of 0.5 * max((values - returns)^2, (clipped - returns)^2), clipped = clip(values, old +- clip).

    A value gains nothing by moving further than `clip` in one step (as in PPO's reference code; 0: no clipping).
    Arrays are [B, S] float32 and refer to the token at the same position; all sampled tokens weigh the same.
    """
    near = jnp.clip(values, old - clip, old + clip) if clip else values
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    tokens = jnp.sum(mask)
    loss = Ratio(0.5 * jnp.sum(jnp.maximum(plain, clipped) * mask), tokens)
    cut = jnp.sum((clipped > plain) * mask)
    return loss, {"loss": loss, "value": Ratio(jnp.sum(values * mask), tokens), "clip_fraction": Ratio(cut, tokens)}


def _actions(sampled: jax.Array) -> jax.Array:
    """[B, S] int32, the index of each token's action in its row, from 1; 0 for tokens that were not sampled.

    An action is a run of consecutive sampled tokens. A passage or the next trajectory's prompt ends it.
    """
    begins = sampled & ~jnp.pad(sampled, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(sampled, jnp.cumsum(begins, axis=1), 0)


def _by_trajectory(x: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, S + 1], sums of x [B, S] over each segment of a row; column 0 sums over segment 0 (padding)."""
    return jax.vmap(partial(jax.ops.segment_sum, num_segments=x.shape[1] + 1))(x, segments)


def _of_own(x: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, S], at every token the sum of x over its segment."""
    return jnp.take_along_axis(_by_trajectory(x, segments), segments, axis=1)

"""The losses of policy and critic as sums and counts; the caller divides once, after micro-batches and devices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from psearch_jax.config import LearningSection
from psearch_jax.metrics import Ratio

METRICS = ("loss", "kl", "entropy", "clip_fraction", "ratio", "logp_gap", "displaced")
VALUE_METRICS = ("loss", "value", "clip_fraction")
ROUNDING = 1e-3  # nats; an action that lost less may only have been computed by another program
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
    segments: jax.Array,
    learning: LearningSection,
    context_tokens: int,
) -> tuple[Ratio, dict[str, Ratio]]:
    """Clipped surrogate plus KL to the reference (GRPO, arXiv 2402.03300 eq. 3; asymmetric clip of arXiv 2503.14476).

    With `ratio=sequence` every id has the ratio of its trajectory, exp of the mean of its log-ratios; with
    `sequence_mean` that is GSPO (arXiv 2507.18071 eq. 5). `dual_clip` bounds what a bad action that became much
    likelier adds, at `dual_clip` times its advantage (arXiv 1912.09729 eq. 5). `importance_cap` weighs each id by the
    truncated ratio of old policy to sampler. With `kl_in=reward` the KL is in the advantages and not here;
    `entropy_coefficient` times the entropy is subtracted (arXiv 1707.06347 eq. 9). `guard` weighs the likelihood that
    good actions lost (LLDS, arXiv 2512.04220): where an action, the ids of one turn, has no negative advantage and
    grew less likely as a whole, each of its ids that did costs its fall in log-prob.

    Arrays are [B, S] and speak about the id at the same position, float32 but for `segments`; where `mask` is 0
    nothing counts. `segments` is int32, the number of an id's trajectory among those of its row, from 1 without a gap;
    0 where there is no real id. `old` may be `logp` itself, its gradient stopped: the ratio is then 1 everywhere.

    Returns:
      The loss to minimise, and metrics. `token_mean` counts tokens; `sequence_mean` the trajectories with tokens that
      count; `constant_length` all trajectories x context_tokens (arXiv 2503.20783), masked ones too: a divisor that
      falls with those left out would raise the weight of the others. How trajectories share rows changes nothing.
      `displaced` is the share of ids in good actions that grew less likely as a whole.
      `logp_gap` is the mean of |old - sampler|, or of |logp - sampler| where the sampler's log-probs are the old ones.
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
    if learning.importance_cap > 0:
        # What the sampler drew from was not quite the old policy (truncated importance sampling).
        gap = jnp.clip(jnp.where(counts, old - sampler, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        surrogate = surrogate * jax.lax.stop_gradient(jnp.minimum(jnp.exp(gap), learning.importance_cap))
    kl = jnp.where(counts, k3(logp, ref), 0.0)
    price = learning.kl_coefficient if learning.kl_in == "loss" else 0.0
    per_token = (-surrogate + price * kl - learning.entropy_coefficient * entropy) * mask
    good = counts & (advantage >= 0)
    displaced = good & (_of_own(change, _actions(counts)) < -ROUNDING)
    if learning.guard > 0:
        per_token += learning.guard * jnp.where(displaced, jnp.maximum(-change, 0.0), 0.0)
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
    current = logp if learning.old_logprobs == "sampler" else old
    gap = jnp.abs(jnp.where(counts, current - sampler, 0.0))
    metrics = {
        "loss": loss,
        "kl": Ratio(jnp.sum(kl), tokens),
        "entropy": Ratio(jnp.sum(entropy * mask), tokens),
        "clip_fraction": Ratio(jnp.sum(cut), tokens),
        "ratio": Ratio(jnp.sum(ratio * mask), tokens),
        "logp_gap": Ratio(jnp.sum(gap), tokens),
        "displaced": Ratio(jnp.sum(displaced), jnp.sum(good)),
    }
    return loss, metrics


def value_loss(
    values: jax.Array, old: jax.Array, returns: jax.Array, mask: jax.Array, clip: float
) -> tuple[Ratio, dict[str, Ratio]]:
    """Half the squared error of the critic, the larger of a value's and that of the value kept within `clip` of `old`.

    So a value earns nothing by moving further than that in one step (as PPO's reference code has it; 0: no clip).
    Arrays are [B, S] float32 and speak about the id at the same position; all sampled ids weigh the same.
    """
    near = jnp.clip(values, old - clip, old + clip) if clip else values
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    tokens = jnp.sum(mask)
    loss = Ratio(0.5 * jnp.sum(jnp.maximum(plain, clipped) * mask), tokens)
    cut = jnp.sum((clipped > plain) * mask)
    return loss, {"loss": loss, "value": Ratio(jnp.sum(values * mask), tokens), "clip_fraction": Ratio(cut, tokens)}


def _actions(sampled: jax.Array) -> jax.Array:
    """[B, S] int32, the number of an id's action among those of its row, from 1; 0 where nothing was sampled.

    An action is a run of sampled ids; whatever follows one, a passage or the next trajectory's prompt, ends it.
    """
    begins = sampled & ~jnp.pad(sampled, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(sampled, jnp.cumsum(begins, axis=1), 0)


def _by_trajectory(x: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, S + 1] the sums of x [B, S] over each trajectory of a row; of what is no real id in column 0."""
    return jax.vmap(partial(jax.ops.segment_sum, num_segments=x.shape[1] + 1))(x, segments)


def _of_own(x: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, S] at every id the sum of x over its trajectory."""
    return jnp.take_along_axis(_by_trajectory(x, segments), segments, axis=1)

"""The losses against hand-worked numbers, for every aggregation, clip and correction."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.config import LearningSection
from psearch_jax.rl.losses import MAX_KL, NO_KL, k3, policy_loss, value_loss
from psearch_jax.types import MicroBatch

# Two rows of four positions; row 0 has two sampled tokens, row 1 one. All other log-probs are junk on purpose.
JUNK = 99.0
CONTEXT = 16
MASK = np.array([[0, 1, 1, 0], [0, 0, 1, 0]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.int32)
ADVANTAGE = np.array([[2.0, 2.0, 2.0, 2.0], [-1.0, -1.0, -1.0, -1.0]], np.float32)
SETTINGS = LearningSection(clip_low=0.2, clip_high=0.3, kl_coefficient=0.0)
AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length")


def at_sampled(a, b, c, elsewhere=JUNK) -> np.ndarray:
    out = np.full((2, 4), elsewhere, np.float32)
    out[0, 1], out[0, 2], out[1, 2] = a, b, c
    return out


OLD = at_sampled(-1.0, -2.0, -0.5)
LOGP = at_sampled(-1.0 + math.log(1.5), -2.0 + math.log(0.5), -0.5 + math.log(1.1), elsewhere=-JUNK)
REF = at_sampled(-1.2, -2.0, -0.5)
ENTROPY = at_sampled(0.3, 0.6, 0.9)
# A > 0: min(1.5*2, 1.3*2) = 2.6 (cut), min(.5*2, .8*2) = 1.0 (not cut); A < 0: min(1.1*-1, 1.1*-1) = -1.1.
TOKENS = (-2.6, -1.0, 1.1)


def micro_batch(mask, segments, **fields) -> MicroBatch:
    zeros = dict.fromkeys(MicroBatch.__dataclass_fields__, np.zeros(mask.shape, np.float32))
    return MicroBatch(**{**zeros, "mask": mask, "segments": segments, **fields})


def loss(logp=LOGP, old=OLD, entropy=ENTROPY, *, shape=None, mask=MASK, segments=SEGMENTS, **changes):
    """`policy_loss` of the arrays above, reshaped to `shape`; `changes` are arrays of the batch or settings."""
    arrays = {"ref_logprobs": REF, "sampler_logprobs": OLD, "advantage": ADVANTAGE}
    arrays |= {name: changes.pop(name) for name in list(changes) if name in arrays}
    arrays |= {"mask": mask, "segments": segments}
    inputs = (logp, entropy, old)
    if shape:
        inputs = tuple(x.reshape(shape) for x in inputs)
        arrays = {name: x.reshape(shape) for name, x in arrays.items()}
    batch = micro_batch(**{name: jnp.asarray(x) for name, x in arrays.items()})
    return policy_loss(*map(jnp.asarray, inputs), batch, dataclasses.replace(SETTINGS, **changes), CONTEXT)


@pytest.mark.parametrize(
    ("aggregation", "total", "count"),
    [
        ("token_mean", sum(TOKENS), 3),
        ("sequence_mean", (TOKENS[0] + TOKENS[1]) / 2 + TOKENS[2], 2),
        ("constant_length", sum(TOKENS), 2 * CONTEXT),  # independent of the padded row length
    ],
)
def test_aggregations_by_hand(aggregation, total, count):
    """A loss is a sum and a count; a trajectory that shares a row with others counts as one of its own."""
    value, metrics = loss(aggregation=aggregation)
    np.testing.assert_allclose([value.total, value.count], [total, count], rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"].value, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"].value, (1.5 + 0.5 + 1.1) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"].value, 0.6, rtol=1e-6)
    in_one_row = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    for ratio in ("token", "sequence"):
        alone, _ = loss(aggregation=aggregation, ratio=ratio, kl_coefficient=0.5)
        packed, _ = loss(aggregation=aggregation, ratio=ratio, kl_coefficient=0.5, segments=in_one_row, shape=(1, 8))
        np.testing.assert_allclose([packed.total, packed.count], [alone.total, alone.count], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "cut"),
    [
        (1.5, 1.0, -1.3, True),  # above the upper clip: no reward for going further
        (0.5, 1.0, -0.5, False),  # below the lower clip with a good action: pulled back
        (1.5, -1.0, 1.5, False),  # above the upper clip with a bad action: pushed down
        (0.5, -1.0, 0.8, True),  # below the lower clip with a bad action: no further
    ],
)
def test_the_clip_is_asymmetric_and_pessimistic(ratio, advantage, expected, cut):
    """The loss has no gradient where the policy has moved further than the clip in the direction of the advantage."""
    ones = np.ones((1, 1), np.float32)
    batch = micro_batch(ones, np.ones((1, 1), np.int32), advantage=advantage * ones)

    def measure(logp):
        return policy_loss(logp, 0 * ones, 0 * ones, batch, SETTINGS, CONTEXT)

    value, metrics = measure(jnp.log(ratio) * ones)
    np.testing.assert_allclose(value.total, expected, rtol=1e-6)
    assert bool(metrics["clip_fraction"].total) is cut
    slope = jax.grad(lambda logp: measure(logp)[0].total)(jnp.log(ratio) * ones)[0, 0]
    np.testing.assert_allclose(slope, 0.0 if cut else -advantage * ratio, rtol=1e-6)


def test_kl_by_hand():
    """The k3 estimator; above MAX_KL a token has no gradient (verl); with kl_in=reward the loss has no KL.

    With kl_to=wrong, a right rollout has neither a KL nor its gradient, and does not count in the metric.
    """
    estimates = k3(jnp.array([-1.0, -1.0, -2.0, -8.0]), jnp.array([-1.0, -2.0, -1.0, -1.0]))
    np.testing.assert_allclose(estimates, [0.0, math.exp(-1), math.e - 2, MAX_KL], rtol=1e-6)
    slopes = jax.grad(lambda logp: k3(logp, jnp.array([-1.0, -1.0])).sum())(jnp.array([-2.0, -8.0]))
    np.testing.assert_allclose(slopes, [1 - math.e, 0.0], rtol=1e-6)
    value, metrics = loss(kl_coefficient=0.5)
    d = [-1.2 + 1.0 - math.log(1.5), -math.log(0.5), -math.log(1.1)]
    kl = sum(math.exp(x) - x - 1 for x in d)
    np.testing.assert_allclose(value.total, sum(TOKENS) + 0.5 * kl, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"].value, kl / 3, rtol=1e-5)
    in_reward, metrics = loss(kl_coefficient=0.5, kl_in="reward")
    np.testing.assert_allclose(in_reward.total, sum(TOKENS), rtol=1e-5)
    assert metrics["kl"].value > 0
    only_second = np.where([[True], [False]], NO_KL, REF).astype(np.float32)
    kl = loss(kl_coefficient=0.5, ref_logprobs=only_second)[1]["kl"].value
    np.testing.assert_allclose(kl, math.exp(d[2]) - d[2] - 1, rtol=1e-4)
    slope = jax.grad(lambda x: loss(x, advantage=0 * ADVANTAGE, kl_coefficient=0.5, ref_logprobs=only_second)[0].total)
    np.testing.assert_allclose(slope(jnp.asarray(LOGP)), at_sampled(0, 0, 0.5 * (1 - math.exp(d[2])), 0), rtol=1e-4)


def test_importance_weights_by_hand():
    """A token weighs min(p_old / p_sampler, cap); with old_logprobs=sampler the gap is that of the current policy."""
    sampler = at_sampled(-1.0 - math.log(3.0), -2.0 - math.log(0.5), -0.5)  # old / sampler = 3, .5, 1
    value, metrics = loss(sampler_logprobs=sampler, importance_cap=2.0)
    np.testing.assert_allclose(value.total, 2.0 * TOKENS[0] + 0.5 * TOKENS[1] + TOKENS[2], rtol=1e-5)
    np.testing.assert_allclose(metrics["logp_gap"].value, (math.log(3) + math.log(2)) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["importance"].value, 4.5 / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["importance_squared"].value, 10.25 / 3, rtol=1e-5)
    np.testing.assert_allclose(loss(sampler_logprobs=sampler)[0].total, sum(TOKENS), rtol=1e-5)
    _, metrics = loss(old_logprobs="sampler")
    gap = (math.log(1.5) + math.log(2) + math.log(1.1)) / 3
    np.testing.assert_allclose(metrics["logp_gap"].value, gap, rtol=1e-5)


def test_sequence_ratios_against_the_paper():
    """GSPO (arXiv 2507.18071 eq. 5 and 7) written out: one ratio per trajectory, clipped once; the mean over them."""
    rng = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 2, 2, 3, 3, 3, 3]], np.int32)
    mask = (rng.random(segments.shape) < 0.7).astype(np.float32) * (segments > 0)
    logp, old = (rng.normal(-1, 0.4, segments.shape).astype(np.float32) for _ in range(2))
    worth = rng.normal(size=(3, 4)).astype(np.float32)
    trajectories = [(row, segments[row] == s, s) for row in range(3) for s in range(1, segments[row].max() + 1)]
    terms = []
    for row, inside, segment in trajectories:
        sampled = inside & (mask[row] > 0)
        if sampled.any():
            s = np.exp((logp[row, sampled] - old[row, sampled]).mean())
            terms.append(min(s * worth[row, segment], np.clip(s, 0.8, 1.3) * worth[row, segment]))
    batch = micro_batch(mask, segments, advantage=np.take_along_axis(worth, segments, axis=1) * mask)
    settings = dataclasses.replace(SETTINGS, ratio="sequence", aggregation="sequence_mean")

    def value(logp):
        return policy_loss(logp, jnp.zeros_like(old), old, batch, settings, CONTEXT)[0]

    out = value(jnp.asarray(logp))
    np.testing.assert_allclose([out.total, out.count], [-sum(terms), len(terms)], rtol=1e-5)
    slope = np.asarray(jax.grad(lambda x: value(x).total)(jnp.asarray(logp)))
    assert np.all(np.isfinite(slope)) and np.all(slope[mask == 0] == 0)
    for row, inside, _ in trajectories:  # every token of a trajectory has the same gradient
        values = slope[row][inside & (mask[row] > 0)]
        np.testing.assert_allclose(values, values[:1].repeat(len(values)), rtol=1e-5)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_extreme_ratios_stay_finite_with_their_gradients(ratio):
    """One diverged token does not turn the update into NaN."""
    far = at_sampled(500.0, -500.0, 300.0)

    def total(logp):
        changes = dict(ref_logprobs=-far, sampler_logprobs=-far, kl_coefficient=0.1, importance_cap=2.0, ratio=ratio)
        return loss(logp, **changes)[0].total

    value, slope = jax.value_and_grad(total)(jnp.asarray(far))
    assert np.isfinite(value) and np.all(np.isfinite(slope))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_only_sampled_tokens_count(aggregation):
    """Prompts, passages and padding rows change neither the loss nor its gradient; nothing sampled is 0 over 0."""

    def pad(x, fill=0.0):
        return np.concatenate([x, np.full((2, 4), fill, x.dtype)])

    padded = {"mask": pad(MASK), "segments": pad(SEGMENTS), "advantage": pad(ADVANTAGE)}
    padded |= {"ref_logprobs": pad(REF), "sampler_logprobs": pad(OLD), "entropy": pad(ENTROPY), "old": pad(OLD)}

    def total(logp):
        return loss(logp, aggregation=aggregation, kl_coefficient=0.1, **padded)[0].total

    value, slope = jax.value_and_grad(total)(jnp.asarray(pad(LOGP, 7.0)))
    expected = loss(aggregation=aggregation, kl_coefficient=0.1)[0]
    np.testing.assert_allclose(value, expected.total, rtol=1e-6)
    assert np.all(slope[:2][MASK == 0] == 0) and np.all(slope[2:] == 0) and np.any(slope[:2][MASK > 0] != 0)
    empty, metrics = loss(mask=np.zeros_like(MASK), advantage=np.zeros_like(MASK))
    assert float(empty.total) == float(empty.count) == 0.0 and math.isnan(metrics["kl"].value)


@pytest.mark.parametrize(("aggregation", "count"), [("sequence_mean", 1), ("constant_length", 2 * CONTEXT)])
def test_the_weight_of_a_masked_trajectory(aggregation, count):
    """Excluded trajectories do not raise the weight of the others under constant_length."""
    only_first = MASK * np.array([[1.0], [0.0]], np.float32)  # row 1 ended without an answer and is not trained on
    value, _ = loss(mask=only_first, advantage=ADVANTAGE * only_first, aggregation=aggregation)
    share = TOKENS[0] + TOKENS[1]
    np.testing.assert_allclose(value.total, share / 2 if aggregation == "sequence_mean" else share, rtol=1e-5)
    assert float(value.count) == count


def test_the_entropy_bonus_is_in_the_loss_and_its_gradient():
    """entropy_coefficient x entropy is subtracted at every sampled token."""
    plain, more = loss()[0], loss(entropy_coefficient=0.1)[0]
    np.testing.assert_allclose(plain.total - more.total, 0.1 * (0.3 + 0.6 + 0.9), rtol=1e-5)
    gradient = jax.grad(lambda entropy: loss(entropy=entropy, entropy_coefficient=0.1)[0].total)(jnp.asarray(ENTROPY))
    np.testing.assert_allclose(gradient, -0.1 * MASK, rtol=1e-6)


def test_the_value_loss_by_hand():
    """The larger of the clipped and the plain squared error counts, at sampled tokens only."""
    values = jnp.asarray(at_sampled(0.9, 0.3, 0.5, elsewhere=-JUNK))
    batch = micro_batch(MASK, SEGMENTS, values=at_sampled(0.0, 0.0, 0.4), returns=at_sampled(1.0, 1.0, 0.0))
    clipped, metrics = value_loss(values, batch)
    # Squared errors: .9 counts as .5, so .25, not .01; .3 is within the clip: .49; .5 is within the clip: .25
    np.testing.assert_allclose([clipped.total, clipped.count], [(0.25 + 0.49 + 0.25) / 2, 3], rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction"].value, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["value"].value, 1.7 / 3, rtol=1e-6)
    gradient = jax.grad(lambda v: value_loss(v, batch)[0].total)(values)
    np.testing.assert_allclose(gradient, at_sampled(0.0, -0.7, 0.5, elsewhere=0.0), atol=1e-6)

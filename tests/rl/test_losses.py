"""The losses against hand-worked numbers, for every aggregation, clip and correction."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.config import LearningSection
from psearch_jax.rl.losses import k3, policy_loss, value_loss
from psearch_jax.runtime.metrics import WEIGHT
from psearch_jax.train.monitoring.figures import over_updates

# Two rows of four positions; row 0 has two sampled tokens, row 1 one. All other log-probs are junk on purpose.
JUNK = 99.0
CONTEXT = 16
MASK = np.array([[0, 1, 1, 0], [0, 0, 1, 0]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.int32)
ADVANTAGE = np.array([[2.0, 2.0, 2.0, 2.0], [-1.0, -1.0, -1.0, -1.0]], np.float32)
SETTINGS = LearningSection(clip_low=0.2, clip_high=0.3, kl_coefficient=0.0)


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
FINITE = {"skipped": 0, "nonfinite_in_a_row": 0, "nonfinite_param": 0, "learning_rate": 0, WEIGHT: 3}


def loss(logp=LOGP, old=OLD, ref=REF, sampler=OLD, mask=MASK, advantage=ADVANTAGE, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    arrays = (logp, ENTROPY, old, ref, sampler, advantage, mask, SEGMENTS)
    return policy_loss(*map(jnp.asarray, arrays), settings, CONTEXT)


@pytest.mark.parametrize(
    ("aggregation", "total", "count"),
    [
        ("token_mean", sum(TOKENS), 3),
        ("sequence_mean", (TOKENS[0] + TOKENS[1]) / 2 + TOKENS[2], 2),
        ("constant_length", sum(TOKENS), 2 * CONTEXT),  # independent of the padded row length
    ],
)
def test_aggregations_by_hand(aggregation, total, count):
    """A mean taken per micro-batch, or over pads, weighs short rows more than the formula says."""
    value, metrics = loss(aggregation=aggregation)
    np.testing.assert_allclose([value.total, value.count], [total, count], rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"].value, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"].value, (1.5 + 0.5 + 1.1) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"].value, 0.6, rtol=1e-6)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_trajectories_of_one_row_count_as_several(aggregation, ratio):
    """A mean over a packed row, or a count of rows, weighs trajectories by what they are packed with."""
    settings = dataclasses.replace(SETTINGS, aggregation=aggregation, ratio=ratio, kl_coefficient=0.5)

    def value(segments, shape):
        arrays = (LOGP, ENTROPY, OLD, REF, OLD, ADVANTAGE, MASK)
        out, _ = policy_loss(*(jnp.asarray(x.reshape(shape)) for x in (*arrays, segments)), settings, CONTEXT)
        return [out.total, out.count]

    together = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    np.testing.assert_allclose(value(together, (1, 8)), value(SEGMENTS, (2, 4)), rtol=1e-6)


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
    """Swapped clips, or max instead of min, let the policy run away from the old one."""
    one = np.array([[1.0]], np.float32)

    def measured(logp):
        zero = jnp.asarray(0 * one)
        arrays = (zero, zero, zero, zero, jnp.asarray(advantage * one), jnp.asarray(one), jnp.ones((1, 1), jnp.int32))
        return policy_loss(logp, *arrays, SETTINGS, CONTEXT)

    value, metrics = measured(jnp.log(ratio) * one)
    np.testing.assert_allclose(value.total, expected, rtol=1e-6)
    assert bool(metrics["clip_fraction"].total) is cut
    slope = jax.grad(lambda logp: measured(logp)[0].total)(jnp.log(ratio) * one)[0, 0]
    np.testing.assert_allclose(slope, 0.0 if cut else -advantage * ratio, rtol=1e-6)


def test_k3_by_hand():
    """The estimator is not that of KL(policy || reference): it is negative, or not zero where they agree."""
    np.testing.assert_allclose(k3(jnp.array([-1.0, -1.0, -2.0]), jnp.array([-1.0, -2.0, -1.0])),
                               [0.0, math.exp(-1), math.e - 2], rtol=1e-6)  # fmt: skip
    value, metrics = loss(kl_coefficient=0.5)
    d = [-1.2 + 1.0 - math.log(1.5), -math.log(0.5), -math.log(1.1)]
    kl = sum(math.exp(x) - x - 1 for x in d)
    np.testing.assert_allclose(value.total, sum(TOKENS) + 0.5 * kl, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl"].value, kl / 3, rtol=1e-5)


def test_one_token_cannot_dominate_the_kl():
    """The KL of one token that the policy unlearned would be the gradient of the update (verl limits k3 to 10)."""
    ref, logp = at_sampled(-1.0, -1.0, -1.0), jnp.asarray(at_sampled(-8.0, -2.0, -1.0))  # k3: 1088.6, e - 2, 0

    def total(logp, clamp):
        arrays = (jnp.zeros(logp.shape), logp, ref, logp, jnp.zeros(logp.shape), MASK, SEGMENTS)
        settings = dataclasses.replace(SETTINGS, kl_coefficient=1.0, kl_clamp=clamp)
        value, metrics = policy_loss(logp, *map(jnp.asarray, arrays), settings, CONTEXT)
        return value.total, metrics["kl"].total

    for clamp, first, slope in ((10.0, 10.0, 0.0), (0.0, math.exp(7) - 8, 1 - math.exp(7))):
        (loss_, kl), gradient = jax.value_and_grad(total, has_aux=True)(logp, clamp)
        np.testing.assert_allclose([loss_, kl], first + math.e - 2, rtol=1e-5)
        sampled = np.asarray(MASK) > 0
        np.testing.assert_allclose(gradient[sampled], [slope, 1 - math.e, 0.0], rtol=1e-5, atol=1e-6)
    assert LearningSection().kl_clamp == 10


def test_the_importance_cap_by_hand():
    """Uncapped importance weights of tokens that were sampled because of rounding dominate the batch."""
    sampler = at_sampled(-1.0 - math.log(3.0), -2.0 - math.log(0.5), -0.5)  # old / sampler = 3, .5, 1
    value, metrics = loss(sampler=sampler, importance_cap=2.0)
    np.testing.assert_allclose(value.total, 2.0 * TOKENS[0] + 0.5 * TOKENS[1] + TOKENS[2], rtol=1e-5)
    np.testing.assert_allclose(metrics["logp_gap"].value, (math.log(3) + math.log(2)) / 3, rtol=1e-5)
    np.testing.assert_allclose(loss(sampler=sampler)[0].total, sum(TOKENS), rtol=1e-5)


def test_importance_weights_of_complete_rollouts_by_hand():
    """A weight per token where the ratio of the rollout was asked for, or tokens of other rollouts in its product."""
    sampler = at_sampled(-1.0 - math.log(3.0), -2.0 - math.log(0.5), -0.5)  # old / sampler = 3 x .5 and 1
    for cap, weight in ((10.0, 1.5), (1.2, 1.2)):
        value, _ = loss(sampler=sampler, importance_cap=cap, importance_level="sequence")
        np.testing.assert_allclose(value.total, weight * (TOKENS[0] + TOKENS[1]) + TOKENS[2], rtol=1e-5)


def test_the_effective_sample_size_by_hand():
    """A sample size that does not fall when few tokens carry all weight: the alarm would never be raised."""
    sampler = at_sampled(-1.0 - math.log(3.0), -2.0 - math.log(0.5), -0.5)
    metrics = {name: ratio.value for name, ratio in loss(sampler=sampler)[1].items()}
    combined = over_updates(
        [{**metrics, "skipped": 0, "nonfinite_in_a_row": 0, "nonfinite_param": 0, "learning_rate": 0, WEIGHT: 3}]
    )
    assert combined["effective_sample_size"] == pytest.approx(4.5**2 / (3 * 10.25), rel=1e-5)
    by_rollout = loss(sampler=sampler, importance_cap=2.0, importance_level="sequence")[1]  # weights 1.5, 1.5 and 1
    metrics |= {name: by_rollout[name].value for name in ("importance", "importance_squared")}
    combined = over_updates(
        [{**metrics, "skipped": 0, "nonfinite_in_a_row": 0, "nonfinite_param": 0, "learning_rate": 0, WEIGHT: 3}]
    )
    assert combined["effective_sample_size"] == pytest.approx(4.0**2 / (3 * 5.5), rel=1e-5)
    equal = {name: ratio.value for name, ratio in loss()[1].items()}
    combined = over_updates(
        [{**equal, "skipped": 0, "nonfinite_in_a_row": 0, "nonfinite_param": 0, "learning_rate": 0, WEIGHT: 3}]
    )
    assert combined["effective_sample_size"] == pytest.approx(1) and combined["rejected"] == 0


def test_updates_weigh_by_their_tokens():
    """A mini-batch whose rollouts are all masked counts as zeros: it halves the step's entropy and rings alarms."""
    full = {**{name: ratio.value for name, ratio in loss()[1].items()}, **FINITE}
    empty = {**dict.fromkeys(full, math.nan), **FINITE, "skipped": 1, WEIGHT: 0}
    combined = over_updates([full, empty, {**full, "entropy": full["entropy"] + 1, WEIGHT: 1}])
    assert combined["entropy"] == pytest.approx(full["entropy"] + 0.25) and combined["skipped"] == 1
    assert combined["effective_sample_size"] == pytest.approx(1) and WEIGHT not in combined
    assert math.isnan(over_updates([empty])["entropy"])


def test_updates_weigh_by_what_a_metric_counts():
    """An update with few good actions outweighs one with many, or one without any makes the figure of the step NaN."""
    full = {**{name: ratio.value for name, ratio in loss()[1].items()}, **FINITE}
    few, many, none = (
        {**full, "displaced": value, f"displaced/{WEIGHT}": count}
        for value, count in ((1.0, 100), (0.0, 900), (math.nan, 0))
    )
    combined = over_updates([few, many, none])
    assert combined["displaced"] == pytest.approx(0.1) and not any(name.endswith(WEIGHT) for name in combined)


def test_rejected_rollouts_by_hand():
    """A rollout that the policy has left behind still moves it, or the rejection raises the weight of the others."""
    for sign in (1, -1):  # the geometric means are 1.5 ** .5 = 1.225, or its inverse, and 1
        sampler = at_sampled(-1.0 - sign * math.log(3.0), -2.0 - sign * math.log(0.5), -0.5)
        value, metrics = loss(sampler=sampler, reject_ratio=1.25)
        np.testing.assert_allclose(value.total, sum(TOKENS), rtol=1e-5)
        assert metrics["rejected"].value == 0
        value, metrics = loss(sampler=sampler, reject_ratio=1.2, entropy_coefficient=0.5)
        np.testing.assert_allclose([value.total, value.count], [TOKENS[2] - 0.5 * 0.9, 3], rtol=1e-5)
        assert metrics["rejected"].value == pytest.approx(2 / 3)


def test_the_samplers_logprobs_as_the_old_ones():
    """A bad action that became much likelier than it was for the sampler is not clipped, and dominates the batch."""
    logp = at_sampled(-1.0 + math.log(1.5), -2.0 + math.log(0.5), -0.5 + math.log(5.0), elsewhere=-JUNK)
    value, metrics = loss(logp=logp, old_logprobs="sampler", dual_clip=2.0)
    np.testing.assert_allclose(value.total, TOKENS[0] + TOKENS[1] + 2.0, rtol=1e-5)
    gap = sum(map(abs, (math.log(1.5), math.log(0.5), math.log(5.0)))) / 3  # relative to the current policy
    np.testing.assert_allclose(metrics["logp_gap"].value, gap, rtol=1e-5)
    np.testing.assert_allclose(loss(logp=logp, old_logprobs="sampler")[0].total, TOKENS[0] + TOKENS[1] + 5, rtol=1e-5)


def test_the_dual_clip_by_hand():
    """The dual clip bounds good actions too, or changes the loss where the ratio is below it."""
    logp = at_sampled(-1.0 + math.log(9.0), -2.0 + math.log(0.5), -0.5 + math.log(5.0), elsewhere=-JUNK)
    value, _ = loss(logp=logp, dual_clip=3.0)
    np.testing.assert_allclose(value.total, TOKENS[0] + TOKENS[1] + 3.0, rtol=1e-5)
    np.testing.assert_allclose(loss(dual_clip=3.0)[0].total, sum(TOKENS), rtol=1e-6)
    slope = jax.grad(lambda x: loss(logp=x, dual_clip=3.0)[0].total)(jnp.asarray(logp))
    assert float(slope[1, 2]) == 0.0 and float(slope[0, 2]) != 0.0


def test_sequence_ratios_against_the_paper():
    """A ratio per token or per packed row, in place of one per trajectory, is another objective.

    GSPO (arXiv 2507.18071 eq. 5 and 7) written out: one ratio per trajectory, clipped once, and the mean over them.
    """
    rng = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 2, 2, 3, 3, 3, 3]], np.int32)
    mask = (rng.random(segments.shape) < 0.7).astype(np.float32) * (segments > 0)
    logp, old = (rng.normal(-1, 0.4, segments.shape).astype(np.float32) for _ in range(2))
    worth = rng.normal(size=(3, 4)).astype(np.float32)
    advantage = np.take_along_axis(worth, segments, axis=1) * mask
    terms = []
    for row in range(3):
        for segment in range(1, segments[row].max() + 1):
            own = (segments[row] == segment) & (mask[row] > 0)
            if own.any():
                s = np.exp((logp[row, own] - old[row, own]).mean())
                terms.append(min(s * worth[row, segment], np.clip(s, 0.8, 1.3) * worth[row, segment]))
    settings = dataclasses.replace(SETTINGS, ratio="sequence", aggregation="sequence_mean")

    def value(logp):
        arrays = (np.zeros_like(old), old, old, old, advantage, mask, segments)
        return policy_loss(logp, *map(jnp.asarray, arrays), settings, CONTEXT)[0]

    out = value(jnp.asarray(logp))
    np.testing.assert_allclose([out.total, out.count], [-sum(terms), len(terms)], rtol=1e-5)
    slope = np.asarray(jax.grad(lambda x: value(x).total)(jnp.asarray(logp)))
    assert np.all(np.isfinite(slope)) and np.all(slope[mask == 0] == 0)
    for row in range(3):  # every token of a trajectory has the same gradient
        for segment in range(1, segments[row].max() + 1):
            own = slope[row][(segments[row] == segment) & (mask[row] > 0)]
            np.testing.assert_allclose(own, own[:1].repeat(len(own)), rtol=1e-5)


def test_extreme_ratios_stay_finite_with_their_gradients():
    """One diverged token turns the entire update into NaN."""
    far = at_sampled(500.0, -500.0, 300.0)

    for ratio in ("token", "sequence"):

        def total(logp, ratio=ratio):
            return loss(logp, ref=-far, sampler=-far, kl_coefficient=0.1, importance_cap=2.0, ratio=ratio)[0].total

        assert np.isfinite(total(jnp.asarray(far)))
        assert np.all(np.isfinite(jax.grad(total)(jnp.asarray(far))))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_positions_that_were_not_sampled_and_empty_rows_count_nothing(aggregation):
    """Prompt, passages or padding rows change the loss or its gradient."""

    def value(logp, rows=2):
        pad = np.zeros((rows - 2, 4), np.float32)
        mask, old, ref, advantage = (np.concatenate([a, pad]) for a in (MASK, OLD, REF, ADVANTAGE * MASK))
        entropy = np.concatenate([ENTROPY, pad])
        segments = np.concatenate([SEGMENTS, np.zeros((rows - 2, 4), np.int32)])
        settings = dataclasses.replace(SETTINGS, aggregation=aggregation, kl_coefficient=0.1)
        arrays = (entropy, old, ref, old, advantage, mask, segments)
        out, _ = policy_loss(logp, *map(jnp.asarray, arrays), settings, CONTEXT)
        return out.total / out.count

    padded = np.concatenate([LOGP, np.full((2, 4), 7.0, np.float32)])
    np.testing.assert_allclose(value(jnp.asarray(padded), rows=4), value(jnp.asarray(LOGP)), rtol=1e-6)
    slope = np.asarray(jax.grad(lambda x: value(x, rows=4))(jnp.asarray(padded)))
    assert np.all(slope[:2][MASK == 0] == 0) and np.all(slope[2:] == 0) and np.any(slope[:2][MASK > 0] != 0)


@pytest.mark.parametrize(("aggregation", "count"), [("sequence_mean", 1), ("constant_length", 2 * CONTEXT)])
def test_what_a_masked_row_weighs(aggregation, count):
    """A divisor that shrinks with excluded rows gives the rest more weight, most where most are excluded."""
    only_first = MASK * np.array([[1.0], [0.0]], np.float32)  # row 1 ended without an answer and is not trained on
    value, _ = loss(mask=only_first, advantage=ADVANTAGE * only_first, aggregation=aggregation)
    share = TOKENS[0] + TOKENS[1]
    np.testing.assert_allclose(value.total, share / 2 if aggregation == "sequence_mean" else share, rtol=1e-5)
    assert float(value.count) == count


def test_nothing_sampled_at_all_is_a_zero_over_a_zero_count():
    """A batch that contains only prompts divides by zero inside the loss."""
    value, metrics = loss(mask=np.zeros_like(MASK), advantage=np.zeros_like(MASK))
    assert float(value.total) == 0.0 and float(value.count) == 0.0
    assert math.isnan(metrics["kl"].value)


def test_a_kl_that_is_paid_in_the_reward_is_not_paid_again():
    """kl_in=reward leaves the term in the loss, so that the coefficient counts twice."""
    plain, twice = loss(kl_coefficient=0.0)[0], loss(kl_coefficient=0.5, kl_in="reward")
    assert float(plain.total) == float(twice[0].total) and twice[1]["kl"].value > 0


def test_the_entropy_bonus_by_hand_and_in_the_gradient():
    """A bonus that is only logged, or whose gradient is cut off, does not keep a policy from narrowing."""
    plain, more = loss()[0], loss(entropy_coefficient=0.1)[0]
    np.testing.assert_allclose(plain.total - more.total, 0.1 * (0.3 + 0.6 + 0.9), rtol=1e-5)
    settings = dataclasses.replace(SETTINGS, entropy_coefficient=0.1)
    rest = tuple(map(jnp.asarray, (OLD, REF, OLD, ADVANTAGE, MASK, SEGMENTS)))
    gradient = jax.grad(lambda e: policy_loss(jnp.asarray(LOGP), e, *rest, settings, CONTEXT)[0].total)(ENTROPY)
    np.testing.assert_allclose(gradient, -0.1 * MASK, rtol=1e-6)


def test_the_value_loss_by_hand():
    """A clip rewards a value for moving too far or hides an error, or positions that were not sampled count."""
    returns, old = at_sampled(1.0, 1.0, 0.0), at_sampled(0.0, 0.0, 0.4)
    values = at_sampled(0.9, 0.3, 0.5, elsewhere=-JUNK)
    clipped, metrics = value_loss(*map(jnp.asarray, (values, old, returns, MASK)), 0.5)
    # Squared errors: .9 counts as .5, so .25, not .01; .3 is within the clip: .49; .5 is within the clip: .25
    np.testing.assert_allclose([clipped.total, clipped.count], [(0.25 + 0.49 + 0.25) / 2, 3], rtol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction"].value, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["value"].value, 1.7 / 3, rtol=1e-6)
    free, _ = value_loss(*map(jnp.asarray, (values, old, returns, MASK)), 0.0)
    np.testing.assert_allclose(free.total, (0.01 + 0.49 + 0.25) / 2, rtol=1e-6)
    gradient = jax.grad(lambda v: value_loss(v, *map(jnp.asarray, (old, returns, MASK)), 0.5)[0].total)(values)
    np.testing.assert_allclose(gradient, at_sampled(0.0, -0.7, 0.5, elsewhere=0.0), atol=1e-6)


def test_the_guard_by_hand():
    """The guard holds what may fall: a bad action, an action that became likelier in total, or a token that rose."""
    mask = np.array([[0, 1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0, 0, 0]], np.float32)
    segments = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]], np.int32)
    # Row 0, with advantage 1: an action that fell (-.5, +.2), one that rose (-.1, +.4), one that fell (-.3).
    # Row 1, with advantage -1: an action that fell.
    change = np.array([[9, -0.5, 0.2, -9, -0.1, 0.4, 9, -0.3], [0, -1, -1, 0, 0, 0, 0, 0]], np.float32)
    advantage = np.array([[1.0] * 8, [-1.0] * 8], np.float32)
    old = np.full((2, 8), -2.0, np.float32)

    def guarded_loss(logp, **changes):
        settings = dataclasses.replace(SETTINGS, **changes)
        zeros = jnp.zeros((2, 8))
        arrays = (old, old, old, advantage, mask, segments)
        return policy_loss(logp, zeros, *map(jnp.asarray, arrays), settings, CONTEXT)

    logp = jnp.asarray(old + change)
    plain, (guarded, metrics) = guarded_loss(logp)[0], guarded_loss(logp, guard=0.1)
    np.testing.assert_allclose(guarded.total - plain.total, 0.1 * (0.5 + 0.3), rtol=1e-5)
    np.testing.assert_allclose(metrics["displaced"].value, 3 / 5, rtol=1e-6)
    pull = jax.grad(lambda x: guarded_loss(x, guard=0.1)[0].total - guarded_loss(x)[0].total)(logp)
    expected = np.zeros((2, 8), np.float32)
    expected[0, [1, 7]] = -0.1
    np.testing.assert_allclose(pull, expected, atol=1e-6)
    # If the policy is still the old one, as in the only update of a step, nothing has fallen yet.
    assert not np.any(
        jax.grad(lambda x: guarded_loss(x, guard=0.1)[0].total - guarded_loss(x)[0].total)(jnp.asarray(old))
    )

"""Group advantages against hand-worked numbers."""

import math

import numpy as np
import pytest

from psearch_jax.rl.advantages import group_advantages

REWARDS = [1.0, 0.0, 0.5, 2.0, 1.0, 0.3]
GROUPS = [("a", "0"), ("a", "0"), ("b", "0"), ("a", "0"), ("b", "0"), ("c", "0")]
# Group a: 1, 0, 2 (mean 1, std 1); group b: .5, 1 (mean .75, std sqrt(.125)); group c: one rollout.
STD_B = math.sqrt(0.125)
HAND = {
    "std": [0.0, -1 / 1.000001, -0.25 / (STD_B + 1e-6), 1 / 1.000001, 0.25 / (STD_B + 1e-6), 0.0],
    "mean": [0.0, -1.0, -0.25, 1.0, 0.25, 0.0],
    "leave_one_out": [0.0, -1.5, -0.5, 1.5, 0.5, 0.0],
}


@pytest.mark.parametrize("method", HAND)
def test_by_hand(method):
    """Groups do not mix, std has ddof 1, and a group of one gets 0."""
    out = group_advantages(REWARDS, GROUPS, method)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, HAND[method], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", HAND)
def test_equal_rewards_carry_no_signal(method):
    """Rounding noise is not scaled up to an advantage of 1."""
    out = group_advantages([0.1 + 0.2] * 3 + [0.7] * 5, ["x"] * 3 + ["y"] * 5, method)
    np.testing.assert_allclose(out, 0.0, atol=1e-9)


def test_equal_ids_of_two_sources_are_two_groups():
    """Ids restart in every data set."""
    out = group_advantages([1.0, 0.0, 0.0, 0.0], [("a", "7"), ("a", "7"), ("b", "7"), ("b", "7")], "mean")
    np.testing.assert_allclose(out, [0.5, -0.5, 0.0, 0.0])

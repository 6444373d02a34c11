"""GAE with a critic: the sampled tokens are the actions; observation tokens between them are not."""

import numpy as np
import pytest

from psearch_jax.rl.gae import estimate_advantages, explained_variance, token_rewards, whiten


def slow(rewards, values, gae_lambda):
    """Advantages as the sum in arXiv 1506.02438 eq. 16, for a list of actions."""
    n = len(rewards)
    deltas = [rewards[t] + (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum(gae_lambda ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def some(rows=6, positions=40, seed=0):
    """Ragged rows of sampled turns with passages between them; the last row has no sampled token."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, positions), np.float32)
    for row in range(rows - 1):
        at = int(rng.integers(2, 6))
        while at < positions - 8:
            turn = int(rng.integers(1, 6))
            mask[row, at : at + turn] = 1
            at += turn + int(rng.integers(0, 7))
    # Values where nothing was sampled must not be used, so they are NaN.
    rewards, values = (np.where(mask > 0, rng.normal(size=mask.shape), np.nan).astype(np.float32) for _ in range(2))
    return rewards, values, mask


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.0])
def test_advantages_are_those_of_the_papers_sum(gae_lambda):
    """Only sampled tokens are actions, whatever lies between them."""
    rewards, values, mask = some()
    computed, returns = estimate_advantages(rewards, values, mask, gae_lambda)
    assert not computed[mask == 0].any() and not returns[mask == 0].any()
    for row in range(len(mask)):
        at = np.flatnonzero(mask[row])
        by_hand = slow(rewards[row, at].tolist(), values[row, at].tolist(), gae_lambda)
        np.testing.assert_allclose(computed[row, at], by_hand, atol=1e-5)
        np.testing.assert_allclose(returns[row, at], np.add(by_hand, values[row, at]), atol=1e-5)


def test_the_reward_is_paid_at_the_last_sampled_token_and_the_kl_at_each():
    """A trajectory without sampled tokens gets nothing."""
    mask = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    old = np.array([[5, -1, -2, 5, -3, 5]] * 2, np.float32)
    ref = np.array([[0, -1.5, -1, 0, -3, 0]] * 2, np.float32)
    rewards = token_rewards(np.array([2.0, 7.0]), mask, old, ref, 0.1)
    np.testing.assert_allclose(rewards, [[0, -0.05, 0.1, 0, 2.0, 0], [0] * 6], atol=1e-9)


def test_whitening_uses_sampled_tokens_only():
    """The sampled tokens have mean 0 and variance 1; the others are 0."""
    rewards, values, mask = some(seed=3)
    computed, returns = estimate_advantages(rewards, values, mask, 1.0)
    white = whiten(computed, mask)
    assert white[mask > 0].mean() == pytest.approx(0, abs=1e-6) and white[mask > 0].std() == pytest.approx(1, abs=1e-4)
    assert not white[mask == 0].any()
    assert not whiten(computed, np.zeros_like(mask)).any()
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(np.full_like(returns, 0.3), returns, mask) == pytest.approx(0, abs=1e-6)

"""From logits to a token: never a masked one, the right distribution, and keys that depend only on the rollout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import admit, make_sampler, random_params, tiny_config

from psearch_jax.models import decoder
from psearch_jax.models.decoder import NEG_INF
from psearch_jax.rollout.sampling import choose, filter_logits, id_words, row_keys

EDGES = np.array([0.0, 1e-38, 1e-12, 0.5, 1 - 2**-24, np.nextafter(np.float32(1), np.float32(0))], np.float32)
draw = jax.jit(choose)


def extreme_logits(kind: str, V: int) -> np.ndarray:
    rng = np.random.default_rng(V)
    logits = rng.normal(0, 3, V).astype(np.float32)
    if kind == "one":  # a single token has mass
        logits = np.full(V, NEG_INF, np.float32)
        logits[V // 2] = -5.0
    elif kind == "spread":  # masses over the full range of float32
        logits = np.linspace(-200, 60, V).astype(np.float32)
        rng.shuffle(logits)
    elif kind == "tail":  # many small masses, which a single float32 sum would lose
        logits[:] = -16.0
        logits[3] = 0.0
    return logits


@pytest.mark.parametrize("V", [5, 256, 257, 1000, 152_064])
@pytest.mark.parametrize("kind", ["one", "spread", "tail", "plain"])
def test_never_a_masked_id(kind, V):
    """A masked token has log-prob -1e30: sampled once, it ends the run with a loss that is not finite."""
    logits = extreme_logits(kind, V)
    masked = np.random.default_rng(0).random(V) < 0.3
    masked[-max(1, V // 100) :] = True  # embedding rows without a token are at the end
    masked[V // 2] = False
    logits[masked] = NEG_INF
    ids = np.asarray(draw(jnp.asarray(np.tile(logits, (len(EDGES), 1))), jnp.asarray(EDGES)))
    assert np.all((ids >= 0) & (ids < V)) and not np.any(masked[ids])
    if kind == "one":
        assert np.all(ids == V // 2)


def test_the_last_moment_of_a_thousand_distributions():
    """Two sums of the same masses round differently: with u near 1, the target can lie past the second's end."""
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 2, (4000, 700)).astype(np.float32)
    logits[:, :256][:, ::7] = logits[:, 500:] = NEG_INF
    u = np.full(4000, EDGES[-1], np.float32)
    ids = np.asarray(draw(jnp.asarray(logits), jnp.asarray(u)))
    assert np.all(logits[np.arange(4000), ids] > NEG_INF / 2)
    assert ids.min() > 400


def test_the_draw_inverts_the_cumulative_distribution():
    """Compared with the same inversion in float64: an index off by one block would be another word."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (512, 1000)).astype(np.float32)
    u = rng.random(512).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    cumulative = np.cumsum(p / p.sum(-1, keepdims=True), -1)
    expected = (cumulative <= u[:, None]).sum(-1)
    margin = np.abs(cumulative - u[:, None]).min(-1)
    got = np.asarray(draw(jnp.asarray(logits), jnp.asarray(u)))
    assert np.mean(margin > 1e-5) > 0.9
    np.testing.assert_array_equal(got[margin > 1e-5], expected[margin > 1e-5])


def test_top_k_and_top_p_by_hand():
    """A filter that drops the likeliest token, or keeps one too many, samples from another distribution."""
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.97, 0.01, 0.01, 0.01]]))

    def kept(top_k, top_p):
        return (np.asarray(filter_logits(logits, top_k, top_p)) > NEG_INF / 2).tolist()

    assert kept(0, 1.0) == [[True] * 4, [True] * 4]
    assert kept(2, 1.0)[0] == [False, True, False, True]
    assert kept(0, 0.65) == [[False, True, False, True], [True, False, False, False]]
    assert kept(0, 0.75)[0] == [False, True, True, True]
    assert kept(0, 1e-6) == [[False, True, False, False], [True, False, False, False]]
    assert kept(3, 0.65)[0] == [False, True, False, True]


def test_recorded_logprobs_are_those_before_the_filter(tiny_tokenizer):
    """Log-probs after the filter are not comparable with the trainer's; or the filter is not applied."""
    config = tiny_config()
    params = random_params(config)
    sampler = make_sampler(tiny_tokenizer, config, top_k=3)
    ids = np.array([[5, 6, 7, 8]], np.int32)
    pool = sampler.prefill(sampler.weights(params), ids, np.array([4], np.int32))
    state = admit(sampler, sampler.new_state(1, 24), pool, np.array([0]), np.ones((1, 2), np.uint32), 16)
    state = jax.device_get(sampler.generate(sampler.weights(params), state, 1.0))
    model, at = nnx.merge(decoder.graphdef(config, jnp.float32), params), np.flatnonzero(state.mask[0])
    table = jax.nn.log_softmax(model.logits(model.hidden(state.ids)[0], 1.0, tiny_tokenizer.size))[0, at - 1]
    chosen = np.take_along_axis(np.asarray(table), state.ids[0, at, None], axis=1)
    np.testing.assert_allclose(state.logprobs[0, at], chosen[:, 0], atol=1e-5)
    assert len(at) >= 4 and np.all((table > chosen).sum(axis=1) < 3), "one of the three likeliest"
    assert np.mean(np.exp(table).max(axis=1)) < 0.9, "otherwise both distributions would be alike"


def test_keys_depend_on_the_rollout_alone():
    """Samples that share a key would be equal rollouts; a key that depends on the row would change with the batch."""
    words = [id_words("hotpot", "1"), id_words("hotpot", "2"), id_words("nq", "1"), id_words("hotpot", "1")]
    keys = row_keys(0, 5, words, [0, 0, 0, 1])
    assert keys.shape == (4, 2) and keys.dtype == np.uint32
    assert len({tuple(k) for k in keys.tolist()}) == 4
    for i in range(4):
        np.testing.assert_array_equal(row_keys(0, 5, [words[i]], [[0, 0, 0, 1][i]])[0], keys[i])
    assert not np.array_equal(row_keys(1, 5, words, [0] * 4), row_keys(0, 5, words, [0] * 4))
    assert not np.array_equal(row_keys(0, 6, words, [0] * 4), row_keys(0, 5, words, [0] * 4))
    assert not np.array_equal(id_words("ab", "c"), id_words("a", "bc"))

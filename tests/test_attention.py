"""The forms of attention against the plain definition: values and gradients, with and without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import one_device_mesh

from psearch_jax.config import MeshSection
from psearch_jax.models import attention
from psearch_jax.models.attention import QUERY_BLOCK, WHOLE_CHUNK, cached, causal, implementation_for
from psearch_jax.sharding import make_mesh


def plain(q, k, v, old=None, start=None):
    """Softmax over all scores, head by head, in float64."""
    B, T, N, H = q.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if old is not None:
        k, v = (np.concatenate([np.asarray(o, np.float64), new], axis=2) for o, new in zip(old, (k, v), strict=True))
    S = k.shape[2]
    out = np.zeros((B, T, N, H))
    for b in range(B):
        seen = np.tril(np.ones((T, T), bool))
        if old is not None:
            before = np.arange(S - T) < int(start[b])
            seen = np.concatenate([np.tile(before, (T, 1)), seen], axis=1)
        for n in range(N):
            kv = n // (N // k.shape[1])
            scores = np.where(seen, q[b, :, n] @ k[b, kv].T / np.sqrt(H), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, :, n] = weights / weights.sum(axis=1, keepdims=True) @ v[b, kv]
    return out


def draw(B=2, T=40, N=4, K=2, H=8, S=0, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, T, N, H)).astype(np.float32)
    kv = [rng.normal(size=(B, K, T, H)).astype(np.float32) for _ in range(2)]
    old = [rng.normal(size=(B, K, S, H)).astype(np.float32) for _ in range(2)] if S else None
    return q, *kv, old


@pytest.mark.parametrize("length", [1, 40, WHOLE_CHUNK, WHOLE_CHUNK + 1, 2 * QUERY_BLOCK + 130])
def test_blocked_attention(length):
    """A block whose queries see the wrong keys, or padding that is returned as an answer."""
    q, k, v, _ = draw(T=length)
    np.testing.assert_allclose(causal(q, k, v), plain(q, k, v), atol=2e-6)


@pytest.mark.parametrize("length", [1, 40, WHOLE_CHUNK + 30])
def test_attention_behind_a_cache(length):
    """Rows of different lengths that see each other's stale keys, in the first or in a later block."""
    q, k, v, old = draw(T=length, S=20)
    start = np.array([0, 13], np.int32)
    np.testing.assert_allclose(cached(q, k, v, old, start), plain(q, k, v, old, start), atol=2e-6)


def gradients(function, q, k, v):
    def total(q, k, v):
        return jnp.sum(jnp.sin(function(q, k, v)))

    return jax.grad(total, argnums=(0, 1, 2))(q, k, v)


def whole(q, k, v):
    """All scores at once, differentiable."""
    return attention._block(q, jnp.int32(0), k=k, v=v, old=None, start=None)


def test_gradients_of_blocked_attention():
    """A block's recomputation in the backward pass that differs from its forward pass."""
    q, k, v, _ = draw(T=WHOLE_CHUNK + 70)
    for ours, wanted in zip(gradients(causal, q, k, v), gradients(whole, q, k, v), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


@pytest.mark.parametrize(("length", "heads", "kv_heads", "size"), [(128, 4, 2, 128), (200, 4, 1, 64), (130, 2, 2, 16)])
def test_the_tpu_kernel(length, heads, kv_heads, size):
    """Padding to the kernel's widths that leaks into values or gradients, a missing scale, or heads paired wrongly."""
    q, k, v, _ = draw(T=length, N=heads, K=kv_heads, H=size)

    def splash(q, k, v):
        return attention._splash(q, k, v, interpret=True)

    np.testing.assert_allclose(splash(q, k, v), plain(q, k, v), atol=1e-5)
    for ours, wanted in zip(gradients(splash, q, k, v), gradients(whole, q, k, v), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel needs a GPU")
def test_the_gpu_kernel():
    """Axes in another order, or keys of other heads."""
    q, k, v, _ = draw(T=300, N=4, K=2, H=64)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    np.testing.assert_allclose(causal(*low, "cudnn").astype(np.float32), plain(q, k, v), atol=3e-2)


def test_the_form_follows_the_platform():
    """A kernel asked for where there is none."""
    platform = jax.devices()[0].platform
    wanted = {"cpu": "blocked", "gpu": "cudnn", "tpu": "splash"}[platform]
    assert implementation_for(one_device_mesh(), jnp.bfloat16) == wanted
    assert implementation_for(make_mesh(MeshSection(1, 1, 1), jax.devices()[:1]), jnp.float32) in ("blocked", "splash")

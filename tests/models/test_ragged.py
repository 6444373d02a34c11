"""Attention that reads each row up to its own length: in groups on a CPU, and the TPU kernel, interpreted."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import random_params, tiny_config
from test_attention import plain

from psearch_jax.models import decoder, ragged
from psearch_jax.models.attention import cached
from psearch_jax.models.backend import Backend
from psearch_jax.models.kv_cache import KVCache

LAYERS, LAYER, H = 3, 1, 128
BOUNDS = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}


def random_arrays(B, K, G, S, dtype, T, seed=0):
    """Random queries, the keys and values of T new tokens per row, and a cache."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, K * G, H), (B, K, T, H), (B, K, T, H), (LAYERS, B, K, S, H), (LAYERS, B, K, S, H)
    q, k, v, *old = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return 4 * q, k, v, KVCache.of(*old, jnp.dtype(dtype))


def by_definition(q, k, v, cache, start):
    return plain(q, k, v, (cache.k[LAYER], cache.v[LAYER]), start)


def nan_past_the_ends(cache, start):
    past_end = (np.arange(cache.positions) >= start[:, None])[None, :, None, :, None]
    return jax.tree.map(lambda x: jnp.where(past_end, jnp.asarray(jnp.nan, x.dtype), x), cache)


def by_kernel(q, k, v, cache, start, rows=None):
    work = ragged.list_work(start, cache, q.shape[1], q.shape[2])
    return ragged.attend(q, k, v, cache, jnp.int32(LAYER), start, rows, work, interpret=True)


@pytest.mark.parametrize(
    ("K", "G", "S", "dtype", "T"),
    [
        (1, 7, 1120, "bfloat16", 1),
        (1, 3, 1120, "bfloat16", 200),
        (2, 2, 416, "float32", 40),
        (4, 1, 96, "float32", 128),
    ],
)
def test_the_kernel_attends_to_each_row_up_to_its_end(K, G, S, dtype, T):
    """Its own rows, layer and heads, in any order; NaN past a row's end does not reach the output."""
    starts = np.array(sorted({min(end, S) for end in (0, 1, 64, 512, 513, S - 1, S)}), np.int32)
    rows = np.random.default_rng(2).permutation(len(starts) + 2).astype(np.int32)[: len(starts)]
    q, k, v, cache = random_arrays(len(starts), K, G, S, dtype, T)
    wanted = by_definition(q, k, v, cache, starts)
    cache = nan_past_the_ends(cache, starts)
    if T > 1:  # the rows in another order, between rows that nothing may read
        padded = [(0, 0), (0, 2), (0, 0), (0, 0), (0, 0)]
        cache = jax.tree.map(lambda x: jnp.full_like(jnp.pad(x, padded), 99).at[:, rows].set(x), cache)
    got = jax.jit(by_kernel)(q, k, v, cache, starts, rows if T > 1 else None)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=BOUNDS[dtype])


def test_a_row_of_the_call_without_a_row_of_the_cache():
    """-1 neither reads before the cache nor changes another row."""
    starts, rows = np.array([5, 0], np.int32), np.array([1, -1], np.int32)
    q, k, v, cache = random_arrays(2, 2, 2, 96, "float32", 40)
    got = jax.jit(by_kernel)(q, k, v, KVCache(cache.k[:, ::-1], cache.v[:, ::-1]), starts, rows)
    np.testing.assert_allclose(got, by_definition(q, k, v, cache, starts), atol=2e-5)


@pytest.mark.parametrize("budget", [1, 2**20])
def test_decoding_in_groups_is_decoding(budget, monkeypatch):
    """Rows of all lengths, in groups of one and of all; NaN past a row's end does not reach its neighbours' groups."""
    monkeypatch.setattr(cached, "GROUP_BYTES", budget)
    starts = np.array([0, 1, 255, 256, 300, 288], np.int32)
    q, k, v, cache = random_arrays(len(starts), 2, 2, 288, "float32", 1)
    starts = np.minimum(starts, cache.positions)
    wanted = by_definition(q, k, v, cache, starts)
    got = jax.jit(cached.decode_in_groups)(q, k, v, cache, jnp.int32(LAYER), starts)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize(("T", "cache_form"), [(1, "kernel"), (20, "kernel"), (1, "groups")])
def test_a_model_that_attends_with_it(monkeypatch, T, cache_form):
    """The states are those of the portable form; the kernel's work is listed once, not in each layer."""
    config = tiny_config(head_dim=H)
    params, rng = random_params(config, scale=0.1), np.random.default_rng(0)
    shape = (config.layers, 4 if T == 1 else 6, config.kv_heads, 64, H)
    cache = KVCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    ids, start = rng.integers(0, 400, (4, T)).astype(np.int32), np.array([0, 5, 33, 64], np.int32)
    rows = None if T == 1 else jnp.array([5, 0, 2, 3], jnp.int32)
    monkeypatch.setattr(ragged, "attend", functools.partial(ragged.attend, interpret=True))

    def run(backend):
        model = nnx.merge(decoder.graphdef(config, jnp.float32, backend=backend), params)
        return functools.partial(model.hidden, keep_kv=True, rows=rows)

    backend = replace(Backend(), cache=cache_form)
    if cache_form == "kernel":
        traced = jax.make_jaxpr(run(backend))(ids, cache, start)
        (layers,) = (equation for equation in traced.eqns if equation.primitive.name == "scan")
        assert "cumsum" in str(traced) and "cumsum" not in str(layers.params["jaxpr"])
    for x, y in zip(*(jax.tree.leaves(jax.jit(run(b))(ids, cache, start)) for b in (backend, Backend())), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)

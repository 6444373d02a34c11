"""int8 sampling: what is quantize and by how much; everything else stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import QWEN3, make_sampler, one_device_mesh, random_params, started, tiny_config
from runs import small_config

from psearch_jax.assembly import build
from psearch_jax.config import LearningSection, Lora
from psearch_jax.models import decoder, int8, lora
from psearch_jax.models.attention.cached import Keys, chunk_attention, decode
from psearch_jax.models.kv_cache import KVCache
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import make_optimizer
from psearch_jax.train.trainable import TrainingOptions

CONFIG = tiny_config(tied=False)


def widened(copy):
    """A copy with int8 kernels as plain float32 parameters."""
    flat = dict(nnx.to_flat_state(copy))
    for name, (inner, _) in lora.KERNELS.items():
        kernel, scale = flat["layers", name], flat.pop(("scales", f"{name}_scale")).get_value()
        scale = jnp.expand_dims(scale, tuple(range(1, 1 + len(inner))))
        flat["layers", name] = kernel.replace(kernel.get_value().astype(jnp.float32) * scale)
    return nnx.from_flat_state(flat)


def test_a_number_is_the_nearest():
    """Values are off by one step, scales are of the wrong axis, zeros are divided by, or a NaN disappears."""
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)
    x[1] *= 100
    x[2, :, 3] = 0
    number, scale = int8.quantize(jnp.asarray(x), (1,))
    assert number.dtype == jnp.int8 and scale.shape == (3, 7)
    assert np.all(np.abs(np.asarray(number) * scale[:, None] - x) <= 0.5001 * np.asarray(scale)[:, None])
    assert np.all(np.max(np.abs(number), axis=1)[np.asarray(scale) > 0] == int8.MAX_INT8)
    assert not np.any(number[2, :, 3]) and scale[2, 3] == 0
    x[0, 2, 1] = np.nan
    assert np.isnan(int8.quantize(jnp.asarray(x), (1,))[1][0, 1])


@pytest.mark.parametrize(
    ("dtype", "bound", "family"), [("float32", 1e-5, {}), ("bfloat16", 3e-2, {}), ("float32", 1e-5, QWEN3)]
)
def test_a_model_of_whole_numbers(dtype, bound, family):
    """A scale is applied to the wrong output, twice or never, or to a bias, a norm or an adapter."""
    adapters, config = Lora(2, 4.0), tiny_config(tied=False, **family)
    low = jax.tree.map(lambda x: x + 0.05, lora.init_adapters(config, adapters, 0))  # b starts at 0
    copy = int8.with_kernels(random_params(config), random_params(config))
    kinds = {"/".join(path): v.get_value().dtype for path, v in nnx.to_flat_state(copy)}
    assert {path for path, kind in kinds.items() if kind == jnp.int8} == {f"layers/{name}" for name in lora.KERNELS}
    ids = np.random.default_rng(1).integers(0, 400, (2, 20)).astype(np.int32)

    def hidden(params, **options):
        graph = decoder.graphdef(config, jnp.dtype(dtype), lora=adapters, **options)
        return np.asarray(nnx.merge(graph, lora.join_adapters(params, low)).hidden(ids)[0], np.float64)

    exact, expected = hidden(random_params(config)), hidden(widened(copy))
    ours = hidden(copy, int8=True)
    assert np.linalg.norm(ours - expected) <= bound * np.linalg.norm(expected)
    assert 1e-3 < np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("T", "S"), [(1, 64), (40, 64), (9, 576)])
def test_attention_behind_whole_numbers(T, S, transposed):
    """A key in the first or a later block gets the scale of another, or the chunk's own keys are scaled."""
    rng = np.random.default_rng(0)
    B, K, N, H = 3, 2, 4, 16
    q, *kv = (rng.normal(size=size).astype(np.float32) for size in ((B, T, N, H), (B, K, T, H), (B, K, T, H)))
    cache = KVCache.of(*(jnp.asarray(5 * rng.normal(size=(1, B, K, S, H))) for _ in range(2)), jnp.int8, transposed)
    k, v, *scales = (x[0] for x in (cache.k, cache.v, cache.k_scale, cache.v_scale))
    k = k.swapaxes(2, 3) if transposed else k
    wide = Keys(k * scales[0][..., None], v * scales[1][..., None])
    start = np.array([0, 13, S - 7], np.int32)
    for form in (chunk_attention, decode) if T == 1 else (chunk_attention,):
        ours = form(q, *kv, Keys(k.swapaxes(2, 3) if transposed else k, v, transposed, *scales), start)
        np.testing.assert_allclose(ours, form(q, *kv, wide, start), atol=1e-4)


@pytest.mark.parametrize(("T", "span", "rows"), [(1, None, None), (1, 32, None), (5, None, [2, 0])])
def test_a_model_behind_a_cache_of_whole_numbers(T, span, rows):
    """Where a GPU reads the cache, scales are of another layer, other rows or positions after the span."""
    rng, B = np.random.default_rng(0), len(rows) if rows else 3
    shape = (CONFIG.layers, 3, CONFIG.kv_heads, 64, CONFIG.head_dim)
    cache = KVCache.of(*(jnp.asarray(rng.normal(size=shape)) for _ in range(2)), jnp.int8)
    wide = KVCache(cache.k * cache.k_scale[..., None], cache.v * cache.v_scale[..., None])
    ids, start = rng.integers(0, 400, (B, T)).astype(np.int32), np.array([0, 31, 17], np.int32)[:B]
    model = nnx.merge(decoder.graphdef(CONFIG, jnp.float32), random_params(CONFIG))
    of_rows = None if rows is None else jnp.array(rows)
    hidden = [model.hidden(ids, c, start, keep_kv=True, span=span, rows=of_rows)[0] for c in (cache, wide)]
    np.testing.assert_allclose(*hidden, atol=1e-4)


def test_rollouts_by_whole_numbers(tiny_tokenizer):
    """Positions are written without scales, so later steps get wrong values; or the gap exceeds rounding error."""
    params, rng, rows = random_params(CONFIG, scale=0.1), np.random.default_rng(0), 4
    copy = int8.with_kernels(params, params)
    prompts = [rng.integers(3, 390, n).tolist() for n in (3, 9, 5, 12)]
    keys = rng.integers(0, 2**32, (rows, 2), np.uint32)
    forced, n = rng.integers(3, 390, (rows, 8)).astype(np.int32), np.array([8, 1, 0, 5], np.int32)

    def rolled(params, **options):
        sampler = make_sampler(tiny_tokenizer, CONFIG, **options)
        weights = sampler.weights(params)
        state = sampler.generate(weights, started(sampler, weights, prompts, keys, 64, 10), 1.0)
        return jax.device_get(sampler.generate(weights, sampler.extend(weights, state, forced, n, 10), 1.0))

    weights = rolled(copy, int8_weights=True)
    expected = rolled(widened(copy))
    np.testing.assert_array_equal(weights.ids, expected.ids)
    np.testing.assert_allclose(weights.logprobs, expected.logprobs, atol=1e-5)

    cached = rolled(params, int8_cache=True)
    graph, ids = decoder.graphdef(CONFIG, jnp.float32), cached.ids
    model = nnx.merge(graph, params)
    scored, _ = model.logprobs(model.hidden(ids[:, :-1])[0], ids[:, 1:], 1.0, tiny_tokenizer.size)
    gap = np.abs(np.pad(scored, ((0, 0), (1, 0))) - cached.logprobs)[cached.mask]
    assert cached.mask.sum() > 50 and 1e-6 < gap.mean() < 0.01 and gap.max() < 0.05, gap.mean()


def test_an_evaluation_reads_what_a_run_samples_from(tiny_policy):
    """A policy is evaluated in another precision than was requested, or than it was trained with."""
    config = small_config(tiny_policy, **{"model.int8_weights": True, "model.int8_cache": True})
    parts = build.from_path(config, str(tiny_policy))
    sampler, made = parts.collector.sampler, dict(nnx.to_flat_state(parts.sampling_copy()))
    planned = {path: (v.shape, v.dtype) for path, v in nnx.to_flat_state(sampler.abstract_params())}
    assert planned == {path: (v.shape, v.dtype) for path, v in made.items()}
    expected = dict(nnx.to_flat_state(int8.with_kernels(parts.params, parts.params)))
    for name in lora.KERNELS:
        for path in (("layers", name), ("scales", f"{name}_scale")):
            np.testing.assert_array_equal(made[path].get_value(), expected[path].get_value())
    assert sampler.new_state(2, 32).cache.v.dtype == jnp.int8


def test_the_base_of_adapters_stays_narrow(tiny_policy):
    """A float32 base of a 7B model needs 15 GB more than the plan counts, for the option that is to save memory."""
    fields = {"model.int8_weights": True, "model.lora_rank": 2, "model.dtype": "bfloat16"}
    run = build.training_run(small_config(tiny_policy, **fields, **{"model.sampling_dtype": "bfloat16"}))
    assert {x.dtype for x in jax.tree.leaves(run.learner.base)} == {jnp.dtype("bfloat16")}


def test_adapters_beside_whole_numbers(tiny_tokenizer):
    """The int8 copy changes the base that the learner shares, or differs from what a plan counts."""
    half, adapters, mesh = jnp.dtype("bfloat16"), Lora(2, 4.0), one_device_mesh()
    learning = LearningSection(micro_batch_rows=2, mini_batch_rollouts=4)
    optimizer = make_optimizer(learning, 10)
    learner = Learner(
        CONFIG,
        learning,
        optimizer,
        mesh,
        TrainingOptions(64, half, lora=adapters),
        temperature=1.0,
        n_ids=400,
        sampling_dtype=half,
        int8_sampling=True,
        base=jax.tree.map(lambda x: x.astype(half), random_params(CONFIG)),
    )
    copy = learner.sampling_copy(lora.init_adapters(CONFIG, adapters, 0))
    sampler = make_sampler(tiny_tokenizer, CONFIG, dtype=half, lora=adapters, int8_weights=True)
    planned = nnx.to_flat_state(sampler.abstract_params())
    made = dict(nnx.to_flat_state(copy))
    assert {path: (v.shape, v.dtype) for path, v in planned} == {path: (v.shape, v.dtype) for path, v in made.items()}
    assert made["layers", "q_kernel"].dtype == jnp.int8 and made["embedding",].dtype == half
    assert {x.dtype for x in jax.tree.leaves(learner.base)} == {half}

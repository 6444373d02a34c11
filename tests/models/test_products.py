"""Matrix products with 16-bit operands and float32 accumulation."""

import re
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_sampler, one_device_mesh, random_params, tiny_config

from psearch_jax.config import LearningSection, Lora
from psearch_jax.models import decoder, lora, transposed, vocabulary
from psearch_jax.models.attention import implementation_for
from psearch_jax.models.products import dense, product, product_left
from psearch_jax.rollout.copy import SamplingCopy, untie_for_sampling
from psearch_jax.rollout.sampler import SamplerShapes
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.runtime import platforms
from psearch_jax.sharding import stand_in
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import make_optimizer
from psearch_jax.train.trainable import TrainingOptions


def operands(kernel_dtype):
    x, w, g = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(6, 96), (96, 40), (6, 40)]))
    return x, w.astype(kernel_dtype), g


@pytest.fixture
def with_instructions(monkeypatch):
    """Pretends that this CPU has instructions for 16-bit products."""
    monkeypatch.setattr(platforms, "cpu_multiplies", lambda dtype: True)


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("kernel_dtype", [jnp.float32, jnp.bfloat16])
def test_operands_are_rounded_once_and_sums_are_float32(kernel_dtype, instructions, monkeypatch):
    """A product that also rounds its sums, a backward pass that multiplies in another precision, or operands that are
    not rounded on a CPU without 16-bit instructions."""
    monkeypatch.setattr(platforms, "cpu_multiplies", lambda dtype: instructions)
    x, w, g = operands(kernel_dtype)
    half = jnp.bfloat16
    low = [a.astype(half).astype(jnp.float32) for a in (x, w, g)]
    value, (of_x, of_w) = jax.jit(lambda x, w, g: with_gradients(x, w, g))(x, w, g)
    assert value.dtype == of_x.dtype == jnp.float32 and of_w.dtype == w.dtype
    np.testing.assert_allclose(value, low[0] @ low[1], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(of_x, low[2] @ low[1].T, rtol=1e-5, atol=1e-4)
    exact = (low[0].T @ low[2]).astype(w.dtype).astype(jnp.float32)
    np.testing.assert_allclose(of_w.astype(jnp.float32), exact, rtol=1e-2 if kernel_dtype == half else 1e-5, atol=1e-4)


def test_the_gradient_of_a_master_weight_is_not_rounded():
    """With 16-bit activations a kernel's gradient would be rounded to 16 bits, and summed in them over devices."""
    x, w, g = operands(jnp.float32)
    x, g = x.astype(jnp.bfloat16), g.astype(jnp.bfloat16)
    value, (of_x, of_w) = jax.jit(lambda x, w, g: with_gradients(x, w, g))(x, w, g)
    assert value.dtype == of_x.dtype == jnp.bfloat16 and of_w.dtype == jnp.float32
    plain, (of_plain, of_rounded) = with_gradients(x, w.astype(jnp.bfloat16), g)
    np.testing.assert_array_equal(value, plain)
    np.testing.assert_array_equal(of_x, of_plain)
    exact = x.astype(jnp.float32).T @ g.astype(jnp.float32)
    np.testing.assert_allclose(of_w, exact, rtol=1e-5, atol=1e-5)
    assert jnp.abs(of_rounded - exact).max() > 1e-3  # the assertion above would notice a rounded gradient


@pytest.mark.parametrize("kind", ["rounded", "mixed", "frozen"])
def test_dots_stores_every_product(kind):
    """With remat=dots the backward pass would run all products of the forward pass again, as with remat=full."""
    x, w, _ = operands(jnp.float32)
    w, half = (w @ w.T).astype(jnp.bfloat16 if kind == "frozen" else jnp.float32), jnp.bfloat16
    x = x.astype(half) if kind == "mixed" else x

    def loss(x, w):
        for _ in range(2):
            stored = transposed.bits(w.T) if kind == "frozen" else None
            x = jax.nn.silu(product(x, transposed.bits(w) if kind == "frozen" else w, half, stored))
        return x.astype(jnp.float32).sum()

    def products(function):
        gradient = jax.grad(function, argnums=0 if kind == "frozen" else (0, 1))
        return str(jax.make_jaxpr(gradient)(x, w)).count("dot_general")

    stored, anew = (jax.checkpoint(loss, policy=decoder._stored(remat)) for remat in ("dots", "full"))
    assert products(stored) == products(loss) < products(anew)


def with_gradients(x, w, g):
    value, pull = jax.vjp(lambda x, w: product(x, w, jnp.bfloat16), x, w)
    return value, pull(g)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_with_the_kernel_on_the_left_is_the_product(dtype):
    """A transposed kernel that gives other products, or activations that only decoding leaves unrounded."""
    x, w, _ = operands(jnp.float32)
    w = w.astype(dtype).astype(jnp.float32)
    transposed = jax.jit(lambda x, w: product_left(x, w, dtype))(x, w.T)
    np.testing.assert_allclose(transposed, x.astype(dtype).astype(jnp.float32) @ w, rtol=1e-5, atol=1e-4)


def test_a_product_with_the_kernel_on_the_left_is_compiled_as_one():
    """A compiler that swaps the operands back: a decoding step with few rows would first copy every kernel."""
    x, transposed = jnp.ones((4, 96)), jnp.ones((40, 96))
    text = jax.jit(lambda x, w: product_left(x, w, jnp.float32).sum()).lower(x, transposed).compile().as_text()
    assert "f32[40,4]" in text and "f32[96,4]" in text


def test_instructions_are_read_off_the_processor(tmp_path):
    """16-bit products on a CPU that has to convert every operand, or none on a CPU that does not."""
    multiplies = {"avx2 fma": False, "avx512f avx512_bf16 avx512_vnni": True, "fp asimd bf16 i8mm": True}
    for i, (flags, expected) in enumerate(multiplies.items()):
        file = tmp_path / str(i)
        file.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        assert platforms.cpu_multiplies(jnp.bfloat16, file) is expected
        assert platforms.cpu_multiplies(jnp.float32, file)
    assert platforms.cpu_multiplies(jnp.bfloat16, tmp_path / "none")


def test_equal_dtypes_are_a_plain_product():
    """A float32 model whose operands are rounded."""
    x, w, _ = operands(jnp.float32)
    np.testing.assert_array_equal(product(x, w, jnp.float32), jnp.matmul(x, w))


def test_gradients_of_narrow_kernels_are_those_of_plain_products():
    """The gradient of an adapter's first matrix is transposed, or is computed by the slow product again."""
    x, kernel, g = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 3, 96), (96, 4), (4,)]))

    def gradients(narrow):
        def loss(x, kernel):
            return jnp.sum(g * jnp.sin(dense(x, kernel, jnp.float32, narrow=narrow)))

        return jax.jit(jax.grad(loss, (0, 1)))

    for a, b in zip(gradients(True)(x, kernel), gradients(False)(x, kernel), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    compiled = [gradients(narrow).lower(x, kernel).compile().as_text() for narrow in (True, False)]
    assert ["f32[96,4]{1,0} dot(" in text for text in compiled] == [False, True]


def test_bfloat16_on_a_cpu_is_closer_to_float32_than_bfloat16_activations():
    """If the CPU form is not used, log-probs are as far off as when every activation is rounded."""
    config, mesh = tiny_config(tied=True), one_device_mesh()
    params = random_params(config, scale=0.1)
    ids = np.random.default_rng(0).integers(3, 300, (2, 48)).astype(np.int32)

    def logits(dtype, attention):
        model = nnx.merge(decoder.graphdef(config, dtype, attention=attention), params)
        return model.logits(model.hidden(ids)[0], 1.0, config.vocab_rows)

    exact = logits(jnp.float32, "blocked")
    form = implementation_for(mesh, jnp.bfloat16)
    mixed, rounded = (np.abs(logits(jnp.bfloat16, f) - exact).mean() for f in (form, "blocked"))
    assert form == "rowwise" and 0 < mixed < 0.8 * rounded


@pytest.mark.parametrize(("tied", "remat", "block"), [(True, "full", 60), (False, "none", 60), (True, "none", 416)])
def test_gradients_with_transposed_copies_are_those_without(tied, remat, block, monkeypatch):
    """A transpose of the wrong axes or of the wrong matrix: the loss falls, but the gradients are wrong."""
    monkeypatch.setattr(vocabulary, "BLOCK", block)
    config, mesh, adapters = tiny_config(tied=tied), one_device_mesh(), Lora(4, 8.0)
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config, scale=0.1))
    params = jax.tree.map(lambda x: x + 0.01, lora.init_adapters(config, adapters, 0))
    ids = np.random.default_rng(0).integers(3, 300, (2, 48)).astype(np.int32)
    form = implementation_for(mesh, jnp.bfloat16)

    def gradients(base, stored):
        graph = decoder.graphdef(config, jnp.bfloat16, remat, form, lora=adapters, transposed=stored)

        def loss(params):
            model = nnx.merge(graph, base, params)
            return model.logprobs(model.hidden(ids)[0], ids, 1.0, 300)[0].sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    expected, actual = gradients(base, False), gradients(transposed.with_transposed(base, head=True), True)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3 * np.abs(a).max())


def test_no_stack_of_frozen_kernels_is_converted_to_float32(with_instructions):
    """An update that first copies all kernels to float32, as a loop over bfloat16 slices does on a CPU."""
    trained = learner(jnp.bfloat16, Lora(4, 8.0))
    programs = trained.traced(jax.eval_shape(lambda: trained.base))["accumulate"]
    text = next(iter(programs.values()))().lower().compile().as_text()
    config = tiny_config(tied=True)
    for shape in {(config.width, config.mlp), (config.mlp, config.width)}:
        stack = ",".join(map(str, (config.layers, *shape)))
        assert f"u16[{stack}]" in text and f"f32[{stack}]" not in text


def test_frozen_weights_that_are_multiplied_in_float32_are_converted_once(monkeypatch):
    """An update that converts every frozen matrix again for each micro-batch, which takes a tenth of its time."""
    monkeypatch.setattr(platforms, "cpu_multiplies", lambda dtype: False)
    trained = learner(jnp.bfloat16, Lora(4, 8.0))
    assert {x.dtype for x in jax.tree.leaves(trained.base)} == {jnp.dtype("bfloat16")}
    programs = trained.traced(jax.eval_shape(lambda: trained.base))["accumulate"]
    assert "bf16" not in next(iter(programs.values()))().lower().compile().as_text()
    with stand_in():
        other = learner(jnp.bfloat16, Lora(4, 8.0))
    assert other._frozen_inputs is other.base, "a plan for a GPU includes the copy that only a CPU makes"


def learner(dtype, adapters):
    config, section = tiny_config(tied=True), LearningSection(micro_batch_rows=2)
    return Learner(
        config,
        section,
        make_optimizer(section, 10),
        one_device_mesh(),
        TrainingOptions(64, dtype, lora=adapters),
        temperature=1.0,
        n_ids=300,
        sampling_dtype=dtype,
        base=jax.tree.map(lambda x: x.astype(dtype), random_params(config)) if adapters else None,
    )


def test_transposes_are_made_only_for_a_frozen_base_in_16_bits(with_instructions):
    """Twice the memory in float32 or full training, or transposes in what the reference and the sampler receive."""
    half = learner(jnp.bfloat16, Lora(4, 8.0))
    assert "transposed" in half._frozen_inputs and "transposed" not in half.base
    assert half.reference_copy(None) is half.base
    params = lora.init_adapters(tiny_config(tied=True), Lora(4, 8.0), 0)
    assert "transposed" not in half.sampling_copy(params)
    wide = learner(jnp.float32, Lora(4, 8.0))
    for base_array, input_array in zip(*map(jax.tree.leaves, (wide.base, wide._frozen_inputs)), strict=True):
        assert base_array is input_array
    assert learner(jnp.bfloat16, None)._frozen_inputs is None


def test_a_separate_head_samples_with_the_log_probs_of_the_tied_one(tiny_tokenizer, with_instructions):
    """A head that is transposed wrongly, or a copy that the sampler of the same config rejects."""
    config, mesh, half = tiny_config(tied=True), one_device_mesh(), jnp.dtype("bfloat16")
    weights = jax.tree.map(lambda x: x.astype(half), random_params(config, scale=0.1))
    make_copy = SamplingCopy(weights, None, half, mesh, in_int8=False, trained=False)
    copy = make_copy(weights)
    assert make_copy(weights)["lm_head"].get_value() is copy["lm_head"].get_value(), "a frozen head is made once"
    assert copy["embedding"].get_value() is weights["embedding"].get_value()

    def log_probs(shape, params):
        sampler = make_sampler(tiny_tokenizer, shape, mesh, dtype=half)
        abstract = jax.tree.map(lambda x: (x.shape, x.dtype), sampler.abstract_params())
        assert abstract == jax.tree.map(lambda x: (x.shape, x.dtype), params)
        rows, ids = 4, np.random.default_rng(0).integers(3, 300, (4, 16)).astype(np.int32)
        pool = sampler.prefill(sampler.weights(params), ids, np.full(rows, 16, np.int32))
        keys = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)
        state = sampler.admit(sampler.new_state(rows, 48), pool, np.arange(rows, dtype=np.int32), keys, 8, 48)
        state = sampler.generate(sampler.weights(params), state, 1.0)
        return np.asarray(state.ids), np.asarray(state.logprobs)

    tied, untied = log_probs(config, weights), log_probs(untie_for_sampling(config, mesh, half), copy)
    np.testing.assert_array_equal(untied[0], tied[0])
    np.testing.assert_allclose(untied[1], tied[1], atol=1e-4)
    assert np.any(tied[1] < 0)


@pytest.mark.parametrize("instructions", [True, False])
def test_prompts_and_passages_read_the_weights_of_each_layer(instructions, tiny_tokenizer, monkeypatch):
    """Layers in another order, swapped axes or another call's weights: every cached key after the first layer is
    wrong, and no rollout fails."""
    monkeypatch.setattr(platforms, "cpu_multiplies", lambda dtype: instructions)
    config, rows = tiny_config(tied=False), 4
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config, scale=0.1))
    sampler = make_sampler(tiny_tokenizer, config, dtype=jnp.bfloat16, unstacked_decoding=True)
    rng = np.random.default_rng(0)
    ids, more = (rng.integers(3, 300, (rows, n)).astype(np.int32) for n in (16, 8))
    keys, every = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2), np.arange(rows, dtype=np.int32)

    def caches(weights):
        pool = sampler.prefill(weights, ids, np.full(rows, 16, np.int32))
        state = sampler.admit(sampler.new_state(rows, 48), pool, every, keys, 8, 48)
        state = sampler.extend(weights, state, more, np.full(rows, 8, np.int32), 8)
        extended = np.asarray(state.cache.k[..., :23])
        emptied = replace(state, cache=jax.tree.map(jnp.zeros_like, state.cache))
        refreshed = sampler.refresh(weights, emptied, every, 0, 24)
        return np.asarray(pool.cache.k), extended, np.asarray(refreshed.cache.k[..., :23])

    weights = sampler.weights(params)
    for actual, expected in zip(caches(weights), caches(SamplingWeights(params, None)), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-2 * np.abs(expected).max())
    zeros = jax.tree.map(jnp.zeros_like, weights.unstacked)
    assert all(np.all(keys == 0) for keys in caches(weights._replace(unstacked=zeros))), "the stacks are read instead"


def test_sampling_in_16_bits_converts_no_stack_and_no_embedding(tiny_tokenizer, with_instructions):
    """XLA converts what a CPU cannot slice in 16 bits: a call would first copy all kernels, or the embedding of every
    token, to float32, which took half of the time that a passage takes to read."""
    config, rows, width = tiny_config(tied=False), 4, 24
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config))
    sampler = make_sampler(tiny_tokenizer, config, dtype=jnp.bfloat16, unstacked_decoding=True)
    shapes = SamplerShapes(rows, 48, rows, rows, (width,), (width,), (48,))
    programs = sampler.programs(shapes, sampler.weights(params), suspends=True)
    named = {program.name: program for program in programs}
    texts = [
        named[name].compile(named[name].widths[0]).as_text() for name in ("prefill", "extend", "refresh", "generate")
    ]
    for text in texts:
        stored = set(re.findall(r"= (\w+\[[\d,]+\])\S* (?:parameter|fusion|copy|convert)\(", without_fused(text)))
        assert {f"bf16[{config.width},{config.mlp}]", f"bf16[{config.vocab_rows},{config.width}]"} <= stored
        assert f"f32[{config.layers},{config.width},{config.mlp}]" not in stored
        assert f"f32[{config.vocab_rows},{config.width}]" not in stored


def without_fused(text: str) -> str:
    """A compiled program without the bodies of its fusions, whose values are not stored."""
    return "\n".join(part for part in text.split("\n\n") if not re.match(r"%(fused|wrapped)_\w*computation", part))


def test_only_a_cpu_in_16_bits_samples_with_a_separate_head():
    """A float32 sampler, or full training on another platform, that stores the embedding twice."""
    config, mesh, weights = tiny_config(tied=True), one_device_mesh(), random_params(tiny_config(tied=True))
    assert untie_for_sampling(config, mesh, jnp.float32) == config
    assert SamplingCopy(weights, None, jnp.dtype("float32"), mesh, in_int8=False, trained=False)(weights) is weights
    accelerator = mock.Mock(size=1, devices=np.array([mock.Mock(platform="gpu")]))
    assert untie_for_sampling(config, accelerator, jnp.bfloat16) == config
    assert not transposed.multiplies_slowly_transposed(accelerator, jnp.bfloat16)

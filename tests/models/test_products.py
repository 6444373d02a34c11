"""Matrix products with 16-bit operands and float32 accumulation, and the compiler workarounds around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.models.products import dense, product
from psearch_jax.runtime import platforms


def operands(kernel_dtype):
    x, w, g = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(6, 96), (96, 40), (6, 40)]))
    return x, w.astype(kernel_dtype), g


def with_gradients(x, w, g):
    value, pull = jax.vjp(lambda x, w: product(x, w, jnp.bfloat16), x, w)
    return value, pull(g)


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("kernel_dtype", [jnp.float32, jnp.bfloat16])
def test_operands_are_rounded_once_and_sums_are_float32(kernel_dtype, instructions, monkeypatch):
    """In both passes, with and without the processor's instructions for 16 bits."""
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
    """With 16-bit activations, devices add their parts of a kernel's gradient in float32."""
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_with_the_kernel_on_the_left_is_the_product(dtype):
    """And XLA compiles it with the kernel on the left: it does not swap the operands back."""
    x, w, _ = operands(jnp.float32)
    w = w.astype(dtype).astype(jnp.float32)
    function = jax.jit(lambda x, w: dense(x[None], w, dtype, left=True)[0])
    np.testing.assert_allclose(function(x, w.T), x.astype(dtype).astype(jnp.float32) @ w, rtol=1e-5, atol=1e-4)
    text = function.lower(x, w.T).compile().as_text()
    assert "f32[40,6]" in text and "f32[96,6]" in text


def test_instructions_are_read_off_the_processor(tmp_path):
    """16-bit products only on a CPU that has instructions for them; float32 on all."""
    multiplies = {"avx2 fma": False, "avx512f avx512_bf16 avx512_vnni": True, "fp asimd bf16 i8mm": True}
    for i, (flags, expected) in enumerate(multiplies.items()):
        file = tmp_path / str(i)
        file.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        assert platforms.cpu_multiplies(jnp.bfloat16, file) is expected
        assert platforms.cpu_multiplies(jnp.float32, file)
    assert platforms.cpu_multiplies(jnp.bfloat16, tmp_path / "none")


def compile_text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_xla_still_swaps_the_operands_of_a_plain_product():
    """If this fails, XLA for CPUs keeps a kernel on the left by itself: the barriers of `multiply_left` can go."""
    if jax.default_backend() != "cpu":
        pytest.skip("the workaround is for CPUs")
    x, left = jnp.ones((4, 96)), jnp.ones((40, 96))
    assert "f32[40,4]" not in compile_text(lambda x, w: jnp.matmul(w, x.T).T.sum(), x, left), "multiply_left"

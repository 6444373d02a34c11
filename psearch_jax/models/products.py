"""Products with weights: in one dtype, or on a CPU with 16-bit operands and everything else in float32.

A CPU with bfloat16 instructions multiplies 16-bit operands about twice as fast as float32, with float32 sums. But
16-bit results, 16-bit elementwise work, and products of a 16-bit with a float32 operand are slower there than float32,
because XLA converts each value. So on a CPU activations stay in float32 and only operands are rounded, in the forward
and the backward pass. A CPU without such instructions multiplies the rounded operands as float32.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax.models import workarounds
from psearch_jax.runtime import platforms


def precision(dtype: Any) -> contextlib.AbstractContextManager:
    """The precision of products traced inside: full float32 for float32, the device's default for 16 bits.

    By default a TPU multiplies float32 as bfloat16 and a GPU since Ampere as TF32, with 8 and 11 bits. A log-prob that
    is right to 1e-4 on a CPU would be right to 1e-2 there. Products of a gradient use the forward product's precision.
    """
    return jax.default_matmul_precision("highest") if jnp.dtype(dtype) == jnp.float32 else contextlib.nullcontext()


def dense(
    x: jax.Array, kernel: jax.Array, dtype: Any, bias: jax.Array | None = None, contracted: int = 1, left: bool = False
) -> jax.Array:
    """x [B, T, *in] times kernel [*in, *out], with operands in `dtype`, as one product of two matrices.

    XLA's CPU backend uses its fast matrix product only for this form, not for an einsum over more dimensions.

    Args:
      contracted: the number of axes in `in`.
      left: the kernel is stored as [*out, *in], for `workarounds.multiply_left`.
    """
    B, T = x.shape[:2]
    inputs = math.prod(x.shape[2:])
    outputs = kernel.shape[:-contracted] if left else kernel.shape[contracted:]
    x2 = x.reshape(B * T, inputs)
    if left:
        out = workarounds.multiply_left(round_to(x2, dtype), kernel.reshape(-1, inputs))
    else:
        out = product(x2, kernel.reshape(inputs, -1), dtype)
    out = out.reshape(B, T, *outputs)
    return out if bias is None else out + bias.astype(x.dtype)


def product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """x [M, K] times kernel [K, N], with operands in `dtype`; the result is in x's dtype.

    If x is wider than `dtype`, operands are rounded and sums are float32, also in the backward pass. The gradient of a
    kernel wider than `dtype` is never rounded to it, so that devices exchange their parts of its sum in float32.
    """
    if x.dtype == kernel.dtype == dtype:
        return jnp.matmul(x, kernel)
    return _product(x, kernel, jnp.dtype(dtype))


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """x rounded to the values of a dtype, in float32. XLA may remove a conversion there and back, but not this."""
    wide, kind = x.astype(jnp.float32), jnp.finfo(dtype)
    return wide if x.dtype == dtype else jax.lax.reduce_precision(wide, kind.nexp, kind.nmant)


def _multiply(x: jax.Array, kernel: jax.Array, dtype: Any, out: Any) -> jax.Array:
    """The product of operands rounded to `dtype`, in the dtype `out`."""
    if x.dtype == dtype or platforms.cpu_multiplies(dtype):
        return jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=out)
    return jnp.matmul(round_to(x, dtype), round_to(kernel, dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    return _multiply(x, kernel, dtype, x.dtype)


def _forward(x: jax.Array, kernel: jax.Array, dtype: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not by `_product`, which would hide the product from remat=dots.
    return _multiply(x, kernel, dtype, x.dtype), (x, kernel)


def _backward(dtype: Any, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    is_mixed = x.dtype != dtype and platforms.cpu_multiplies(dtype)  # 16-bit products of a CPU
    transposed = workarounds.store_transposed(kernel.astype(dtype)) if is_mixed else kernel.T
    dx = _multiply(gradient, transposed, dtype, x.dtype)
    d_kernel = _multiply(x.T, gradient, dtype, jnp.float32 if is_mixed else kernel.dtype)
    return dx, d_kernel.astype(kernel.dtype)


_product.defvjp(_forward, _backward)

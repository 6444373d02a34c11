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

from psearch_jax.runtime import platforms


def precision(dtype: Any) -> contextlib.AbstractContextManager:
    """The precision of products traced inside: full float32 for float32, the device's default for 16 bits.

    By default a TPU multiplies float32 as bfloat16 and a GPU since Ampere as TF32, with 8 and 11 bits. A log-prob that
    is right to 1e-4 on a CPU would be right to 1e-2 there. Products of a gradient use the forward product's precision.
    """
    return jax.default_matmul_precision("highest") if jnp.dtype(dtype) == jnp.float32 else contextlib.nullcontext()


def dense(
    x: jax.Array,
    kernel: jax.Array,
    dtype: Any,
    bias: jax.Array | None = None,
    contracted: int = 1,
    scale: jax.Array | None = None,
    transposed: jax.Array | None = None,
    narrow: bool = False,
) -> jax.Array:
    """x [B, T, *in] times kernel [*in, *out], with operands in `dtype`, as one product of two matrices; an int8 kernel
    has a `scale` [*out]. `transposed` is as in `product`. `narrow` is for kernels with few outputs on a CPU.

    XLA's CPU backend uses its fast matrix product only for this form, not for an einsum over more dimensions.
    """
    B, T = x.shape[:2]
    inputs, outputs = math.prod(kernel.shape[:contracted]), kernel.shape[contracted:]
    x2, kernel = x.reshape(B * T, inputs), kernel.reshape(inputs, -1)
    if narrow and x.dtype == kernel.dtype == dtype:
        out = _narrow_product(x2, kernel)
    elif scale is None:
        out = product(x2, kernel, dtype, transposed)
    else:
        out = jnp.matmul(x2.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)
        out = (out * scale.reshape(-1)).astype(x.dtype)
    out = out.reshape(B, T, *outputs)
    return out if bias is None else out + bias.astype(x.dtype)


def dense_left(
    x: jax.Array, left: jax.Array, dtype: Any, bias: jax.Array | None = None, contracted: int = 1
) -> jax.Array:
    """`dense` for a kernel that is stored as [*out, *in]."""
    B, T = x.shape[:2]
    outputs, inputs = left.shape[:-contracted], math.prod(left.shape[-contracted:])
    out = product_left(x.reshape(B * T, inputs), left.reshape(-1, inputs), dtype).reshape(B, T, *outputs)
    return out if bias is None else out + bias.astype(x.dtype)


def product(x: jax.Array, kernel: jax.Array, dtype: Any, transposed: jax.Array | None = None) -> jax.Array:
    """x [M, K] times kernel [K, N], with operands in `dtype`; the result is in x's dtype.

    If x is wider than `dtype`, operands are rounded and sums are float32, also in the backward pass. The gradient of a
    kernel wider than `dtype` is never rounded to it, so that devices exchange their parts of its sum in float32.

    Args:
      transposed: a stored copy [N, K] of a frozen kernel (models/transposed.py), for the backward pass; the kernel
        then gets no gradient, and both may be passed as their `bits`.
    """
    if transposed is not None:
        return _frozen_product(x, kernel, transposed, jnp.dtype(dtype))
    if x.dtype == kernel.dtype == dtype:
        return jnp.matmul(x, kernel)
    if x.dtype == dtype:
        return _mixed_product(x, kernel, jnp.dtype(dtype))
    return _rounded_product(x, kernel, jnp.dtype(dtype))


def product_left(x: jax.Array, left: jax.Array, dtype: Any) -> jax.Array:
    """x [M, K] times the transpose of a float32 kernel that is stored as `left` [N, K], for a few rows on a CPU.

    XLA's CPU backend first copies the second operand of every product into another layout. If the kernel were second,
    a product of a few rows would be mostly copying; so here the rows are second. The barriers keep XLA from merging
    neighbouring operations into the product, which would swap the operands again.
    """
    operand = jax.lax.optimization_barrier(rounded(x, dtype).T)
    return jax.lax.optimization_barrier(jnp.matmul(left, operand)).T


@jax.custom_vjp
def _narrow_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [M, K] times kernel [K, r], for a small r on a CPU.

    XLA's CPU backend takes six times as long for x^T [K, M] times a gradient [M, r] as for the transpose of that
    product. The barrier keeps XLA from transposing it back.
    """
    return jnp.matmul(x, kernel)


def _narrow_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.matmul(x, kernel), (x, kernel)


def _narrow_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    return jnp.matmul(gradient, kernel.T), jax.lax.optimization_barrier(jnp.matmul(gradient.T, x)).T


_narrow_product.defvjp(_narrow_forward, _narrow_backward)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x rounded to the values of a dtype, in float32. XLA may remove a conversion there and back, but not this."""
    wide, kind = x.astype(jnp.float32), jnp.finfo(dtype)
    return wide if x.dtype == dtype else jax.lax.reduce_precision(wide, kind.nexp, kind.nmant)


def _multiplied(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """The product of operands rounded to `dtype`, in float32."""
    if platforms.cpu_multiplies(dtype):
        return jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)
    return jnp.matmul(rounded(x, dtype), rounded(kernel, dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounded_product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    return _multiplied(x, kernel, dtype)


def _forward(x: jax.Array, kernel: jax.Array, dtype: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not by `_rounded_product`, which would hide the product from remat=dots.
    return _multiplied(x, kernel, dtype), (x, kernel)


def _backward(dtype: Any, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    dx, d_kernel = _multiplied(gradient, kernel.T, dtype), _multiplied(x.T, gradient, dtype)
    return dx, d_kernel.astype(kernel.dtype)


_rounded_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mixed_product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    return jnp.matmul(x, kernel.astype(dtype))


def _mixed_forward(x: jax.Array, kernel: jax.Array, dtype: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.matmul(x, kernel.astype(dtype)), (x, kernel)  # as in _forward, visible to remat=dots


def _mixed_backward(
    dtype: Any, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    dx = jnp.matmul(gradient, kernel.astype(dtype).T)
    return dx, jnp.matmul(x.T, gradient, preferred_element_type=kernel.dtype)


_mixed_product.defvjp(_mixed_forward, _mixed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _frozen_product(x: jax.Array, kernel: jax.Array, transposed: jax.Array, dtype: Any) -> jax.Array:
    return _rounded_product(x, from_bits(kernel), dtype)


def _frozen_forward(x: jax.Array, kernel: jax.Array, transposed: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _multiplied(x, from_bits(kernel), dtype), transposed


def _frozen_backward(dtype: Any, transposed: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    # Convert only here: a loop over layers would store a conversion from the forward pass for the backward pass.
    return _rounded_product(gradient, from_bits(transposed), dtype), None, None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


def bits(x: jax.Array) -> jax.Array:
    """The bits of a bfloat16 array as uint16; an array of another dtype as it is.

    XLA's CPU backend cannot slice bfloat16: in every call it converts a stack of kernels to float32 before the loop
    that takes one layer's kernel from it. It slices integers directly.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
    """The inverse of `bits`."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x

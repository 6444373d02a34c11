"""Products with weights: in one dtype, or on a CPU with 16-bit operands and everything around them in float32.

A CPU with bfloat16 instructions multiplies 16-bit operands about twice as fast as float32, into float32 sums. Results
in 16 bits, elementwise work in 16 bits, and products of a 16-bit with a float32 operand are all slower than float32
there, because XLA converts each value. So on a CPU activations stay in float32 and only operands are rounded, in the
forward and the backward pass. On a CPU without such instructions the rounded operands are multiplied as float32.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from psearch_jax import platforms


def precision(dtype: Any) -> contextlib.AbstractContextManager:
    """What is asked of a device for the products traced inside: float32 as float32, 16 bits as it multiplies them.

    Unasked, a TPU multiplies float32 as bfloat16 and a GPU from Ampere on as TF32, with 8 and 11 bits; a log-prob that
    is right to 1e-4 on a CPU would there be right to 1e-2. A gradient's products ask for what their forward asked for.
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
) -> jax.Array:
    """x [B, T, *in] times kernel [*in, *out] in products of `dtype`, as one product of two matrices; in int8 with a
    `scale` [*out]. `transposed` is as in `product`.

    XLA's CPU backend reaches its fast matrix product only in this form, not through an einsum over more dimensions.
    """
    B, T = x.shape[:2]
    inputs, outputs = math.prod(kernel.shape[:contracted]), kernel.shape[contracted:]
    x2, kernel = x.reshape(B * T, inputs), kernel.reshape(inputs, -1)
    if scale is None:
        out = product(x2, kernel, dtype, transposed)
    else:
        out = jnp.matmul(x2.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)
        out = (out * scale.reshape(-1)).astype(x.dtype)
    out = out.reshape(B, T, *outputs)
    return out if bias is None else out + bias.astype(x.dtype)


def dense_across(
    x: jax.Array, across: jax.Array, dtype: Any, bias: jax.Array | None = None, contracted: int = 1
) -> jax.Array:
    """`dense` by a kernel that is stored as [*out, *in]."""
    B, T = x.shape[:2]
    outputs, inputs = across.shape[:-contracted], math.prod(across.shape[-contracted:])
    out = product_across(x.reshape(B * T, inputs), across.reshape(-1, inputs), dtype).reshape(B, T, *outputs)
    return out if bias is None else out + bias.astype(x.dtype)


def product(x: jax.Array, kernel: jax.Array, dtype: Any, transposed: jax.Array | None = None) -> jax.Array:
    """x [M, K] times kernel [K, N], with operands in `dtype`; the result is in x's dtype.

    Where x is wider than `dtype`, operands are rounded and sums are float32, in the backward pass too.

    Args:
      transposed: a stored copy [N, K] of a kernel that is not trained (models/transposed.py), for the backward pass;
        the kernel then has no gradient, and both may be given as their `bits`.
    """
    if transposed is not None:
        return _frozen_product(x, kernel, transposed, jnp.dtype(dtype))
    if x.dtype == dtype:
        return jnp.matmul(x, kernel.astype(dtype))
    return _rounded_product(x, kernel, jnp.dtype(dtype))


def product_across(x: jax.Array, across: jax.Array, dtype: Any) -> jax.Array:
    """x [M, K] times the transpose of a float32 kernel that is stored as `across` [N, K], for a few rows on a CPU.

    XLA's CPU backend copies the second operand of every product into another order first. With the kernel in that
    place a product of a few rows is mostly copying; here the rows are. What surrounds the product would otherwise be
    merged into it and change the places again, hence the barriers.
    """
    operand = jax.lax.optimization_barrier(rounded(x, dtype).T)
    return jax.lax.optimization_barrier(jnp.matmul(across, operand)).T


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """The values of x rounded to those of a dtype, in float32. XLA may leave out a conversion there and back."""
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
    return _rounded_product(x, kernel, dtype), (x, kernel)


def _backward(dtype: Any, kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    of_x, of_kernel = _multiplied(gradient, kernel.T, dtype), _multiplied(x.T, gradient, dtype)
    return of_x, of_kernel.astype(kernel.dtype)


_rounded_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _frozen_product(x: jax.Array, kernel: jax.Array, transposed: jax.Array, dtype: Any) -> jax.Array:
    return _rounded_product(x, from_bits(kernel), dtype)


def _frozen_forward(x: jax.Array, kernel: jax.Array, transposed: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _frozen_product(x, kernel, transposed, dtype), transposed


def _frozen_backward(dtype: Any, transposed: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    # Converted only here: what the forward pass converts, a loop over layers stores once more for the backward pass.
    return _rounded_product(gradient, from_bits(transposed), dtype), None, None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


def bits(x: jax.Array) -> jax.Array:
    """The bits of a bfloat16 array as uint16; an array of another dtype as it is.

    XLA's CPU backend has no slices of bfloat16: it converts a stack of kernels to float32 before the loop that takes a
    layer's kernel from it, in every call. Integers it slices as they are.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
    """The inverse of `bits`."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x

"""How a model runs on its devices: chosen once, from the mesh, the dtype and the shape, and passed explicitly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from psearch_jax.config import DecoderConfig
from psearch_jax.models.attention.cudnn import MIN_CAPABILITY, SEGMENTS, capability
from psearch_jax.models.attention.splash import LANES
from psearch_jax.runtime import platforms

FEW_ROWS = 32  # up to this number of rows a CPU decodes faster with kernels as left operands


@dataclass(frozen=True)
class Backend:
    """The forms of a model's computations. The default runs on every device.

    Attributes:
      attention: of complete rows: in plain JAX, or by a kernel for TPUs or for GPUs (models/attention).
      cache: how decoding reads the KV cache: all rows up to a common `span`; `groups` of rows, each up to its longest
        row; or by a `kernel`, which reads each row up to its own length, and also attends for passages (ragged.py).
      is_cpu: activations are float32 in every dtype (products.py).
      unstack: when decoding copies each layer's weights into separate arrays (workarounds.unstack): `per_call`, or
        `once` for all calls of a step's rollouts.
      kernels_left: the copy made `once` has float32 kernels as left operands (workarounds.multiply_left).
      widens_frozen: training keeps frozen weights in float32.
      vocab_chunk: positions whose logits are computed at a time.
    """

    attention: Literal["blocked", "splash", "cudnn"] = "blocked"
    cache: Literal["span", "groups", "kernel"] = "span"
    is_cpu: bool = False
    unstack: Literal["never", "per_call", "once"] = "never"
    kernels_left: bool = False
    widens_frozen: bool = False
    vocab_chunk: int = 1024

    @property
    def max_segments(self) -> int | None:
        """The maximum number of trajectories in a packed row; None: any number."""
        return SEGMENTS if self.attention == "cudnn" else None

    def activations(self, dtype: Any) -> Any:
        """The dtype of activations and cache for products with weights in `dtype`."""
        return jnp.dtype(jnp.float32 if self.is_cpu else dtype)


def choose_backend(mesh: Mesh, dtype: Any, config: DecoderConfig, rows: int = 1) -> Backend:
    """The backend for the devices of a mesh, a compute dtype, a model's shape, and `rows` that decode together.

    Attention kernels are only for 16 bits: cuDNN has none for float32, and the precision of products inside a kernel
    cannot be set for its backward pass. cuDNN also has none for GPUs before Ampere, such as a T4. The forms of
    decoding by length need the keys of a device's queries on that device.
    """
    devices, tensor = list(mesh.devices.flat), mesh.shape["tensor"]
    platform, is_half = devices[0].platform, jnp.dtype(dtype).itemsize == 2
    by_heads = config.heads % tensor == 0 and config.kv_heads % tensor == 0
    if platform == "cpu":
        is_one, has_few = mesh.size == 1, rows <= FEW_ROWS
        return Backend(
            cache="groups" if by_heads else "span",
            is_cpu=True,
            unstack="once" if is_one and (is_half or has_few) else "never",
            kernels_left=is_one and has_few and not (is_half and platforms.cpu_multiplies(dtype)),
            widens_frozen=is_one,
            vocab_chunk=256,
        )
    if platform == "tpu":
        by_kernel = is_half and by_heads and config.head_dim % LANES == 0
        return Backend("splash" if is_half else "blocked", "kernel" if by_kernel else "span")
    has_kernel = is_half and all(capability(device) >= MIN_CAPABILITY for device in devices)
    return Backend("cudnn" if has_kernel else "blocked", unstack="per_call" if platform == "gpu" else "never")

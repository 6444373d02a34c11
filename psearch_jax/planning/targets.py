"""Compilation targets that need no hardware: TPU topologies, and GPUs by their description."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from psearch_jax.runtime.accelerators import CHIPS, GPUS, MIB, Chip
from psearch_jax.types import UserError, first_line

# Published figures for accelerators.GPUS: the driver's name for it, compute capability, multiprocessors; per
# multiprocessor the float32 lanes, KiB of shared memory and threads; then MiB of L2 cache and the clock in GHz.
_PARTS = {
    "h200": ("NVIDIA H200", 9.0, 132, 128, 228, 2048, 50, 1.98),
    "h100": ("NVIDIA H100 80GB HBM3", 9.0, 132, 128, 228, 2048, 50, 1.98),
    "a100-80": ("NVIDIA A100-SXM4-80GB", 8.0, 108, 64, 164, 2048, 40, 1.41),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 8.0, 108, 64, 164, 2048, 40, 1.41),
    "l4": ("NVIDIA L4", 8.9, 58, 128, 100, 1536, 48, 2.04),
    "t4": ("Tesla T4", 7.5, 40, 64, 64, 1024, 4, 1.59),
}


@dataclass(frozen=True)
class Target:
    """The machine of a plan, and the devices to compile for."""

    topology: str
    devices: list[Any]
    chip: Chip
    kind: str


def tpu_target(topology: str) -> Target:
    """A TPU topology such as `v5e:4x4`; needs libtpu, but no TPU.

    Raises:
      UserError: libtpu is not installed, or does not know the topology.
    """
    # Without these, libtpu queries the cloud's metadata server for its identity.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-16"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        # A v4 chip's two cores are one device on real slices; in topologies, only with this option.
        both_cores = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology, **both_cores)
        devices = list(slice_.devices)
    except Exception as error:  # whatever the plugin raises
        raise UserError(
            f"--topology={topology}: {first_line(error)[:200]}; accepted: names such as v5e:4x4, v5p:2x2x1, v6e:4x4, "
            f"with libtpu installed (pip install 'jax[tpu]'), or a GPU: {', '.join(GPUS)}"
        ) from None
    kind = devices[0].device_kind
    if kind not in CHIPS:
        raise UserError(f"--topology={topology}: {kind!r} found, accepted: {', '.join(CHIPS)}")
    return Target(topology, devices, CHIPS[kind], kind)


def cuda_target(topology: str) -> Target:
    """GPUs of one host, `h200` or `h200:8`: the real ones if present, else a description for XLA's GPU compiler.

    Call it before anything else touches a device.

    Raises:
      UserError: the GPU is unknown, the machine has fewer, or JAX's GPU package is not installed.
    """
    name, _, count = topology.partition(":")
    if name not in GPUS or not (count or "1").isdigit() or count == "0":
        raise UserError(f"--topology={topology}: accepted for GPUs: {', '.join(GPUS)}, with :N for several")
    if not has_gpu_compiler():
        raise UserError(
            f"--topology={topology}: JAX's GPU compiler not found, accepted: pip install 'jax[cuda13]' (no GPU needed)"
        )
    number = int(count or 1)
    if Path("/dev/nvidia0").exists():
        devices = jax.devices()
    else:
        jax.config.update("jax_platforms", "cpu")
        devices = absent_gpus(name, number)
    if len(devices) < number:
        raise UserError(f"--topology={topology}: {len(devices)} devices found, accepted: at most that number")
    return Target(topology, devices[:number], GPUS[name], name)


def has_gpu_compiler() -> bool:
    """Whether JAX's GPU plugin is installed."""
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def absent_gpus(name: str, number: int) -> list[Any]:
    """Devices that can only be compiled for. No GPU is needed, but the GPU plugin must be installed."""
    from jax.experimental import topologies

    jax.devices()  # discovers the plugins of other platforms
    described = {"target_config": _gpu_description(name), "topology": f"1x1x{number}"}
    return list(topologies.get_topology_desc("", "cuda", **described).devices)


def _gpu_description(name: str) -> str:
    """One of `GPUS` as XLA's compiler needs it without the device: GpuTargetConfigProto in text form."""
    kind, capability, cores, lanes, shared, threads, cache, clock = _PARTS[name]
    major, minor = str(capability).split(".")
    # From Ampere on, the system reserves 1 KiB of each block's shared memory.
    block = shared * 1024 - (1024 if capability >= 8 else 0)
    features = "feature_extension: ACCELERATED_FEATURES" if capability >= 9 else ""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: {48 * 1024}
          shared_memory_per_block_optin: {block}
          shared_memory_per_core: {shared * 1024}
          threads_per_core_limit: {threads}
          core_count: {cores}
          fpus_per_core: {lanes}
          block_dim_limit_x: {2**31 - 1}
          block_dim_limit_y: {2**16 - 1}
          block_dim_limit_z: {2**16 - 1}
          memory_bandwidth: {int(GPUS[name].bandwidth)}
          l2_cache_size: {cache * 2**20}
          clock_rate_ghz: {clock}
          device_memory_size: {MIB[name] * 2**20}
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
          registers_per_core_limit: {2**16}
          registers_per_block_limit: {2**16}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        runtime_version {{ major: 12 minor: 9 }}
        device_description_str: "{kind}"
        """

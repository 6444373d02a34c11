"""Accelerators by name, with their peaks, and what a forward pass asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psearch_jax.config import Qwen2Config

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One accelerator: the memory that a program may use, and published peaks (bf16, dense)."""

    hbm_bytes: int
    flops: float  # per second
    bandwidth: float  # bytes per second


# By the `device_kind` of jax, per device (of v4 and tpu7x: one of a chip's two cores). Memory is what the compiler
# says is available.
CHIPS: dict[str, Chip] = {
    "TPU v4": Chip(int(15.25 * GIB), 137.5e12, 614e9),
    "TPU v5 lite": Chip(int(15.75 * GIB), 197e12, 819e9),
    "TPU v5": Chip(int(95.74 * GIB), 459e12, 2765e9),
    "TPU v6 lite": Chip(int(31.25 * GIB), 918e12, 1640e9),
    "TPU7x": Chip(int(94.75 * GIB), 1153e12, 3690e9),
}
# MiB of a card, as its driver tells them.
_MIB = {"h200": 143_771, "h100": 81_559, "a100-80": 81_920, "a100-40": 40_960, "l4": 23_034, "t4": 15_360}

_PEAKS = {  # FLOPs and bytes per second
    "h200": (989e12, 4.8e12),
    "h100": (989e12, 3.35e12),
    "a100-80": (312e12, 2.04e12),
    "a100-40": (312e12, 1.56e12),
    "l4": (121e12, 300e9),
    "t4": (65e12, 320e9),
}
# By the name that --topology takes, on one host "h200:8". Of the memory, the share that a process may take of a card
# (XLA_PYTHON_CLIENT_MEM_FRACTION=.92).
GPUS = {name: Chip(int(0.92 * _MIB[name] * 2**20), *peaks) for name, peaks in _PEAKS.items()}
# Of the same: the name that the driver tells, compute capability, multiprocessors, and of each of these the lanes in
# float32, KiB of shared memory and threads; then MiB of the second cache and GHz, as published.
_PARTS = {
    "h200": ("NVIDIA H200", 9.0, 132, 128, 228, 2048, 50, 1.98),
    "h100": ("NVIDIA H100 80GB HBM3", 9.0, 132, 128, 228, 2048, 50, 1.98),
    "a100-80": ("NVIDIA A100-SXM4-80GB", 8.0, 108, 64, 164, 2048, 40, 1.41),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 8.0, 108, 64, 164, 2048, 40, 1.41),
    "l4": ("NVIDIA L4", 8.9, 58, 128, 100, 1536, 48, 2.04),
    "t4": ("Tesla T4", 7.5, 40, 64, 64, 1024, 4, 1.59),
}
# What a GPU's name has to hold, as the driver tells it, in the order in which it is asked.
_NAMES = (("H200", "h200"), ("H100", "h100"), ("A100", "a100-80"), ("L4", "l4"), ("T4", "t4"))


def chip_of(device: Any) -> Chip | None:
    """The accelerator that a device of jax is; None for one that is not listed, as a CPU.

    Of a GPU's two sizes of memory it does not tell which: the peaks are the same.
    """
    kind = device.device_kind
    if device.platform == "gpu":
        return next((GPUS[chip] for name, chip in _NAMES if name in kind.replace("L40", "")), None)
    return CHIPS.get(kind)


def gpu_description(name: str) -> str:
    """One of `GPUS` as XLA's compiler wants it told where there is none: the text form of its GpuTargetConfigProto."""
    kind, capability, cores, lanes, shared, threads, cache, clock = _PARTS[name]
    major, minor = str(capability).split(".")
    # A GPU keeps a KiB of each block's shared memory for itself, from Ampere on.
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
          device_memory_size: {_MIB[name] * 2**20}
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
          registers_per_core_limit: {2**16}
          registers_per_block_limit: {2**16}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        runtime_version {{ major: 12 minor: 9 }}
        device_description_str: "{kind}"
        """


def forward_flops(model: Qwen2Config, lengths: Sequence[int], wanted: int) -> float:
    """The least FLOPs of a forward pass over trajectories: 2 per weight and id, 4 per pair of positions in attention.

    Args:
      lengths: ids of each trajectory.
      wanted: ids whose log-probs are asked for, which alone meet the vocabulary.
    """
    m = model
    attention = m.width * (m.heads + 2 * m.kv_heads) * m.head_dim + m.heads * m.head_dim * m.width
    layers = m.layers * (attention + 3 * m.width * m.mlp)
    pairs = sum(float(n) ** 2 for n in lengths) / 2  # causal
    products = layers * float(sum(map(int, lengths))) + m.vocab_rows * m.width * float(wanted)
    return 2 * products + 4 * m.layers * m.heads * m.head_dim * pairs

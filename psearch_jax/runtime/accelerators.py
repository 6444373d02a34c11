"""Accelerators by name with their memory and peak rates, and the FLOPs of a forward pass."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psearch_jax.config import DecoderConfig

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One accelerator: the memory that a program may use, and the published peak rates (bf16, dense)."""

    hbm_bytes: int
    flops: float  # per second
    bandwidth: float  # bytes per second
    link: float = math.inf  # bytes per second to a neighbour: one ICI link in one direction, NVLink, or PCIe


# By JAX's `device_kind`, per device (for tpu7x, one of a chip's two cores). Memory is what the compiler reports
# as available.
CHIPS: dict[str, Chip] = {
    "TPU v4": Chip(int(30.75 * GIB), 275e12, 1228e9, 45e9),
    "TPU v5 lite": Chip(int(15.75 * GIB), 197e12, 819e9, 45e9),
    "TPU v5": Chip(int(95.74 * GIB), 459e12, 2765e9, 90e9),
    "TPU v6 lite": Chip(int(31.25 * GIB), 918e12, 1640e9, 90e9),
    "TPU7x": Chip(int(94.75 * GIB), 1153e12, 3690e9, 90e9),
}
# MiB per card, as reported by the driver.
MIB = {"h200": 143_771, "h100": 81_559, "a100-80": 81_920, "a100-40": 40_960, "l4": 23_034, "t4": 15_360}

_PEAKS = {  # FLOPs, bytes per second from memory, and to another GPU of the host
    "h200": (989e12, 4.8e12, 450e9),
    "h100": (989e12, 3.35e12, 450e9),
    "a100-80": (312e12, 2.04e12, 300e9),
    "a100-40": (312e12, 1.56e12, 300e9),
    "l4": (121e12, 300e9, 32e9),
    "t4": (65e12, 320e9, 16e9),
}
# By the name in --topology, which is for example "h200:8" for eight on one host. Memory is the share that a process
# may use with XLA_PYTHON_CLIENT_MEM_FRACTION=.92.
GPUS = {name: Chip(int(0.92 * MIB[name] * 2**20), *peaks) for name, peaks in _PEAKS.items()}
# Words of the GPU name that the driver reports. The figures are of cards with SXM sockets, where there are several.
_NAMES = (("H200", "h200"), ("H100", "h100"), ("A100", "a100-80"), ("L4", "l4"), ("T4", "t4"))
_OTHER_CARDS = {"PCIE", "NVL"}


def chip_of(device: Any) -> Chip | None:
    """The entry for a JAX device; None for an unlisted device such as a CPU.

    Every A100 is taken for one with 80 GB; one with 40 GB has the same peak FLOPs but less bandwidth.
    """
    kind = device.device_kind
    if device.platform == "gpu":
        words = set(re.split(r"[\s-]+", kind.upper()))
        return None if words & _OTHER_CARDS else next((GPUS[chip] for name, chip in _NAMES if name in words), None)
    return CHIPS.get(kind)


def forward_flops(model: DecoderConfig, lengths: Sequence[int], wanted: int) -> float:
    """Lower bound on the FLOPs of a forward pass over trajectories.

    It counts 2 per weight and token, and 4 * layers * heads * head_dim per causal pair of positions.

    Args:
      lengths: tokens of each trajectory.
      wanted: number of tokens whose log-probs are computed; only these are multiplied with the vocabulary.
    """
    m = model
    attention = m.width * (m.heads + 2 * m.kv_heads) * m.head_dim + m.heads * m.head_dim * m.width
    layers = m.layers * (attention + 3 * m.width * m.mlp)
    pairs = sum(float(n) ** 2 for n in lengths) / 2  # causal
    products = layers * float(sum(map(int, lengths))) + m.vocab_rows * m.width * float(wanted)
    return 2 * products + 4 * m.layers * m.heads * m.head_dim * pairs

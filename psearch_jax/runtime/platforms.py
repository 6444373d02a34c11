"""XLA's schedule for several GPUs, and what the processor multiplies."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp

# Names in /proc/cpuinfo, on x86 and on ARM, of instructions that multiply in 16 bits.
_PRODUCTS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "fphp"}}
OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"


def overlap_collectives(several_processes: bool, root: Path = Path("/")) -> None:
    """Lets XLA compute on GPUs while they exchange data; call it before the first use of a device.

    By default XLA's schedule for GPUs waits for every collective. The flag is a public one of XLA:
    https://docs.jax.dev/en/latest/gpu_performance_tips.html. Nothing changes without an NVIDIA GPU, with a single one,
    or if the user's `XLA_FLAGS` name the flag.
    """
    gpus, flags = len(list(root.glob("dev/nvidia[0-9]*"))), os.environ.get("XLA_FLAGS", "")
    if OVERLAP not in flags and (gpus > 1 or (gpus and several_processes)):
        os.environ["XLA_FLAGS"] = f"{flags} --{OVERLAP}=true".strip()


@functools.cache
def cpu_multiplies(dtype: Any, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor has instructions for products in a dtype; always true for float32.

    Without them XLA converts each operand, which makes 16-bit products slower than float32 ones. Without a
    /proc/cpuinfo the answer is yes.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize != 2 or not cpuinfo.is_file():
        return True
    names = set(re.split(r"\W+", cpuinfo.read_text()))
    return bool(names & _PRODUCTS[dtype.name])

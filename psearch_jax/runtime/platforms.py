"""Which devices JAX looks for on this machine, XLA's schedule for several GPUs, and what the processor multiplies."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pkgutil
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

GOOGLE = "0x1ae0"  # PCI vendor
NOT_TPUS = ("0x001f", "0x0042")  # devices of that vendor: the disk and network card of a virtual machine
# Names in /proc/cpuinfo, on x86 and on ARM, of instructions that multiply in 16 bits.
_PRODUCTS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "fphp"}}
OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"
SET_BY_JAX = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}  # JAX sets these on import wherever libtpu is installed


def may_have_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether anything suggests a TPU: a device file, a PCI device, or an environment variable.

    In doubt the answer is yes: a wrong yes costs some warnings from libtpu, but a wrong no would hide a TPU.
    """
    device_files = [*root.glob("dev/accel*"), *root.glob("dev/vfio/[0-9]*")]
    if device_files or any(_attached(device) for device in root.glob("sys/bus/pci/devices/*")):
        return True
    named = {name for name in environment if name.startswith(("TPU_", "CLOUD_TPU_", "MEGASCALE_"))}
    return bool(named - SET_BY_JAX) or "JAX_FORCE_TPU_INIT" in environment


def _attached(device: Path) -> bool:
    """Whether a PCI device may be a TPU."""
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return False
    return vendor == GOOGLE and kind not in NOT_TPUS


def skip_absent_tpu(root: Path = Path("/")) -> None:
    """Keeps JAX from looking for a TPU on a machine without one; call it before the first use of a device.

    JAX loads libtpu wherever it is installed, and libtpu prints warnings on machines without a TPU. Nothing changes if
    the user set `JAX_PLATFORMS`, if anything suggests a TPU, or if a plugin for other devices such as GPUs is
    installed.
    """
    chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue] (JAX adds its options when imported)
    if chosen or find_spec("libtpu") is None or _plugins() or may_have_tpu(root):
        return
    jax.config.update("jax_platforms", "cpu")


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


def _plugins() -> bool:
    """Whether a JAX plugin for other devices than CPUs and TPUs is installed, in either way that JAX finds plugins."""
    if importlib.metadata.entry_points(group="jax_plugins"):
        return True
    package = find_spec("jax_plugins")
    return package is not None and any(pkgutil.iter_modules(package.submodule_search_locations))

"""Which kinds of devices JAX should look for on this machine, and what its processor can do."""

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
NOT_TPUS = ("0x001f", "0x0042")  # of that vendor: the disk and the network card of a virtual machine without a TPU
# What /proc/cpuinfo calls instructions for products of 16 bits, on x86 and on ARM.
_PRODUCTS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "fphp"}}
SET_BY_JAX = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}  # on import, on any machine with libtpu installed


def may_have_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether anything suggests a TPU: a device file, a PCI device, or a variable that names one.

    A wrong yes costs some warnings from libtpu, a wrong no would hide a TPU: in doubt the answer is yes.
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
    """Keeps JAX from looking for a TPU on a machine without one; call it before anything touches a device.

    With libtpu installed, JAX loads it on every machine, and libtpu writes warnings where it has no TPU. JAX's choice
    stands where the user made one (`JAX_PLATFORMS`), where something suggests a TPU, and where a plugin for other
    devices (a GPU's) is installed.
    """
    if jax.config.jax_platforms or find_spec("libtpu") is None or _plugins() or may_have_tpu(root):
        return
    jax.config.update("jax_platforms", "cpu")


@functools.cache
def cpu_multiplies(dtype: Any, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor has instructions for products of a dtype; of float32 every one has.

    Where it has none, XLA converts each operand, and products in 16 bits are slower than in float32. A machine that
    does not tell is taken for one that has them.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize != 2 or not cpuinfo.is_file():
        return True
    names = set(re.split(r"\W+", cpuinfo.read_text()))
    return bool(names & _PRODUCTS[dtype.name])


def _plugins() -> bool:
    """Whether JAX has a plugin for devices other than CPUs and TPUs, found in either way that JAX looks for them."""
    if importlib.metadata.entry_points(group="jax_plugins"):
        return True
    package = find_spec("jax_plugins")
    return package is not None and any(pkgutil.iter_modules(package.submodule_search_locations))

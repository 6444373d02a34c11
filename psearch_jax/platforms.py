"""Which kinds of devices JAX should look for on this machine."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import jax

GOOGLE = "0x1ae0"  # PCI vendor
NOT_TPUS = ("0x001f", "0x0042")  # of that vendor: the disk and the network card of a virtual machine without a TPU
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


def _plugins() -> bool:
    """Whether JAX has a plugin for devices other than CPUs and TPUs, found in either way that JAX looks for them."""
    if importlib.metadata.entry_points(group="jax_plugins"):
        return True
    package = find_spec("jax_plugins")
    return package is not None and any(pkgutil.iter_modules(package.submodule_search_locations))

"""What programs find out about the machine: several GPUs, and the memory of a container."""

import os
import subprocess
import sys

import pytest

from psearch_jax.runtime import platforms
from psearch_jax.runtime.memory import available_memory


@pytest.mark.parametrize(
    ("gpus", "several", "flags", "expected"),
    [
        (1, False, "", ""),
        (1, True, "", f"--{platforms.OVERLAP}=true"),
        (8, False, "--x=y", f"--x=y --{platforms.OVERLAP}=true"),
        (8, True, f"--{platforms.OVERLAP}=false", f"--{platforms.OVERLAP}=false"),
    ],
)
def test_collectives_overlap_where_there_are_several_gpus(tmp_path, monkeypatch, gpus, several, flags, expected):
    """The flag is set for several GPUs, unless the user has set it."""
    (tmp_path / "dev").mkdir()
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(gpus))]:
        (tmp_path / "dev" / name).touch()
    monkeypatch.setenv("XLA_FLAGS", flags)
    platforms.overlap_collectives(several, tmp_path)
    assert os.environ["XLA_FLAGS"] == expected


def test_xla_knows_the_flag():
    """XLA has the flag: it ends a program whose XLA_FLAGS name an unknown one."""
    environment = {**os.environ, "XLA_FLAGS": f"--{platforms.OVERLAP}=true", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "cpu", done.stderr[-2000:]


def test_memory_of_a_container(tmp_path):
    """The available memory is that of the container, where the page cache counts as available."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       131072000 kB\nMemAvailable:   120000000 kB\n")
    assert available_memory(meminfo, tmp_path) == 120_000_000 * 1024
    for limit, use, stat, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        (tmp_path / limit).parent.mkdir(exist_ok=True)
        (tmp_path / limit).write_text("64000000000\n")
        (tmp_path / use).write_text("4000000000\n")
        (tmp_path / stat).write_text(f"active_file 7\n{name} 1000000000\n")
        assert available_memory(meminfo, tmp_path) == 61_000_000_000
        (tmp_path / limit).write_text("max\n")
        assert available_memory(meminfo, tmp_path) == 120_000_000 * 1024

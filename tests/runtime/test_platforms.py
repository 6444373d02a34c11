"""Device selection: no libtpu warnings on a machine without a TPU, and no TPU is ever hidden."""

import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import pytest
from programs import ROOT

from psearch_jax.runtime import platforms


@pytest.fixture
def no_choice(monkeypatch):
    """JAX without a chosen platform, on a machine with libtpu and no plugin; restores the setting."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    monkeypatch.setattr(platforms, "find_spec", lambda name: object())
    monkeypatch.setattr(platforms, "_plugins", lambda: False)
    for name in [name for name in os.environ if name.startswith("TPU_")]:
        monkeypatch.delenv(name)
    yield
    jax.config.update("jax_platforms", before)


def pci_device(root, vendor, kind):
    place = root / "sys/bus/pci/devices/0000:00:05.0"
    place.mkdir(parents=True)
    (place / "vendor").write_text(f"{vendor}\n")
    (place / "device").write_text(f"{kind}\n")


def test_only_cpus_are_looked_for_where_nothing_suggests_a_tpu(no_choice, tmp_path):
    """Every program begins with warnings about a TPU that does not exist."""
    pci_device(tmp_path, platforms.GOOGLE, platforms.NOT_TPUS[1])  # the network card of a virtual machine
    platforms.skip_absent_tpu(tmp_path)
    assert jax.config.jax_platforms == "cpu"


@pytest.mark.parametrize("sign", ["dev/accel0", "dev/vfio/0", "pci", "TPU_WORKER_HOSTNAMES", "JAX_FORCE_TPU_INIT"])
def test_a_tpu_is_never_hidden(no_choice, tmp_path, monkeypatch, sign):
    """A run on a TPU computes on the host's processor instead."""
    if sign == "pci":
        pci_device(tmp_path, platforms.GOOGLE, "0x0076")
    elif "/" in sign:
        (tmp_path / sign).parent.mkdir(parents=True)
        (tmp_path / sign).touch()
    else:
        monkeypatch.setenv(sign, "t1v-n-0")
    platforms.skip_absent_tpu(tmp_path)
    assert jax.config.jax_platforms is None


def test_gpus_and_the_users_choice_are_left_alone(no_choice, tmp_path, monkeypatch):
    """A GPU is not used, or a platform other than the one that the user chose."""
    with monkeypatch.context() as patch:
        patch.setattr(platforms, "_plugins", lambda: True)
        platforms.skip_absent_tpu(tmp_path)
        assert jax.config.jax_platforms is None
    jax.config.update("jax_platforms", "tpu")
    platforms.skip_absent_tpu(tmp_path)
    assert jax.config.jax_platforms == "tpu"


@pytest.mark.parametrize(
    ("gpus", "several", "flags", "expected"),
    [
        (0, True, "", ""),
        (1, False, "", ""),
        (1, True, "", f"--{platforms.OVERLAP}=true"),
        (8, False, "--xla_dump_to=x", f"--xla_dump_to=x --{platforms.OVERLAP}=true"),
        (8, True, f"--{platforms.OVERLAP}=false", f"--{platforms.OVERLAP}=false"),
    ],
)
def test_collectives_overlap_where_there_are_several_gpus(tmp_path, monkeypatch, gpus, several, flags, expected):
    """Eight GPUs wait for every gather of weights, or a user's own choice is overwritten."""
    (tmp_path / "dev").mkdir()
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(gpus))]:
        (tmp_path / "dev" / name).touch()
    monkeypatch.setenv("XLA_FLAGS", flags)
    platforms.overlap_collectives(several, tmp_path)
    assert os.environ["XLA_FLAGS"] == expected


def test_xla_knows_the_flag():
    """XLA ends a program whose XLA_FLAGS name a flag that it no longer has."""
    environment = {**os.environ, "XLA_FLAGS": f"--{platforms.OVERLAP}=true", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "cpu", done.stderr[-2000:]


def test_a_program_says_nothing_of_a_tpu(tmp_path):
    """The first thing that a newcomer sees is a page of libtpu's warnings."""
    if find_spec("libtpu") is None or platforms.may_have_tpu():
        pytest.skip("this machine has a TPU, or no libtpu")
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS" and not k.startswith("TPU_")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "launch/ask.py", "What is the setting of Gamudol?"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "answer: " in done.stdout
    warnings = [line for line in done.stderr.splitlines() if "tpu" in line.lower() or "InitGoogle" in line]
    assert not warnings, done.stderr

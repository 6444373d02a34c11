"""The sampling copy for a sampler with another mesh than that of training."""

from __future__ import annotations

import os

from programs import ROOT, completed


def difference(script: str, *arguments: str) -> float:
    """What the script prints in the end, on eight devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = completed([ROOT / "tests" / "support" / script, *arguments], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Involuntary full rematerialization" not in done.stderr
    return float(done.stdout.split()[-1])


def test_weights_are_regrouped_on_the_same_devices():
    """Parts of kernels that are exchanged wrongly between devices, or a device that gathers a complete kernel, for
    which a machine that a plan chose has no memory."""
    assert difference("regrouped_copy.py", "1,8,1,4", "2,4,1,2") == 0

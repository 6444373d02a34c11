"""Figures about a step that are computed from its rollouts and seconds."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tiny_config

from psearch_jax.config import Config, from_mapping
from psearch_jax.runtime.accelerators import CHIPS
from psearch_jax.train.monitoring import figures


def test_the_peak_share_of_updates(monkeypatch):
    """A utilisation that counts padding or the devices that only sample, or a backward pass that adapters do not run,
    would send a user after the wrong bottleneck."""
    chip, model = CHIPS["TPU v5 lite"], tiny_config(64, width=32, layers=2)
    mask = np.zeros((3, 8), np.float32)
    mask[0, 2:5] = mask[1, 3:7] = 1
    batch = SimpleNamespace(length=np.asarray([5, 7, 0]), mask=mask)
    full, adapters = Config(), from_mapping({"model": {"lora_rank": 4}})
    assert figures.update_peak_share(full, model, batch, 2.0, 4, True, False) is None  # a CPU has no published peak

    monkeypatch.setattr(figures, "chip_of", lambda device: chip)
    weights = model.layers * (2 * model.width * (model.heads + model.kv_heads) * model.head_dim + 3 * 32 * model.mlp)
    pairs = 4 * model.layers * model.heads * model.head_dim * (5**2 + 7**2) / 2
    trunk, head = 2 * weights * 12 + pairs, 2 * model.vocab_rows * model.width * 7
    for config, policy, critic, passes, flops in [
        (full, True, False, 3, trunk + head),
        (adapters, True, False, 2, trunk + head),
        (full, False, True, 3, trunk),
        (full, True, True, 3, 2 * trunk + head),
    ]:
        share = figures.update_peak_share(config, model, batch, 2.0, 4, policy, critic)
        assert share == pytest.approx(passes * flops / (2.0 * 4 * chip.flops))

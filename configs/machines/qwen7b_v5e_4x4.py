"""qwen7b.py with settings for 16 v5e chips (4x4).

Compiled for them, its programs need at most 15.6 of 15.8 GiB per chip; nothing was run there. Check changes with
`python launch/plan.py --config=configs/machines/qwen7b_v5e_4x4.py --topology=v5e:4x4`.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = runpy.run_path(str(Path(__file__).parent / "../qwen7b.py"))["get_config"]()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    # Training splits weights over fsdp only: with `tensor` above 1, every layer would wait for two sums over it.
    config.mesh.tensor = 1
    # Every token reads the weights that a chip holds: a quarter of 15.2 GB, which also leaves room for the cache.
    config.mesh.rollout_tensor = 4
    # One row per chip, the least possible: memory is short.
    config.learning.micro_batch_rows = 16
    # Keeping more than each layer's input does not fit.
    config.model.remat = "full"
    # 12 slots per chip; their cache fills the remaining memory.
    config.rollout.slots = 192
    return config

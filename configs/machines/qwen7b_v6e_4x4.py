"""qwen7b.py with settings for 16 v6e chips (4x4).

Compiled for them, its programs need at most 23.4 of 31.2 GiB per chip; nothing was run there. Check changes with
`python launch/plan.py --config=configs/machines/qwen7b_v6e_4x4.py --topology=v6e:4x4`.
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
    # Four rows per chip: the weights are gathered less often than for smaller micro-batches.
    config.learning.micro_batch_rows = 64
    # Keeping more than a layer's input would only fit with fewer rows.
    config.model.remat = "full"
    # Each decode step reads the weights once for all slots: as many as fit.
    config.rollout.slots = 512
    return config

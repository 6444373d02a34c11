"""qwen7b.py with settings for eight H100.

Compiled for them, its programs need at most 61.8 of 73.3 GiB per GPU; nothing was run there. Check changes with
`python launch/plan.py --config=configs/machines/qwen7b_h100_8.py --topology=h100:8`.
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
    # Two rows per GPU: larger micro-batches gather the weights less often, but need the memory that `dots` takes.
    config.learning.micro_batch_rows = 16
    # There is room for the results of attention and of products with weights: only the rest is recomputed.
    config.model.remat = "dots"
    # Each decode step reads the weights once for all slots: as many as fit.
    config.rollout.slots = 384
    return config

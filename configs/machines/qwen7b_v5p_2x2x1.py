"""qwen7b.py with settings for 4 v5p chips (2x2x1).

Compiled for them, its programs need at most 83.0 of 95.7 GiB per chip; nothing was run there. Check changes with
`python launch/plan.py --config=configs/machines/qwen7b_v5p_2x2x1.py --topology=v5p:2x2x1`.
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
    # A chip has room for all 15.2 GB of weights, so that decoding needs no communication.
    config.mesh.rollout_tensor = 1
    # Two rows per chip: larger micro-batches gather the weights less often, but need the memory that `dots` takes.
    config.learning.micro_batch_rows = 8
    # There is room for the results of attention and of products with weights: only the rest is recomputed.
    config.model.remat = "dots"
    # Each decode step reads the weights once for all slots: as many as fit.
    config.rollout.slots = 384
    return config

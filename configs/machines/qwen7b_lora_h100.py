"""qwen7b_lora.py with settings for one H100.

Compiled for them, its programs need at most 62.0 of 73.3 GiB per GPU; nothing was run there. Check changes with
`python launch/plan.py --config=configs/machines/qwen7b_lora_h100.py --topology=h100`.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = runpy.run_path(str(Path(__file__).parent / "../qwen7b_lora.py"))["get_config"]()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    # One device: nothing is split.
    config.mesh.tensor = 1
    config.mesh.rollout_tensor = 1
    # Rows hold up to 6,196 tokens: one row keeps the GPU busy, and leaves memory for remat=dots.
    config.learning.micro_batch_rows = 1
    # There is room for the results of attention and of products with weights: only the rest is recomputed.
    config.model.remat = "dots"
    # Each decode step reads the weights once for all slots: as many as fit.
    config.rollout.slots = 96
    return config

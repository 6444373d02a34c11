"""qwen7b_lora.py with settings for h100, by launch/plan.py --search.

206 s per step expected: decode 40, prefill and extend 28, logprobs 70, update 70.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    base = Path(__file__).parent / "../qwen7b_lora.py"
    config = runpy.run_path(str(base))["get_config"]()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.tensor = 1
    config.learning.micro_batch_rows = 1
    config.model.remat = "dots"
    config.mesh.rollout_tensor = 1
    config.rollout.slots = 96
    return config

"""qwen7b_ppo.py with settings for h100:8, by launch/plan.py --search.

79 s per step expected: decode 10, prefill and extend 7, logprobs 14, update 21, critic 28.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    base = Path(__file__).parent / "../qwen7b_ppo.py"
    config = runpy.run_path(str(base))["get_config"]()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.tensor = 1
    config.learning.micro_batch_rows = 16
    config.model.remat = "dots"
    config.mesh.rollout_tensor = 4
    config.rollout.slots = 384
    return config

"""qwen7b.py with settings for v6e:4x4, by launch/plan.py --search.

180 s per step expected: decode 39, prefill and extend 28, logprobs 37, update 75.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    base = Path(__file__).parent / "../qwen7b.py"
    config = runpy.run_path(str(base))["get_config"]()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.tensor = 1
    config.learning.micro_batch_rows = 64
    config.model.remat = "full"
    config.mesh.rollout_tensor = 4
    config.rollout.slots = 512
    return config

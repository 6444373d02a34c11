"""qwen7b.py with settings for v5e:4x4, by launch/plan.py --search.

725 s per step expected: decode 105, prefill and extend 96, logprobs 175, update 349.
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
    config.learning.micro_batch_rows = 16
    config.model.remat = "full"
    config.mesh.rollout_tensor = 4
    config.rollout.slots = 192
    return config

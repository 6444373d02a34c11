"""qwen7b.py with settings for v5p:2x2x1, by launch/plan.py --search.

948 s per step expected: decode 79, prefill and extend 119, logprobs 300, update 450.
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
    config.learning.micro_batch_rows = 8
    config.model.remat = "dots"
    config.mesh.rollout_tensor = 1
    config.rollout.slots = 384
    return config

"""The 7B recipes with settings for six machines: `--config=configs/machines.py:NAME`, NAME a row of `MACHINES`.

    python launch/plan.py --config=configs/machines.py:qwen7b_h100_8 --topology=h100:8

They change the speed, not what is learned. Compiled for these machines, they fit (docs/scale.md has the memory);
nothing was run there.
"""

import runpy
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from psearch_jax.types import UserError


class Machine(NamedTuple):
    recipe: str
    # Every token reads the weights that a chip holds. 1: all 15.2 GB, so that decoding needs no communication;
    # 4: a quarter, which leaves room for the cache.
    rollout_tensor: int
    # Two rows per device, and four on v6e: larger micro-batches gather the weights less often, but need the memory
    # that `dots` takes. Where memory is short, and with adapters, whose rows keep one GPU busy: one.
    micro_batch_rows: int
    # `dots` keeps the results of attention and of products with weights, where there is room for them.
    remat: str
    # Each decode step reads the weights once for all slots: as many as fit.
    slots: int


MACHINES = {
    "qwen7b_v5e_4x4": Machine("qwen7b", 4, 16, "full", 192),  # 16 chips
    "qwen7b_v6e_4x4": Machine("qwen7b", 4, 64, "full", 512),  # 16 chips
    "qwen7b_v5p_2x2x1": Machine("qwen7b", 1, 8, "dots", 384),  # 4 chips
    "qwen7b_h100_8": Machine("qwen7b", 4, 16, "dots", 384),
    "qwen7b_ppo_h100_8": Machine("qwen7b_ppo", 4, 16, "dots", 384),
    "qwen7b_lora_h100": Machine("qwen7b_lora", 1, 1, "dots", 96),
}


def get_config(name: str = "") -> ConfigDict:
    if name not in MACHINES:
        raise UserError(f"{repr(name) if name else 'no name'} found, accepted: one of {', '.join(MACHINES)}")
    machine = MACHINES[name]
    config = runpy.run_path(str(Path(__file__).with_name(f"{machine.recipe}.py")))["get_config"]()
    # Training splits weights over fsdp only: with `tensor` above 1, every layer would wait for two sums over it.
    config.mesh.update(data=1, fsdp=-1, tensor=1, rollout_tensor=machine.rollout_tensor)
    config.learning.micro_batch_rows = machine.micro_batch_rows
    config.model.remat = machine.remat
    config.rollout.slots = machine.slots
    return config

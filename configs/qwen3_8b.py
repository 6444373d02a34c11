"""The recipe of configs/qwen7b.py for Qwen3-8B.

    python launch/train.py --config=configs/qwen3_8b.py --config.data.source=TRAIN.parquet \\
        --config.retrieval.index=DIR --workdir=DIR

What samples takes 18.2 of the 31.2 GiB of a v6e:4x4's chips; run launch/plan.py for the rest (docs/scale.md).
Its cache takes 2.6 times that of Qwen2.5-7B (8 kv heads for 4, 36 layers for 28), which is what a chip has to be
larger for. A model that was taught to think at length may want more than the recipe's `rollout.turn_tokens` of 500.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen3-8B", shard_residual=True),
        mesh=dict(data=1, fsdp=-1, tensor=4),
        rollout=dict(slots=128, overlap_search=True),  # all else of the recipe are the defaults
        learning=dict(micro_batch_rows=16),
    )

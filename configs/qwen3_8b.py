"""The recipe of configs/qwen7b.py for Qwen3-8B.

    python launch/train.py --config=configs/qwen3_8b.py --config.data.source=TRAIN.parquet \\
        --config.retrieval.index=DIR --workdir=DIR

On v6e:4x4, sampling needs 18.2 of 31.2 GiB per chip; run launch/plan.py for the other programs (docs/scale.md). The KV
cache is 2.6 times that of Qwen2.5-7B (8 kv heads instead of 4, 36 layers instead of 28), so it needs larger chips. A
model trained to think at length may need more than the recipe's `rollout.turn_tokens` of 500.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen3-8B", shard_residual=True),
        mesh=dict(data=1, fsdp=-1, tensor=4),
        rollout=dict(slots=128, overlap_search=True),  # the rest of the recipe is the defaults
        learning=dict(micro_batch_rows=16),
    )

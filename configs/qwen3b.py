"""The published recipe for Qwen2.5-3B-Instruct.

    python launch/train.py --config=configs/qwen3b.py --config.data.source=TRAIN.parquet \\
        --config.retrieval.index=DIR --workdir=DIR

Planned for v5e:2x4, at most 13.8 of 15.8 GiB per chip, and for v6e:2x2 (docs/scale.md).
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-3B-Instruct", shard_residual=True),
        mesh=dict(data=1, fsdp=-1, tensor=2),
        rollout=dict(slots=128, overlap_search=True),  # the rest of the recipe is the defaults
        learning=dict(micro_batch_rows=16),
    )

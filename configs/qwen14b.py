"""The published recipe for Qwen2.5-14B-Instruct; for 32B set --config.model.path=Qwen/Qwen2.5-32B-Instruct.

    python launch/train.py --config=configs/qwen14b.py --config.data.source=TRAIN.parquet \\
        --config.retrieval.index=DIR --workdir=DIR

Planned for v5e:8x8, at most 11.7 of 15.8 GiB per chip; v5e:4x8 is too small (docs/scale.md). On more chips,
`learning.micro_batch_rows` must be a multiple of mesh data x fsdp.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-14B-Instruct", shard_residual=True),
        mesh=dict(data=1, fsdp=-1, tensor=8),
        rollout=dict(slots=128, overlap_search=True),  # the rest of the recipe is the defaults
        learning=dict(micro_batch_rows=16),
    )

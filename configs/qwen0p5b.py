"""Qwen2.5-0.5B-Instruct with the published reward, for one GPU or a small TPU slice.

    python launch/train.py --config=configs/qwen0p5b.py --config.data.source=TRAIN.jsonl \\
        --config.retrieval.index=DIR --workdir=DIR

Planned for v5e:2x2, at most 4.2 of 15.8 GiB per chip, and for one GPU (docs/scale.md).
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-0.5B-Instruct"),
        rollout=dict(
            slots=64,
            samples=8,
            context_tokens=4096,
            prompt_tokens=1024,
            turn_tokens=300,
            obs_tokens=500,
        ),
        learning=dict(mini_batch_rollouts=256, micro_batch_rows=8),
        train=dict(steps=500, prompts=64, checkpoint_every_steps=25),
    )

"""Qwen2.5-7B-Instruct with LoRA adapters of rank 32, for one GPU with at least 48 GB.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.92 python launch/train.py --config=configs/qwen7b_lora.py \\
        --config.data.source=TRAIN.jsonl --config.retrieval.index=DIR --workdir=DIR

As compiled for one GPU, it needs 39.4 GiB (docs/scale.md), more than the 36.8 that a 40 GB card provides. Training
all 7B parameters on one GPU would need more than 120 GB.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-7B-Instruct", lora_rank=32, lora_alpha=64.0),
        rollout=dict(slots=32, overlap_search=True),  # all other budgets are the defaults, as published
        # Adapters are few and start at zero: they need a learning rate that would destroy the full weights.
        learning=dict(mini_batch_rollouts=80, micro_batch_rows=1, learning_rate=2e-5, warmup_ratio=0.05),
        train=dict(steps=500, prompts=64, checkpoint_every_steps=25),
    )

"""Qwen2.5-7B-Instruct with adapters of rank 32, for one GPU of 48 GB or more.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.92 python launch/train.py --config=configs/qwen7b_lora.py \\
        --config.data.source=TRAIN.jsonl --config.retrieval.index=DIR --workdir=DIR

It takes 39.4 GiB of one GPU, as compiled for one (docs/scale.md). A card of 40 GB gives 36.8: there it takes 28.8 with
--config.model.unstacked_decoding=false, and decodes more slowly. All of 7B trained in one place would need more than
120 GB.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-7B-Instruct", lora_rank=32, lora_alpha=64.0),
        rollout=dict(slots=32, overlap_search=True),  # all else of them are the defaults: the published budgets
        # Adapters are few and start at nothing: they take a rate that would wreck whole weights.
        learning=dict(mini_batch_rollouts=80, micro_batch_rows=1, learning_rate=2e-5, warmup_ratio=0.05),
        train=dict(steps=500, prompts=64, checkpoint_every_steps=25),
    )

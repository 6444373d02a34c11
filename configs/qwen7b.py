"""The published recipe for Qwen2.5-7B-Instruct (ParallelSearch, arXiv 2508.09303; GRPO settings of Search-R1 v0.3).

    python launch/train.py --config=configs/qwen7b.py --config.data.source=TRAIN.parquet \\
        --config.retrieval.index=DIR --workdir=DIR

It fits v5e:4x4 and larger slices. configs/machines.py has faster settings for v5e, v6e, v5p and eight H100; on other
machines run launch/plan.py first (docs/scale.md). Float32 master weights and AdamW need 12 bytes per parameter, about
91 GB over all chips, and the gradients another 30 GB during an update.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(
            path="Qwen/Qwen2.5-7B-Instruct",
            dtype="bfloat16",
            sampling_dtype="bfloat16",
            remat="full",
            shard_residual=True,
        ),
        mesh=dict(data=1, fsdp=-1, tensor=4),
        data=dict(template="published"),
        rollout=dict(
            slots=128,
            samples=5,
            context_tokens=6196,
            prompt_tokens=2048,
            turn_tokens=500,
            obs_tokens=1000,
            search_turns=4,
            overlap_search=True,  # for an index of 21 million passages
        ),
        reward=dict(format=0.1, decomposition=0.15, search_count=0.35),
        learning=dict(
            kl_coefficient=0.001,
            entropy_coefficient=0.001,
            # The published 256 would split groups of 5. With 320, 2560 rollouts make 8 equal updates instead of 10.
            mini_batch_rollouts=320,
            micro_batch_rows=16,
            learning_rate=5e-7,
            warmup_ratio=0.285,
        ),
        train=dict(steps=1005, prompts=512, checkpoint_every_steps=50),
    )

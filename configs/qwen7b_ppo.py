"""The published recipe for Qwen2.5-7B-Instruct with PPO (ParallelSearch, arXiv 2508.09303; settings of Search-R1).

    python launch/train.py --config=configs/qwen7b_ppo.py --config.data.source=TRAIN.parquet \\
        --config.retrieval.index=DIR --workdir=DIR

Policy and critic have 7B parameters each: run launch/plan.py for your machine first (docs/scale.md); for eight H100
there are settings in configs/machines.py. With PPO, the toy policy learned when to split with a decomposition bonus of
0.5, but not with the 0.15 used here (docs/notes.md).
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-7B-Instruct", remat="full", shard_residual=True),
        mesh=dict(data=1, fsdp=-1, tensor=4),
        data=dict(template="published"),
        rollout=dict(slots=128, samples=1, overlap_search=True),  # all other budgets are the defaults
        reward=dict(format=0.1, decomposition=0.15, search_count=0.35),
        learning=dict(
            algorithm="ppo",
            gae_lambda=1.0,
            kl_in="reward",
            kl_coefficient=0.001,
            entropy_coefficient=0.001,
            mini_batch_rollouts=256,
            micro_batch_rows=16,
            learning_rate=1e-6,
            warmup_ratio=0.285,
        ),
        critic=dict(learning_rate=1e-5, warmup_ratio=0.015),
        train=dict(steps=1005, prompts=512, checkpoint_every_steps=50),
    )

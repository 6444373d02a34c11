"""PPO with the toy policy in the closed world, on a CPU: configs/smoke.py with a critic instead of groups.

    python launch/train.py --config=configs/smoke_ppo.py --workdir=runs/ppo

Learning rates and updates suit the toy policy. The decomposition bonus is 0.5: for a split, a parallel question gains
several times what a sequential one loses, and with the published 0.15 the policy split both kinds.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        seed=0,
        model=dict(path="toy", dtype="float32", sampling_dtype="float32", remat="dots"),
        data=dict(source="closed_world", template="toy"),
        retrieval=dict(topk=2),
        rollout=dict(
            slots=192,
            samples=1,
            context_tokens=448,
            prompt_tokens=64,
            turn_tokens=128,
            obs_tokens=144,
            search_turns=4,
        ),
        reward=dict(decomposition=0.5),
        learning=dict(
            algorithm="ppo",
            kl_in="reward",
            kl_coefficient=0.001,
            mini_batch_rollouts=48,
            micro_batch_rows=16,
            learning_rate=1.5e-4,
            warmup_ratio=0.05,
            weight_decay=0.0,
        ),
        critic=dict(learning_rate=1e-3, warmup_ratio=0.0, pretrain_steps=15),
        train=dict(steps=75, prompts=192, checkpoint_every_steps=30),
        eval=dict(questions_per_kind=200, temperature=1.0),
    )

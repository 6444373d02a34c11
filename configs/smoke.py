"""GRPO with the toy policy in the closed world, on a CPU: the config of `make demo`.

python launch/train.py --config=configs/smoke.py --workdir=runs/smoke
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
            slots=64,
            samples=8,
            context_tokens=448,
            prompt_tokens=64,
            turn_tokens=128,
            obs_tokens=144,
            search_turns=4,
            num_buckets=1,
        ),
        learning=dict(
            mini_batch_rollouts=128,
            micro_batch_rows=8,
            learning_rate=4.5e-4,
            warmup_ratio=0.05,
            decay_ratio=0.6,
            kl_coefficient=0.0,
            weight_decay=0.0,
        ),
        train=dict(steps=58, prompts=16, checkpoint_every_steps=29),
        eval=dict(questions_per_kind=200, temperature=0.0),
        sft=dict(epochs=20, learning_rate=2e-3),
    )

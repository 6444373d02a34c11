"""A smoke run of the 0.5B model on one 16 GB GPU without bfloat16 (a Colab T4): LoRA adapters in float32 on frozen
float16 weights.

    python launch/train.py --config=configs/colab.py --config.data.source=TRAIN.jsonl \\
        --config.retrieval.corpus=CORPUS.jsonl --workdir=DIR

Short contexts and few rollouts: a test of the installation, not a recipe. As compiled for a T4, it needs 3.7 of 13.8
GiB (launch/plan.py --topology=t4).
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(
            path="Qwen/Qwen2.5-0.5B-Instruct", dtype="float32", sampling_dtype="float16", remat="full", lora_rank=16
        ),
        rollout=dict(
            slots=8,
            samples=4,
            context_tokens=2048,
            prompt_tokens=768,
            turn_tokens=200,
            obs_tokens=400,
            search_turns=2,
        ),
        learning=dict(mini_batch_rollouts=16, micro_batch_rows=1, learning_rate=1e-4),
        train=dict(steps=10, prompts=4, checkpoint_every_steps=10),
    )

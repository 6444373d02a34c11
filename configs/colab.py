"""A smoke run of the 0.5B shape on one 16 GB GPU without bfloat16 (a Colab T4): float32 training, float16 sampling.

    python launch/train.py --config=configs/colab.py --config.data.source=TRAIN.jsonl \\
        --config.retrieval.corpus=CORPUS.jsonl --workdir=DIR

Short contexts and few rollouts: a test of the set-up, not a recipe.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-0.5B-Instruct", dtype="float32", sampling_dtype="float16", remat=True),
        rollout=dict(
            slots=8,
            samples=4,
            context_tokens=2048,
            prompt_tokens=768,
            turn_tokens=200,
            obs_tokens=400,
            search_turns=2,
        ),
        # The reference alone would take another gigabyte; a smoke run has no time to drift.
        learning=dict(mini_batch_rollouts=16, micro_batch_rows=1, kl_coefficient=0.0),
        train=dict(steps=10, prompts=4, checkpoint_every_steps=10),
    )

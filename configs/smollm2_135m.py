"""SmolLM2-135M-Instruct on a laptop: adapters, short rollouts of one passage per sub-query, 32 per step.

    python launch/sft.py --config=configs/smollm2_135m.py --config.model.path=MODEL --transcripts=FILE \\
        --workdir=runs/cold_start
    python launch/train.py --config=configs/smollm2_135m.py --config.model.path=runs/cold_start/policy \\
        --config.data.source=TRAIN --config.retrieval.index=INDEX --workdir=runs/smollm2

A model of this size needs the cold start.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(
            path="HuggingFaceTB/SmolLM2-135M-Instruct",
            dtype="float32",
            sampling_dtype="float32",
            remat="none",
            lora_rank=8,
            lora_alpha=16.0,
        ),
        data=dict(template="brief"),
        retrieval=dict(topk=1, max_sub_queries=4),
        rollout=dict(
            slots=16,
            samples=4,
            # At temperature 1, comparisons lose a third of their greedy EM (docs/results.md).
            temperature=0.7,
            context_tokens=768,
            prompt_tokens=160,
            turn_tokens=192,
            obs_tokens=224,
            search_turns=4,
            num_buckets=12,
        ),
        # With the published search_count, .35, two runs learned to guess after one search (docs/results.md).
        reward=dict(decomposition=0.3, search_count=0.05),
        learning=dict(
            mini_batch_rollouts=32,
            micro_batch_rows=1,
            learning_rate=2e-4,
            warmup_ratio=0.05,
            decay_ratio=0.25,
            weight_decay=0.0,
            old_logprobs="sampler",
            kl_coefficient=0.0,
        ),
        train=dict(steps=64, prompts=8, checkpoint_every_steps=10, keep_checkpoints=1),
        eval=dict(questions_per_kind=48, temperature=0.0),
        sft=dict(epochs=1, batch_rows=8, learning_rate=1e-3),
    )

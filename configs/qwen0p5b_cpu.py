"""Qwen2.5-0.5B-Instruct on a laptop: LoRA adapters, short turns, 48 rollouts per step.

    python launch/sft.py --config=configs/qwen0p5b_cpu.py --transcripts=FILE --workdir=runs/cold_start
    python launch/train.py --config=configs/qwen0p5b_cpu.py --config.model.path=runs/cold_start/policy \\
        --config.data.source=TRAIN --config.retrieval.corpus=CORPUS.jsonl --workdir=runs/qwen0p5b_cpu

A model of this size needs the cold start: sampled at temperature 1, the published weights end most rollouts without an
action. docs/results.md reports the time per step and the results. The same config runs on a small GPU.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(
            path="Qwen/Qwen2.5-0.5B-Instruct",
            dtype="bfloat16",  # for products with weights; a CPU without bfloat16 instructions is as fast in float32
            sampling_dtype="bfloat16",
            remat="none",
            lora_rank=8,
            lora_alpha=16.0,
        ),
        data=dict(template="compact"),
        retrieval=dict(topk=2),
        rollout=dict(
            slots=24,
            samples=6,
            context_tokens=1024,
            prompt_tokens=352,
            turn_tokens=128,  # comparisons of three names, as scripted transcripts write them, take more than 80
            obs_tokens=200,
            search_turns=3,
        ),
        learning=dict(
            mini_batch_rollouts=48,
            micro_batch_rows=1,
            learning_rate=2e-4,
            warmup_ratio=0.1,
            weight_decay=0.0,
            old_logprobs="sampler",
            kl_coefficient=0.0,
        ),
        train=dict(steps=30, prompts=8, checkpoint_every_steps=5, keep_checkpoints=1),
        eval=dict(questions_per_kind=24, temperature=0.0),
        sft=dict(epochs=1, batch_rows=8, learning_rate=3e-4),
    )

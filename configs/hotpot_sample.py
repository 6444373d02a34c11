"""A test with real data and random weights: HotpotQA questions and passages, the Qwen2 vocabulary, a small policy.

The policy learns nothing, but every part of a run is exercised. `initial_search` puts passages into every context.

    python launch/train.py --config=configs/hotpot_sample.py --config.data.source=FILE.jsonl \\
        --config.retrieval.corpus=FILE.jsonl --config.model.tokenizer=DIR --config.train.steps=2 --workdir=DIR
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="", preset="tiny", dtype="float32", sampling_dtype="float32", remat="dots"),
        rollout=dict(
            slots=8,
            samples=2,
            context_tokens=1024,
            prompt_tokens=384,
            turn_tokens=32,
            obs_tokens=512,
            search_turns=1,
            initial_search=True,
        ),
        learning=dict(mini_batch_rollouts=8, micro_batch_rows=4),
        train=dict(steps=2, prompts=4, checkpoint_every_steps=1),
        eval=dict(questions_per_kind=0),
    )

"""REINFORCE for Qwen2.5-7B-Instruct: advantages without a standard deviation, one update per step, F1 as the outcome.

    python launch/train.py --config=configs/qwen7b_reinforce.py --config.data.source=TRAIN.parquet \\
        --config.retrieval.index=DIR --workdir=DIR

After Search-R1++ (arXiv 2602.19526), which reports .442 as the mean EM of seven sets for Qwen2.5-7B, compared with
.403 for Search-R1: REINFORCE needs fewer searches than PPO, GRPO is the least stable, and F1 as the outcome beats EM
only if rollouts without a search or an answer are penalised. Here the advantage is the reward minus the mean of the
group's other rewards (arXiv 2402.14740), a missing answer costs `unfinished_penalty`, and the bonuses for splitting
are those of ParallelSearch. This combination was never run at 7B. Memory is as for configs/qwen7b.py.
"""

from ml_collections import ConfigDict

from psearch_jax.config import config_dict


def get_config() -> ConfigDict:
    return config_dict(
        model=dict(path="Qwen/Qwen2.5-7B-Instruct", remat="full", shard_residual=True),
        mesh=dict(data=1, fsdp=-1, tensor=4),
        data=dict(template="published"),
        # The other budgets are the defaults.
        rollout=dict(slots=128, samples=5, overlap_search=True),
        reward=dict(outcome="f1", unfinished_penalty=0.5),
        learning=dict(
            advantage="leave_one_out",
            mini_batch_rollouts=2560,  # all rollouts of a step in one update, so that the ratio is 1: no clipping
            micro_batch_rows=16,
            kl_coefficient=0.001,
            learning_rate=1e-6,
            warmup_ratio=0.285,
        ),
        train=dict(steps=1005, prompts=512, checkpoint_every_steps=50),
    )

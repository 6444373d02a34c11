"""The fields of a config that say how a policy is trained and evaluated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from psearch_jax.config.setting import Accepted, free, setting, share
from psearch_jax.types import KINDS

BEST_FIGURES = ("em", "f1", "decomposition_ratio", "valid_format")


def best_metric(text: str) -> tuple[str, str]:
    """Splits eval.best_metric into (kind or "all", metric); a prefix `eval/`, as in metrics.jsonl, is accepted."""
    kind, _, figure = text.removeprefix("eval/").rpartition("/")
    return kind or "all", figure


def _is_metric(text: str) -> bool:
    kind, figure = best_metric(text)
    return kind in ("all", *KINDS) and figure in BEST_FIGURES


_METRIC = Accepted(
    f"{', '.join(BEST_FIGURES)}, or one of them for a kind ({', '.join(KINDS)}), as in {KINDS[0]}/em", _is_metric
)


@dataclass(frozen=True)
class RewardSection:
    """The reward of a rollout."""

    profile: Literal["paper", "compat"] = setting(
        "paper", "`paper`: rewards parsed actions; `compat`: rewards text exactly as the public implementation does."
    )
    outcome: Literal["em", "f1"] = setting("em", "Value of the answer: exact match or F1.")
    format: float = setting(
        0.1, "Bonus for a wrong answer in valid format; penalty for a right answer in invalid format."
    )
    final_format: float = setting(0.0, "Bonus for a wrong answer in invalid format.")
    decomposition: float = setting(
        0.15,
        "A parallel question earns 3 x this if the first search splits it; every other question earns this if it is "
        "not split.",
    )
    search_count: float = setting(
        0.35, "Earns this x (1 - abs(searches - 1)); for a sequential or mixed one, this x (1 - max(0, 2 - searches))."
    )
    critical_path: float = setting(
        0.0,
        "Above 0, this replaces `decomposition` and `search_count`, and needs no labels: a right answer earns "
        "this x (1 - turns / mean turns of the group's right answers), limited to half of it in both directions.",
        at_least=0,
    )
    sub_query_penalty: float = setting(
        0.0,
        "Subtracted for every sub-query that was run. Whether the needed ones run at once or one after the other, "
        "they cost the same, so with `critical_path` it is a price on needless ones.",
        at_least=0,
    )
    unfinished_penalty: float = setting(0.0, "Subtracted from a rollout without an answer.", at_least=0)


@dataclass(frozen=True)
class LearningSection:
    """The loss and its optimizer."""

    algorithm: Literal["grpo", "ppo"] = setting(
        "grpo", "`grpo`: advantages from the rewards of a question's group; `ppo`: from a critic (section `critic`)."
    )
    advantage: Literal["std", "mean", "leave_one_out"] = setting(
        "std",
        "GRPO only. `std`: (reward - group mean) / group standard deviation; `mean`: reward - group mean; "
        "`leave_one_out`: reward - mean of the group's other rewards.",
    )
    gamma: float = share(1.0, "PPO only: discount per sampled token.")
    gae_lambda: float = share(1.0, "PPO only: lambda of GAE; 1 uses only rewards, 0 only the critic's next value.")
    clip_low: float = share(0.2, "Clips the ratio of policy to old policy below 1 - clip_low.")
    clip_high: float = setting(0.2, "Clips the same ratio above 1 + clip_high.", at_least=0)
    kl_coefficient: float = setting(
        0.001, "Weight of the KL to the policy at the start of the run; 0: no reference copy is kept.", at_least=0
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "`loss`: the KL is a term of the loss; `reward`: it is subtracted from each token's reward (PPO only)."
    )
    entropy_coefficient: float = setting(0.0, "Weight of the entropy, which is subtracted from the loss.", at_least=0)
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = setting(
        "token_mean",
        "How the loss is averaged. `token_mean`: over all tokens; `sequence_mean`: the mean of each trajectory's "
        "mean; `constant_length`: the sum divided by trajectories x context_tokens.",
    )
    old_logprobs: Literal["trainer", "sampler"] = setting(
        "trainer",
        "Source of the old policy's log-probs. `trainer`: computed before a step's first update, or in the update "
        "itself if the step has only one; `sampler`: recorded while sampling, which saves a pass over the batch.",
    )
    ratio: Literal["token", "sequence"] = setting(
        "token", "Ratio of policy to old policy per token, or per trajectory (GSPO)."
    )
    importance_cap: float = setting(
        0.0, "Weights each token by min(p_old / p_sampler, importance_cap); 0: off.", at_least=0
    )
    mini_batch_rollouts: int = setting(
        320, "Rollouts per optimizer step, in complete groups. The published 256 cuts groups of 5.", at_least=1
    )
    micro_batch_rows: int = free(4, "Rows per forward and backward pass, over all devices.", at_least=1)
    learning_rate: float = setting(
        1e-6, "Learning rate of AdamW between warm-up and decay.", at_least=0, below=math.inf
    )
    warmup_ratio: float = share(0.285, "Share of all updates over which the learning rate rises linearly.")
    decay_ratio: float = share(0.0, "Share of all updates, at the end, over which it falls linearly to 0.")
    weight_decay: float = setting(0.01, "Weight decay of AdamW, on all trained parameters.", at_least=0)


@dataclass(frozen=True)
class TrainSection:
    """Length of a run, and what it saves."""

    steps: int = free(
        1005, "Training steps; each collects rollouts of `prompts` questions and updates on them.", at_least=1
    )
    prompts: int = setting(512, "Questions per step.", at_least=1)
    staleness: int = setting(
        0,
        "Maximum age, in steps, of the weights that sample a token. Rollouts of this many further steps are started "
        "ahead and fill the slots while the last rollouts of a step are decoded; unfinished ones continue with the "
        "next step's weights. 0: each step starts and ends its own rollouts.",
        at_least=0,
    )
    dynamic_sampling_rounds: int = setting(
        0,
        "Dynamic sampling (DAPO): up to this many times, a step draws `prompts` more questions to replace groups "
        "whose rewards are all equal; 0: off.",
        at_least=0,
    )
    checkpoint_every_steps: int = free(
        50, "Writes a checkpoint at multiples of this step, every 20 minutes, and at the end.", at_least=1
    )
    keep_checkpoints: int = free(3, "Number of newest checkpoints to keep.", at_least=1)
    record_rollouts: bool = free(
        False, "Writes all rollouts, with everything that learning reads of them, to rollouts/."
    )
    replay: str = setting(
        "",
        "Directory of a run with `record_rollouts`; this run learns from its rollouts and samples none. It needs the "
        "same seed, questions and number of prompts, and is not evaluated.",
    )


@dataclass(frozen=True)
class CriticSection:
    """The critic of PPO (learning.algorithm=ppo), which shares all other settings with the policy."""

    learning_rate: float = setting(1e-5, "Learning rate of the critic's AdamW.", at_least=0, below=math.inf)
    warmup_ratio: float = share(0.015, "Share of all updates over which its learning rate rises linearly.")
    pretrain_steps: int = setting(0, "Number of first steps in which only the critic is trained.", at_least=0)


@dataclass(frozen=True)
class EvalSection:
    """Evaluations before, during and after training."""

    every_steps: int = free(
        0, "Steps between evaluations; 0: only before the first step and after the last.", at_least=0
    )
    questions_per_kind: int = setting(
        400, "Maximum number of evaluated questions of each kind; 0: no evaluation.", at_least=0
    )
    best_metric: str = setting(
        "em",
        "With every_steps, WORKDIR/best keeps the parameters with the highest value of this metric, over "
        "all validation questions or over those of one kind.",
        accepted=_METRIC,
    )
    temperature: float = setting(
        0.0,
        "Sampling temperature of evaluations; 0: greedy. Those before the first step and after the last are also "
        "done greedily.",
        at_least=0,
    )


@dataclass(frozen=True)
class SFTSection:
    """Supervised fine-tuning (launch/sft.py). Model, mesh, lengths and checkpoints come from the other sections."""

    epochs: int = setting(2, "Passes over the transcripts.", at_least=1)
    batch_rows: int = setting(16, "Transcripts per optimizer step.", at_least=1)
    learning_rate: float = setting(
        1e-5, "Peak learning rate of AdamW; adapters need about ten times as much.", at_least=0, below=math.inf
    )
    validation_share: float = setting(
        0.0, "Share of the transcripts to hold out; their loss is logged once per epoch.", at_least=0, below=1
    )

"""The fields of a run's config, by section."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from psearch_jax.config.setting import SEED, Accepted, Resume, one_of, setting
from psearch_jax.config.shapes import PRESETS, Lora
from psearch_jax.types import KINDS

SAME_CONTENT, FREE = Resume.SAME_CONTENT, Resume.FREE
BEST_FIGURES = ("em", "f1", "decomposition_ratio", "valid_format")

Method = Literal["parallelsearch", "search_r1", "parallel_prompt", "r1"]
Remat = Literal["none", "dots", "full"]


def best_metric(text: str) -> tuple[str, str]:
    """Splits eval.best_metric into (kind or "all", metric); a prefix `eval/`, as in metrics.jsonl, is accepted."""
    kind, _, figure = text.removeprefix("eval/").rpartition("/")
    return kind or "all", figure


def _is_metric(text: str) -> bool:
    kind, figure = best_metric(text)
    return kind in ("all", *KINDS) and figure in BEST_FIGURES


def _are_urls(text: str) -> bool:
    urls = (url.strip() for url in re.split(r"[,|]", text))
    return not text or all(re.fullmatch(r"https?://[^/\s]+/\S*", url) for url in urls)


_METRIC = Accepted(
    f"{', '.join(BEST_FIGURES)}, or one of them for a kind ({', '.join(KINDS)}), as in {KINDS[0]}/em", _is_metric
)
_URLS = Accepted("http://host:port/retrieve", _are_urls)


@dataclass(frozen=True)
class ModelSection:
    """Model weights, dtypes and memory options."""

    path: str = setting(
        "",
        'Hugging Face directory or hub id; "": random weights of `preset`; "toy": the toy policy of this package.',
        resume=SAME_CONTENT,
    )
    preset: str = setting(
        "7b",
        "Model shape for random weights, used only when `path` is empty.",
        accepted=one_of(PRESETS),
        resume=SAME_CONTENT,
    )
    tokenizer: str = setting(
        "",
        'Hugging Face tokenizer directory or hub id, or `toy`; "": the tokenizer at `path`.',
        resume=SAME_CONTENT,
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "bfloat16", "Dtype of the training computation; the master weights are float32."
    )
    sampling_dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "bfloat16",
        "Dtype of the sampler's weights and KV cache. On a CPU, `sampling_dtype` and `dtype` apply only to matrix "
        "products with weights; activations and KV cache are float32.",
    )
    int8_weights: bool = setting(
        False,
        "Quantizes the layers' kernels to int8 for sampling (models/int8.py). On a TPU this halves their bytes "
        "compared with 16 bits, but the sampler differs more from the trained model (metric `logp_gap`); "
        "learning.importance_cap corrects for that.",
    )
    int8_cache: bool = setting(False, "Quantizes the KV cache to int8 for sampling, with the same drawback.")
    unstacked_decoding: bool = setting(
        True,
        "On a GPU or a single CPU device, decoding copies each layer's weights into separate arrays once per call. "
        "The copy needs as much memory as the layers, in float32 on a CPU without instructions for `sampling_dtype`. "
        "If false, decoding copies a slice of the stacked weights before every product, and on a CPU a call in 16 "
        "bits first converts all of them to float32.",
        resume=FREE,
    )
    shard_residual: bool = setting(
        False,
        "Training splits positions over the `tensor` axis between layers: less memory, more traffic.",
        resume=FREE,
    )
    remat: Remat = setting(
        "full",
        "What the backward pass recomputes in each layer: `none`: nothing; `dots`: all but attention and the matrix "
        "products with weights; `full`: everything. Less recomputation is faster and needs more memory; "
        "launch/plan.py --search chooses the fastest that fits.",
        resume=FREE,
    )
    lora_rank: int = setting(
        0,
        "Rank of LoRA adapters; 0: train all weights. With adapters, the base weights stay frozen in "
        "`sampling_dtype` and serve as the reference policy.",
        at_least=0,
    )
    lora_alpha: float = setting(32.0, "LoRA scaling: the adapters' output is multiplied by lora_alpha / lora_rank.")
    adapters: str = setting(
        "",
        "PEFT directory of LoRA adapters to put on the weights of `path`; they bring their own rank and alpha. "
        "Training continues these adapters, and the reference policy includes them.",
        resume=SAME_CONTENT,
    )

    @property
    def lora(self) -> Lora | None:
        return Lora(self.lora_rank, self.lora_alpha) if self.lora_rank else None


@dataclass(frozen=True)
class MeshSection:
    """How devices share the work."""

    data: int = setting(
        1, "Replicas of the training state, each with its own rows; one of the three sizes may be -1.", resume=FREE
    )
    fsdp: int = setting(
        -1,
        "Devices that share weights, optimizer state and rows; -1: all that `data` and `tensor` leave.",
        resume=FREE,
    )
    tensor: int = setting(
        1, "Devices over which heads, MLPs and vocabulary are split, in training and in sampling.", resume=FREE
    )
    rollout_devices: int = setting(
        0,
        "Of all devices, the number that only sample, while the others train (at the same time with "
        "`train.staleness` of at least 1); `data`, `fsdp` and `tensor` then divide those that train. With "
        "several processes, each has equally many of both; several hosts of TPUs are refused. 0: all devices do both "
        "in turn.",
        at_least=0,
    )
    rollout_tensor: int = setting(
        0,
        "`tensor` of the sampler: a multiple or a divisor of `tensor`. Training is fastest with a small `tensor`; the "
        "sampler's weights are split over `tensor` only. 0: the same. Programs that do not train use this mesh alone.",
        at_least=0,
        resume=FREE,
    )


@dataclass(frozen=True)
class DataSection:
    """Questions and their prompts."""

    source: str = setting(
        "",
        'Training questions: a question file, a directory made by launch/prepare_data.py, or "closed_world".',
        resume=SAME_CONTENT,
    )
    validation: str = setting(
        "", "Questions for evaluation, never for training: a file or a prepared directory.", resume=SAME_CONTENT
    )
    validation_share: float = setting(
        0.0,
        "Instead of `validation`: the share of `source` to hold out of training, chosen by a hash of (source, id).",
        at_least=0,
        below=1,
        training_only=True,
    )
    prompt: Literal["template", "row"] = setting(
        "template", "`template`: the prompt comes from `template`; `row`: the chat messages stored with each question."
    )
    template: str = setting("parallel", "Prompt template: a packaged name or a file of your own.", resume=SAME_CONTENT)
    world_names: Literal["known", "new"] = setting(
        "known",
        "Names in the closed world. `known`: names that cold starts contain; `new`: names that no cold start "
        "contains.",
    )
    world_seed: int = setting(
        0, "Seed of the closed world; the run's own seed changes neither the world nor its evaluation.", at_least=0
    )
    world_questions: int = setting(6000, "Training questions drawn from the closed world.", at_least=1)
    parallel_share: float = setting(
        0.5, "Share of parallel questions among them; single questions make up the rest.", at_least=0
    )
    sequential_share: float = setting(0.4, "Share of sequential questions among them.", at_least=0)


@dataclass(frozen=True)
class RetrievalSection:
    """Where passages come from."""

    index: str = setting(
        "",
        "Index directory made by launch/build_index.py. The results of several comma-separated indexes over one "
        "corpus are fused.",
        resume=SAME_CONTENT,
    )
    corpus: str = setting(
        "", "Jsonl corpus that is encoded when the run starts; for small corpora only.", resume=SAME_CONTENT
    )
    url: str = setting(
        "",
        'Servers that speak Search-R1\'s /retrieve: "," separates replicas of one index, "|" the parts of a sharded '
        "corpus.",
        accepted=_URLS,
        resume=FREE,
    )
    timeout_s: float = setting(60.0, "Seconds that a server may take for its complete answer.", above=0, resume=FREE)
    retry_deadline_s: float = setting(
        300.0, "Seconds that a run retries failing servers before it saves and stops.", at_least=0, resume=FREE
    )
    token_file: str = setting("", "File with the bearer token for the servers.", resume=FREE)
    topk: int = setting(3, "Passages per sub-query.", at_least=1)
    cache_queries: int = setting(
        65_536, "Maximum number of answers in this process's LRU cache; 0: no cache.", at_least=0, resume=FREE
    )
    cache_mb: int = setting(1024, "Maximum size of this cache in MiB.", at_least=0, resume=FREE)
    max_sub_queries: int = setting(
        8, "Maximum number of sub-queries that one search runs; the rest are ignored.", at_least=1
    )


@dataclass(frozen=True)
class RolloutSection:
    """Number, length and sampling of rollouts."""

    slots: int = setting(
        64, "Rollouts decoded at the same time; all rollouts of a step share these slots.", at_least=1, resume=FREE
    )
    samples: int = setting(5, "Rollouts per question.", at_least=1)
    context_tokens: int = setting(6196, "Maximum tokens of a rollout, including prompt and passages.")
    prompt_tokens: int = setting(
        2048, "Maximum tokens of a prompt; the rollouts of a longer prompt end as `truncated`.", at_least=1
    )
    turn_tokens: int = setting(500, "Maximum tokens sampled in a turn.", at_least=1)
    obs_tokens: int = setting(1000, "Maximum tokens inserted after a search, over all its sub-queries.")
    search_turns: int = setting(4, "Turns in which the model may search; one answer turn follows.", at_least=0)
    after_eos: Literal["corrective", "end"] = setting(
        "corrective",
        "What follows a reply that ends without a search or an answer: `corrective`: a corrective message and "
        "another turn, as published; `end`: the end of the rollout.",
    )
    max_tokens_after_answer: int = setting(
        4, "Maximum tokens sampled after `</answer>` while waiting for a stop token.", at_least=0
    )
    temperature: float = setting(
        1.0,
        "Sampling temperature; the loss scores tokens at the same temperature.",
        accepted=Accepted("above 0 (training samples)", lambda value: value > 0),
        training_only=True,
    )
    top_p: float = setting(
        1.0,
        "Samples from the most likely tokens whose probabilities add up to this share; 1: from all tokens.",
        above=0,
        at_most=1,
    )
    top_k: int = setting(0, "Samples from this many most likely tokens; 0: from all tokens.", at_least=0)
    num_buckets: int = setting(
        4,
        "Number of padded widths for prompts, passages and rows: fewer compile faster, more pad less.",
        at_least=1,
        resume=FREE,
    )
    yield_share: float = setting(
        0.125,
        "Decoding returns to the host when this share of the live rows waits for passages or for the next rollout.",
        above=0,
        at_most=1,
        resume=FREE,
    )
    draft_tokens: int = setting(
        0,
        "Draft tokens that each decode step verifies per row. They are copied from what followed the row's last "
        "tokens earlier in the row; each one that equals the sampled token saves a step. The samples do not change. "
        "Useful where a decode step mostly reads weights and caches, as on accelerators.",
        at_least=0,
        at_most=7,
        resume=FREE,
    )
    overlap_search: bool = setting(
        False,
        "Runs the searches of one yield while the other rows decode, and inserts the passages at the next yield. "
        "Useful when searching is slow: over HTTP, or in a large index.",
        resume=FREE,
    )
    label_subqueries: bool = setting(True, "Writes each sub-query above its passages when a search has several.")
    deduplicate: bool = setting(
        False,
        "A passage that several sub-queries of a search return is shown once; the later ones refer to it. The saved "
        "tokens go to other passages.",
    )
    initial_search: bool = setting(False, "Searches for the question itself before the first sampled token.")
    unfinished: Literal["train", "mask", "penalise"] = setting(
        "train",
        "How training treats rollouts without an answer: `train`: like all others; `mask`: left out of the loss; "
        "`penalise`: reward.unfinished_penalty is subtracted.",
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
        0.35, "Earns this x (1 - abs(searches - 1)); for a sequential question, this x (1 - max(0, 2 - searches))."
    )
    parallelism: Literal["labelled", "critical_path"] = setting(
        "labelled",
        "What rewards parallel searches. `labelled`: `decomposition` and `search_count`, by the labelled kind of the "
        "question, as published; `critical_path`: fewer model turns than the other right answers of the group (GRPO), "
        "without labels.",
    )
    critical_path: float = setting(
        0.5,
        "With parallelism=critical_path, a right answer earns this x (1 - turns / mean turns of the group's right "
        "answers), limited to half of it in both directions.",
        at_least=0,
    )
    critical_path_steps: int = setting(
        0, "Steps over which the weight `critical_path` falls linearly to 0; 0: it stays.", at_least=0
    )
    mixed: Literal["sequential", "parallel"] = setting(
        "sequential", "Kind as which mixed questions (a comparison that contains a bridge) are rewarded."
    )
    gate_bonus_on_outcome: bool = setting(False, "Pays `decomposition` and `search_count` only for right answers.")
    search_penalty: float = setting(0.0, "Subtracted for every search that was run.", at_least=0)
    sub_query_penalty: float = setting(
        0.0,
        "Subtracted for every sub-query that was run. Whether the needed ones run at once or one after the other, "
        "they cost the same, so with parallelism=critical_path it is a price on needless ones.",
        at_least=0,
    )
    unfinished_penalty: float = setting(
        0.5, 'Subtracted from a rollout without an answer when rollout.unfinished is "penalise".'
    )
    overlong_tokens: int = setting(
        0,
        "Over the last `overlong_tokens` tokens of the context, a penalty rises linearly from 0 to "
        "`unfinished_penalty` (arXiv 2503.14476 eq. 13); 0: none.",
        at_least=0,
    )


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
    gamma: float = setting(1.0, "PPO only: discount per sampled token.", at_least=0, at_most=1, training_only=True)
    gae_lambda: float = setting(
        1.0,
        "PPO only: lambda of GAE; 1 uses only rewards, 0 only the critic's next value.",
        at_least=0,
        at_most=1,
        training_only=True,
    )
    whiten: Literal["batch", "kind"] = setting(
        "batch",
        "PPO only. Advantages are normalized to mean 0 and variance 1 over the tokens of a step: `batch`: all of "
        "them; `kind`: each kind of question separately.",
    )
    clip_low: float = setting(
        0.2, "Clips the ratio of policy to old policy below 1 - clip_low.", at_least=0, at_most=1
    )
    clip_high: float = setting(0.2, "Clips the same ratio above 1 + clip_high.", at_least=0)
    kl_coefficient: float = setting(
        0.001, "Weight of the KL to the policy at the start of the run; 0: no reference copy is kept.", at_least=0
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "`loss`: the KL is a term of the loss; `reward`: it is subtracted from each token's reward (PPO only)."
    )
    kl_clamp: float = setting(
        10.0, "Maximum of a token's KL in the loss; above it the KL has no gradient. 0: no maximum.", at_least=0
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
    dual_clip: float = setting(
        0.0,
        "Limits the loss of a token with negative advantage to dual_clip x abs(advantage) (arXiv 1912.09729); 0: off.",
        at_least=0,
    )
    guard: float = setting(
        0.0, "Weight of a penalty on good actions that become less likely (arXiv 2512.04220); 0: off.", at_least=0
    )
    importance_cap: float = setting(
        0.0, "Weights each token by min(p_old / p_sampler, importance_cap); 0: off.", at_least=0
    )
    importance_level: Literal["token", "sequence"] = setting(
        "token",
        "The probabilities in that ratio: `token`: of each token; `sequence`: of all sampled tokens of the rollout.",
    )
    reject_ratio: float = setting(
        0.0,
        "Leaves a rollout out of the loss if the geometric mean of its tokens' p_old / p_sampler is above "
        "reject_ratio or below 1 / reject_ratio; 0: off. With `old_logprobs=sampler`, p_old is that of the policy at "
        "each update.",
        accepted=Accepted("0, or above 1", lambda value: value == 0 or value > 1),
    )
    mini_batch_rollouts: int = setting(
        320,
        "Rollouts per optimizer step, in complete groups. The published value of 256 cuts groups of 5.",
        at_least=1,
    )
    micro_batch_rows: int = setting(
        4, "Rows per forward and backward pass, over all devices.", at_least=1, resume=FREE
    )
    learning_rate: float = setting(1e-6, "Learning rate of AdamW; constant after the warm-up.", at_least=0)
    warmup_ratio: float = setting(
        0.285, "Share of all updates over which the learning rate rises linearly to its full value.", at_least=0
    )
    weight_decay: float = setting(0.01, "Weight decay of AdamW, on all trained parameters.", at_least=0)
    beta1: float = setting(0.9, "AdamW's decay rate of the mean gradient.", at_least=0, below=1)
    beta2: float = setting(0.999, "AdamW's decay rate of the mean squared gradient.", at_least=0, below=1)
    gradient_clip: float = setting(
        1.0,
        "Maximum global norm of the gradient; larger gradients are scaled down to it.",
        accepted=Accepted("above 0 (inf: no clip)", lambda value: value > 0),
    )
    max_bad_steps: int = setting(
        3, "Consecutive updates with a non-finite loss or gradient after which the run stops.", at_least=1, resume=FREE
    )


@dataclass(frozen=True)
class TrainSection:
    """Length of a run, and what it saves."""

    steps: int = setting(
        1005,
        "Training steps; each collects rollouts of `prompts` questions and updates on them.",
        at_least=1,
        resume=FREE,
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
    checkpoint_every_steps: int = setting(
        50, "Writes a checkpoint at multiples of this step, and at the end.", at_least=1, resume=FREE
    )
    checkpoint_every_minutes: float = setting(
        20.0,
        "Also writes a checkpoint after a step that ends at least this many minutes after the last one; 0: off.",
        at_least=0,
        resume=FREE,
    )
    keep_checkpoints: int = setting(3, "Number of newest checkpoints to keep.", at_least=1, resume=FREE)
    keep_every_steps: int = setting(
        0, "Also keeps the checkpoints at multiples of this step; 0: none.", at_least=0, resume=FREE
    )
    trajectories_per_step: int = setting(
        64, "Rollouts written to trajectories/ at each step.", at_least=0, resume=FREE
    )
    record_rollouts: bool = setting(
        False, "Writes all rollouts, with everything that learning reads of them, to rollouts/.", resume=FREE
    )
    replay: str = setting(
        "",
        "Directory of a run with `record_rollouts`; this run learns from its rollouts and samples none. It needs the "
        "same seed, questions and number of prompts, and is not evaluated.",
    )


@dataclass(frozen=True)
class CriticSection:
    """The critic of PPO.

    Used with learning.algorithm=ppo; the critic shares all other settings with the policy.
    """

    learning_rate: float = setting(1e-5, "Learning rate of the critic's AdamW.", at_least=0)
    warmup_ratio: float = setting(
        0.015, "Share of all updates over which the critic's learning rate rises linearly.", at_least=0
    )
    value_clip: float = setting(
        0.5, "A value that moves further than this in one step does not lower the loss; 0: no clip.", at_least=0
    )
    pretrain_steps: int = setting(0, "Number of first steps in which only the critic is trained.", at_least=0)


@dataclass(frozen=True)
class AlarmSection:
    """Thresholds for warnings during a run.

    A metric that crosses its threshold logs a warning (train/monitoring/alarms.py). Metrics are means over the last
    `window` steps, except that only the last probe counts.
    """

    window: int = setting(10, "Steps in each mean; no alarm before this many steps are done.", at_least=1, resume=FREE)
    reward_fall: float = setting(
        0.1, "Fall of the mean reward below its highest value; up to 0.05 in good runs of the demo.", resume=FREE
    )
    over_splitting: float = setting(
        0.75,
        "Share of sequential questions that are split; up to 0.65 in the middle of good runs of the demo.",
        resume=FREE,
    )
    no_search: float = setting(0.3, "Share of rollouts without a search.", resume=FREE)
    wrong_though_seen: float = setting(
        0.5,
        "Share of wrong answers among rollouts that had the right answer in a passage, other than yes and no.",
        resume=FREE,
    )
    likelihood_fall: float = setting(
        0.3, "Fall of the log-prob of right rollouts, in nats per token, while the reward did not rise.", resume=FREE
    )
    entropy_rise: float = setting(0.5, "Rise of the entropy above its lowest value, in nats per token.", resume=FREE)
    gap: float = setting(
        0.1, "Mean absolute difference of sampler and trainer log-probs, in nats per token.", resume=FREE
    )
    sample_size: float = setting(
        0.5,
        "Effective sample size, as a share of the tokens, below which the sampler's weights are too old "
        "(`effective_sample_size`).",
        resume=FREE,
    )
    rejected: float = setting(0.25, "Share of tokens that learning.reject_ratio leaves out.", resume=FREE)
    probe_every_steps: int = setting(
        25,
        "Steps between probes. A probe repeats one rollout per question with passages retrieved for other questions; "
        "0: no probes.",
        at_least=0,
        resume=FREE,
    )
    probe_gain: float = setting(0.05, "EM that the right passages must at least add in a probe.", resume=FREE)


@dataclass(frozen=True)
class EvalSection:
    """Evaluations before, during and after training."""

    every_steps: int = setting(
        0, "Steps between evaluations; 0: only before the first step and after the last.", at_least=0, resume=FREE
    )
    questions_per_kind: int = setting(
        400, "Maximum number of evaluated questions of each kind; 0: no evaluation.", at_least=0
    )
    best_metric: str = setting(
        "em",
        "With every_steps, WORKDIR/best keeps the parameters with the highest value of this metric, over "
        "all validation questions or over those of one kind.",
        accepted=_METRIC,
        training_only=True,
    )
    temperature: float = setting(0.0, "Sampling temperature of evaluations; 0: greedy.", at_least=0)
    also_greedy: bool = setting(False, "Evaluates greedily as well, before the first step and after the last.")
    seed: int = setting(1, "Seed of the sampled answers; the run's own seed does not affect them.", accepted=SEED)


@dataclass(frozen=True)
class SFTSection:
    """Supervised fine-tuning before a run.

    Used by launch/sft.py; model, mesh, lengths, micro-batches and checkpoints come from the other sections.
    """

    epochs: int = setting(2, "Passes over the transcripts.", at_least=1)
    batch_rows: int = setting(16, "Transcripts per optimizer step.", at_least=1)
    learning_rate: float = setting(
        1e-5, "Peak learning rate of AdamW; adapters need about ten times as much.", at_least=0
    )
    warmup_ratio: float = setting(
        0.05, "Share of all steps over which the learning rate rises linearly to its peak.", at_least=0, at_most=1
    )
    final_learning_rate_ratio: float = setting(
        0.1, "Final learning rate of the cosine decay, as a share of the peak.", at_least=0, at_most=1
    )
    weight_decay: float = setting(0.01, "Weight decay of AdamW, on all trained parameters.", at_least=0)
    validation_share: float = setting(
        0.0, "Share of the transcripts to hold out; their loss is logged once per epoch.", at_least=0, below=1
    )


@dataclass(frozen=True)
class Config:
    """The config of a run. `launch/train.py` writes it to config.json in the run directory."""

    seed: int = setting(
        0, "Seed of rollouts, question order, and randomly initialized weights or adapters.", accepted=SEED
    )
    method: Method = setting("parallelsearch", "The paper's method, or a baseline (see Methods below).")
    model: ModelSection = ModelSection()
    mesh: MeshSection = MeshSection()
    data: DataSection = DataSection()
    retrieval: RetrievalSection = RetrievalSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    learning: LearningSection = LearningSection()
    critic: CriticSection = CriticSection()
    train: TrainSection = TrainSection()
    alarms: AlarmSection = AlarmSection()
    eval: EvalSection = EvalSection()
    sft: SFTSection = SFTSection()

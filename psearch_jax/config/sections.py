"""The fields of a config, by section."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from psearch_jax.config.families import PRESETS
from psearch_jax.config.setting import SEED, Accepted, free, names_object, one_of, same_content, setting, share
from psearch_jax.config.shapes import Lora
from psearch_jax.types import KINDS

Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "dots", "full"]
DIALECTS = ("tags", "tool_calls")  # the built-in ones


def _are_urls(text: str) -> bool:
    urls = (url.strip() for url in text.split(","))
    return not text or all(re.fullmatch(r"https?://[^/\s]+/\S*", url) for url in urls)


@dataclass(frozen=True)
class ModelSection:
    """Model weights, dtypes and memory options."""

    path: str = same_content(
        "",
        'Hugging Face directory or hub id; "": random weights of `preset`; "toy": the policy of this package for the '
        "dialect.",
    )
    preset: str = same_content("7b", "Shape for random weights, if `path` is empty.", accepted=one_of(PRESETS))
    tokenizer: str = same_content(
        "", 'Hugging Face tokenizer directory or hub id, or `toy`; "": the tokenizer at `path`.'
    )
    dtype: Dtype = setting("bfloat16", "Dtype of the training computation; the master weights are float32.")
    sampling_dtype: Dtype = setting(
        "bfloat16",
        "Dtype of the sampler's weights and KV cache. On a CPU, `sampling_dtype` and `dtype` apply only to matrix "
        "products with weights; activations and KV cache are float32.",
    )
    shard_residual: bool = free(
        False, "Training splits positions over the `tensor` axis between layers: less memory, more traffic."
    )
    remat: Remat = free(
        "full",
        "What the backward pass recomputes in each layer: `none`: nothing; `dots`: all but attention and the matrix "
        "products with weights; `full`: everything. Less recomputation is faster and needs more memory.",
    )
    lora_rank: int = setting(
        0,
        "Rank of LoRA adapters; 0: train all weights. With adapters, the base weights stay frozen in "
        "`sampling_dtype` and serve as the reference policy.",
        at_least=0,
    )
    lora_alpha: float = setting(32.0, "LoRA scaling: the adapters' output is multiplied by lora_alpha / lora_rank.")
    adapters: str = same_content(
        "",
        "PEFT directory of LoRA adapters to put on the weights of `path`; they bring their own rank and alpha. "
        "Training continues these adapters, and the reference policy includes them.",
    )

    @property
    def lora(self) -> Lora | None:
        return Lora(self.lora_rank, self.lora_alpha) if self.lora_rank else None


@dataclass(frozen=True)
class MeshSection:
    """How devices share the work. One of the three sizes of the training mesh may be -1: all remaining devices."""

    data: int = free(1, "Replicas of the training state, each with its own rows.")
    fsdp: int = free(-1, "Devices that share weights, optimizer state and rows.")
    tensor: int = free(1, "Devices over which heads, MLPs and vocabulary are split, in training and in sampling.")
    rollout_tensor: int = free(
        0,
        "`tensor` of the sampler: a divisor of `fsdp`, with a `tensor` of 1. Training is fastest with a small "
        "`tensor`; the sampler's weights are split over `tensor` only. 0: the same. Programs that do not train use "
        "this mesh alone.",
        at_least=0,
    )


@dataclass(frozen=True)
class DataSection:
    """Questions and their prompts."""

    source: str = same_content(
        "",
        'Training questions: a question file, a directory made by launch/prepare_data.py, "closed_world", or a '
        "function of your own that returns rows of a question file, as `FILE.py:NAME` or `module:NAME`.",
    )
    validation: str = same_content("", "Questions for evaluation, never for training: a file or a prepared directory.")
    validation_share: float = setting(
        0.0,
        "Instead of `validation`: the share of `source` to hold out of training, chosen by a hash of (source, id).",
        at_least=0,
        below=1,
    )
    template: str = same_content(
        "parallel",
        "Prompt template: a packaged name other than `examples`, a file, or `row` for the chat messages stored with "
        "each question.",
    )
    world_names: Literal["known", "new"] = setting(
        "known", "Names in the closed world. `known`: cold starts contain them; `new`: no cold start does."
    )
    world_seed: int = setting(
        0, "Seed of the closed world; the run's own seed changes neither the world nor its evaluation.", at_least=0
    )
    world_questions: int = setting(6000, "Training questions drawn from the closed world.", at_least=1)

    @property
    def prompts_in_rows(self) -> bool:
        return self.template == "row"


@dataclass(frozen=True)
class RetrievalSection:
    """Where passages come from: at most one of `index`, `corpus` and `url`, or a `service`, which may use them."""

    index: str = same_content("", "Index directory of launch/build_index.py.")
    corpus: str = same_content("", "Jsonl corpus that is encoded when the run starts; for small corpora only.")
    url: str = free(
        "",
        "Servers that speak Search-R1's /retrieve, replicas of one index separated by commas.",
        accepted=Accepted("http://host:port/retrieve", _are_urls),
    )
    service: str = same_content(
        "",
        "A retriever of your own, as `FILE.py:NAME` or `module:NAME`: called with this section, it returns an object "
        "with `search` and `describe` (`retrieval.protocol.Retriever`).",
    )
    timeout_s: float = free(60.0, "Seconds that a server may take for its complete answer.", above=0)
    retry_deadline_s: float = free(
        300.0, "Seconds that a run retries failing servers before it saves and stops.", at_least=0
    )
    token_file: str = free("", "File with the bearer token for the servers.")
    topk: int = setting(3, "Passages per sub-query.", at_least=1)
    max_sub_queries: int = setting(8, "Sub-queries that one search runs; further ones are ignored.", at_least=1)

    @property
    def passages(self) -> dict[str, str]:
        """The passages that the section names, by field: index, corpus, url or service; empty without any."""
        if self.service:
            return {"service": self.service}
        named = {"index": self.index, "corpus": self.corpus, "url": self.url}
        return {field: place for field, place in named.items() if place}


@dataclass(frozen=True)
class RolloutSection:
    """Number, length and sampling of rollouts."""

    slots: int = free(64, "Rollouts decoded at the same time; all rollouts of a step share these slots.", at_least=1)
    samples: int = setting(5, "Rollouts per question.", at_least=1)
    context_tokens: int = setting(6196, "Maximum tokens of a rollout, including prompt and passages.")
    prompt_tokens: int = setting(
        2048, "Maximum tokens of a prompt; the rollouts of a longer prompt end as `truncated`.", at_least=1
    )
    turn_tokens: int = setting(500, "Maximum tokens sampled in a turn.", at_least=1)
    obs_tokens: int = setting(1000, "Maximum tokens inserted after a search, over all its sub-queries.")
    search_turns: int = setting(4, "Turns in which the model may search; one answer turn follows.", at_least=0)
    temperature: float = setting(1.0, "Sampling temperature; the loss scores tokens at the same one.", above=0)
    top_p: float = setting(
        1.0,
        "Samples from the most likely tokens whose probabilities add up to this share; 1: from all tokens.",
        above=0,
        at_most=1,
    )
    top_k: int = setting(0, "Samples from this many most likely tokens; 0: from all tokens.", at_least=0)
    num_buckets: int = free(
        4, "Number of padded widths for prompts, passages and rows: fewer compile faster, more pad less.", at_least=1
    )
    overlap_search: bool = free(
        False,
        "Runs the searches of one yield while the other rows decode, and inserts the passages at the next yield. "
        "Useful when searching is slow: over HTTP, or in a large index.",
    )
    initial_search: bool = setting(False, "Searches for the question itself before the first sampled token.")
    dialect: str = same_content(
        "tags",
        "How the policy writes its actions. `tags`: as published; `tool_calls`: as the model's chat template writes "
        "calls of tools; those of one turn run at once; or a `Dialect` of your own as `FILE.py:CLASS` or "
        "`module:CLASS`.",
        accepted=Accepted(
            "tags, tool_calls, FILE.py:CLASS or MODULE:CLASS", lambda s: s in DIALECTS or names_object(s)
        ),
    )
    tools: str = same_content(
        "",
        "Tools besides the search, separated by commas, with dialect=tool_calls: `calculator`, a function or a `Tool` "
        "of your own as `FILE.py:NAME` or `module:NAME`, the tools of an MCP server as `mcp:URL` or `mcp:COMMAND`.",
    )
    tool_budget: int = setting(
        0, "Calls of each of these tools in a rollout; further ones fail. 0: any number.", at_least=0
    )
    tool_timeout_s: float = free(30.0, "Seconds until the calls of a tool that does not respond fail.", above=0)


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
    no_search_penalty: float = setting(0.0, "Subtracted from a rollout that answers without a search.", at_least=0)
    evidence: float = setting(
        0.0,
        "A rollout earns this x the share of the question's evidence triples that the passages of its searches state, "
        "as far as they were shown; without triples, this if an answer is in them.",
        at_least=0,
    )
    terms: str = same_content(
        "",
        "Further terms, separated by commas. `FILE.py:FUNCTION=WEIGHT` or `MODULE:FUNCTION=WEIGHT`: your own function "
        "of a trajectory; `answer_recall=WEIGHT`: 1 if an answer is in the passages of a rollout's searches, as far "
        "as they were shown; `f1=WEIGHT`: F1 of its answer. Every `method` keeps them.",
    )
    gated: bool = setting(
        False,
        "Multiplies `decomposition` and a positive `search_count` by the outcome, and by 0 if no search was run.",
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
    gae_lambda: float = share(1.0, "PPO only: lambda of GAE; 1 uses only rewards, 0 only the critic's next value.")
    clip_low: float = share(0.2, "Clips the ratio of policy to old policy below 1 - clip_low.")
    clip_high: float = setting(0.2, "Clips the same ratio above 1 + clip_high.", at_least=0)
    kl_coefficient: float = setting(
        0.001, "Weight of the KL to the reference policy (see `teacher`); 0: no reference is kept.", at_least=0
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "`loss`: the KL is a term of the loss; `reward`: it is subtracted from each token's reward (PPO only)."
    )
    kl_to: Literal["all", "wrong"] = setting(
        "all", "Rollouts with a KL term. `wrong`: only those whose outcome term of the reward is below 1 (DGPO)."
    )
    teacher: str = same_content(
        "",
        "Hugging Face directory or hub id of a model of any size with the policy's tokenizer: the KL is to this "
        'teacher, loaded in `model.sampling_dtype`. "": to the policy at the start of the run.',
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
        "itself if the step has only one; `sampler`: recorded while sampling, which saves a pass over the batch if "
        "there are several updates.",
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
    scripted: str = same_content(
        "",
        "Transcripts of training questions, as launch/write_transcripts.py writes them. In the first `scripted_steps` "
        "steps, the last rollout of a question's group is replaced by the question's transcript, if there is one.",
    )
    scripted_steps: int = setting(0, "Number of first steps with transcripts in the groups; 0: off.", at_least=0)
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


Method = Literal["parallelsearch", "search_r1", "parallel_prompt", "r1"]


@dataclass(frozen=True)
class Config:
    """The config of a run. `launch/train.py` writes it to config.json in the run directory."""

    seed: int = setting(0, "Seed of rollouts, question order, and random weights or adapters.", accepted=SEED)
    method: Method = setting("parallelsearch", "The paper's method, or a baseline (docs/evaluation.md).")
    model: ModelSection = ModelSection()
    mesh: MeshSection = MeshSection()
    data: DataSection = DataSection()
    retrieval: RetrievalSection = RetrievalSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    learning: LearningSection = LearningSection()
    critic: CriticSection = CriticSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    sft: SFTSection = SFTSection()

"""The config of a run: frozen dataclasses with units in the names, and their construction from a ConfigDict.

Files in configs/ change some of these defaults; `--config.section.field=value` overrides one field. docs/reference.py
copies the comment above or after each field to docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ml_collections import ConfigDict

from psearch_jax.types import KINDS, UserError

MAX_SIZE = 2**31  # every size in a config.json must be below this


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder; models/hf.py maps the fields of config.json and lists the supported model families."""

    vocab_rows: int  # V, rows of the embedding; some may have no token
    width: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp: int  # F
    tied: bool  # the lm head is the transposed embedding
    rope_theta: float = 1_000_000.0
    rms_eps: float = 1e-6
    max_positions: int = 32_768
    eos_ids: tuple[int, ...] = ()  # from config.json and generation_config.json, if any
    qkv_bias: bool = True  # bias on the query, key and value projections (Qwen2.5)
    qk_norm: bool = False  # RMSNorm of queries and keys per head, before the rotary embedding (Qwen3)

    def __post_init__(self) -> None:
        sizes = ("vocab_rows", "width", "layers", "heads", "kv_heads", "head_dim", "mlp", "max_positions")
        for name in sizes:
            if not 0 < getattr(self, name) < MAX_SIZE:
                raise UserError(f"model: {name}={getattr(self, name)} found, accepted: 1 to {MAX_SIZE - 1}")
        for name in ("rope_theta", "rms_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"model: {name}={getattr(self, name)} found, accepted: a number above 0")
        if self.heads % self.kv_heads:
            raise UserError(f"model: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"model: head_dim={self.head_dim} must be even (rotary embedding rotates pairs)")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: W + scale * a @ b instead of W."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def _qwen2(width: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool, vocab_rows: int) -> DecoderConfig:
    return DecoderConfig(vocab_rows, width, layers, heads, kv_heads, width // heads, mlp, tied)


def _qwen3(width: int, layers: int, heads: int, mlp: int, tied: bool) -> DecoderConfig:
    options = {"max_positions": 40_960, "qkv_bias": False, "qk_norm": True}
    return DecoderConfig(151_936, width, layers, heads, 8, 128, mlp, tied, **options)


# Shapes from the published config.json files of Qwen2.5 and Qwen3; `toy` is the policy that ships with the package.
PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(2048, 128, 4, 4, 2, 32, 384, tied=True, rope_theta=10_000.0, max_positions=2048),
    "tiny": DecoderConfig(152_064, 64, 2, 4, 2, 16, 128, tied=True),  # the real vocabulary with few weights
    "0.5b": _qwen2(896, 24, 14, 2, 4864, True, 151_936),
    "1.5b": _qwen2(1536, 28, 12, 2, 8960, True, 151_936),
    "3b": _qwen2(2048, 36, 16, 2, 11_008, True, 151_936),
    "7b": _qwen2(3584, 28, 28, 4, 18_944, False, 152_064),
    "14b": _qwen2(5120, 48, 40, 8, 13_824, False, 152_064),
    "32b": _qwen2(5120, 64, 40, 8, 27_648, False, 152_064),
    "72b": _qwen2(8192, 80, 64, 8, 29_568, False, 152_064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408, False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600, False),
}


Remat = Literal["none", "dots", "full"]


@dataclass(frozen=True)
class ModelSection:
    # Hugging Face directory or hub id; "": random weights of `preset`; "toy": the toy policy of this package.
    path: str = ""
    preset: str = "7b"  # model shape for random weights, used only when `path` is empty
    tokenizer: str = ""  # Hugging Face tokenizer directory or hub id; "": the tokenizer at `path`
    # Dtype of the training computation; the master weights are float32.
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    # Dtype of the sampler's weights and KV cache. On a CPU, `sampling_dtype` and `dtype` apply only to matrix products
    # with weights; activations and KV cache are float32.
    sampling_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    # Quantizes the layers' kernels to int8 for sampling (models/int8.py). On a TPU this halves their bytes compared
    # with 16 bits, but the sampler differs more from the trained model (metric `logp_gap`); learning.importance_cap
    # corrects for that.
    int8_weights: bool = False
    int8_cache: bool = False  # quantizes the KV cache to int8 for sampling, with the same drawback
    # On a GPU or a single CPU device, decoding copies each layer's weights into separate arrays once per call. The
    # copy needs as much memory as the layers, in float32 on a CPU without instructions for `sampling_dtype`. If false,
    # decoding copies a slice of the stacked weights before every product.
    unstacked_decoding: bool = True
    # Training splits positions over the `tensor` axis between layers: less memory, more traffic.
    shard_residual: bool = False
    # What the backward pass recomputes in each layer: `none`: nothing; `dots`: all but attention and the matrix
    # products with weights; `full`: everything. Less recomputation is faster and needs more memory; launch/plan.py
    # --search shows what fits.
    remat: Remat = "full"
    # Rank of LoRA adapters; 0: train all weights. With adapters, the base weights stay frozen in `sampling_dtype` and
    # serve as the reference policy.
    lora_rank: int = 0
    lora_alpha: float = 32.0  # LoRA scaling: the adapters' output is multiplied by lora_alpha / lora_rank
    # PEFT directory of LoRA adapters to put on the weights of `path`; they bring their own rank and alpha. Training
    # continues these adapters, and the reference policy includes them.
    adapters: str = ""

    @property
    def lora(self) -> Lora | None:
        return Lora(self.lora_rank, self.lora_alpha) if self.lora_rank else None


@dataclass(frozen=True)
class MeshSection:
    data: int = 1  # replicas of the training state, each with its own rows; one of the three sizes may be -1
    fsdp: int = -1  # devices that share weights, optimizer state and rows; -1: all that `data` and `tensor` leave
    tensor: int = 1  # devices over which heads, MLPs and vocabulary are split, in training and sampling


@dataclass(frozen=True)
class DataSection:
    # Training questions: a question file, a directory made by launch/prepare_data.py, or "closed_world".
    source: str = ""
    validation: str = ""  # questions for evaluation, never for training: a file or a prepared directory
    # Instead of `validation`: the share of `source` to hold out of training, chosen by a hash of (source, id).
    validation_share: float = 0.0
    # `template`: the prompt comes from `template`; `row`: the chat messages stored with each question.
    prompt: Literal["template", "row"] = "template"
    template: str = "parallel"  # prompt template: a packaged name or a file of your own
    # Names in the closed world. `known`: names that cold starts contain; `new`: names that no cold start contains.
    world_names: Literal["known", "new"] = "known"
    world_seed: int = 0  # seed of the closed world; the run's own seed changes neither the world nor its evaluation
    world_questions: int = 6000  # training questions drawn from the closed world
    parallel_share: float = 0.5  # share of parallel questions among them; single questions make up the rest
    sequential_share: float = 0.4  # share of sequential questions among them


@dataclass(frozen=True)
class RetrievalSection:
    # Index directory made by launch/build_index.py. The results of several comma-separated indexes over one corpus are
    # fused.
    index: str = ""
    corpus: str = ""  # jsonl corpus that is encoded when the run starts; for small corpora only
    # Servers that speak Search-R1's /retrieve: "," separates replicas of one index, "|" the parts of a sharded corpus.
    url: str = ""
    timeout_s: float = 60.0  # seconds that a server may take for its complete answer
    retry_deadline_s: float = 300.0  # seconds that a run retries failing servers before it saves and stops
    token_file: str = ""  # file with the bearer token for the servers
    topk: int = 3  # passages per sub-query
    cache_queries: int = 65_536  # maximum number of answers in this process's LRU cache; 0: no cache
    cache_mb: int = 1024  # maximum size of this cache in MiB
    max_sub_queries: int = 8  # maximum number of sub-queries that one search runs; the rest are ignored


@dataclass(frozen=True)
class RolloutSection:
    slots: int = 64  # B, rollouts decoded at the same time; all rollouts of a step share these slots
    samples: int = 5  # R, rollouts per question
    context_tokens: int = 6196  # S, maximum tokens of a rollout, including prompt and passages
    prompt_tokens: int = 2048  # maximum tokens of a prompt; the rollouts of a longer prompt end as `truncated`
    turn_tokens: int = 500  # maximum tokens sampled in a turn
    obs_tokens: int = 1000  # maximum tokens inserted after a search, over all its sub-queries
    search_turns: int = 4  # turns in which the model may search; one answer turn follows
    # What follows a reply that ends without a search or an answer: `corrective`: a corrective message and another
    # turn, as published; `end`: the end of the rollout.
    after_eos: Literal["corrective", "end"] = "corrective"
    max_tokens_after_answer: int = 4  # maximum tokens sampled after `</answer>` while waiting for a stop token
    temperature: float = 1.0  # sampling temperature; the loss scores tokens at the same temperature
    # Samples from the most likely tokens whose probabilities add up to this share; 1: from all tokens.
    top_p: float = 1.0
    top_k: int = 0  # samples from this many most likely tokens; 0: from all tokens
    num_buckets: int = 4  # number of padded widths for prompts, passages and rows: fewer compile faster, more pad less
    # Decoding returns to the host when this share of the live rows waits for passages or for the next rollout.
    yield_share: float = 0.125
    # Runs the searches of one yield while the other rows decode, and inserts the passages at the next yield. Useful
    # when searching is slow: over HTTP, or in a large index.
    overlap_search: bool = False
    label_subqueries: bool = True  # writes each sub-query above its passages when a search has several
    initial_search: bool = False  # searches for the question itself before the first sampled token
    # How training treats rollouts without an answer: `train`: like all others; `mask`: left out of the loss;
    # `penalise`: reward.unfinished_penalty is subtracted.
    unfinished: Literal["train", "mask", "penalise"] = "train"


@dataclass(frozen=True)
class RewardSection:
    # `paper`: rewards parsed actions; `compat`: rewards text exactly as the public implementation does.
    profile: Literal["paper", "compat"] = "paper"
    outcome: Literal["em", "f1"] = "em"  # value of the answer: exact match or F1
    format: float = 0.1  # bonus for a wrong answer in valid format; penalty for a right answer in invalid format
    final_format: float = 0.0  # bonus for a wrong answer in invalid format
    # A parallel question earns 3 x this if the first search splits it; every other question earns this if it is not
    # split.
    decomposition: float = 0.15
    # Earns this x (1 - abs(searches - 1)); for a sequential question, this x (1 - max(0, 2 - searches)).
    search_count: float = 0.35
    # Kind as which mixed questions (a comparison that contains a bridge) are rewarded.
    mixed: Literal["sequential", "parallel"] = "sequential"
    gate_bonus_on_outcome: bool = False  # pays `decomposition` and `search_count` only for right answers
    search_penalty: float = 0.0  # subtracted for every search that was run
    # Subtracted from a rollout without an answer when rollout.unfinished is "penalise".
    unfinished_penalty: float = 0.5
    # Over the last `overlong_tokens` tokens of the context, a penalty rises linearly from 0 to `unfinished_penalty`
    # (arXiv 2503.14476 eq. 13); 0: none.
    overlong_tokens: int = 0


@dataclass(frozen=True)
class LearningSection:
    # `grpo`: advantages from the rewards of a question's group; `ppo`: from a critic (section `critic`).
    algorithm: Literal["grpo", "ppo"] = "grpo"
    # GRPO only. `std`: (reward - group mean) / group standard deviation; `mean`: reward - group mean; `leave_one_out`:
    # reward - mean of the group's other rewards.
    advantage: Literal["std", "mean", "leave_one_out"] = "std"
    gamma: float = 1.0  # PPO only: discount per sampled token
    gae_lambda: float = 1.0  # PPO only: lambda of GAE; 1 uses only rewards, 0 only the critic's next value
    # PPO only. Advantages are normalized to mean 0 and variance 1 over the tokens of a step: `batch`: all of them;
    # `kind`: each kind of question separately.
    whiten: Literal["batch", "kind"] = "batch"
    clip_low: float = 0.2  # clips the ratio of policy to old policy below 1 - clip_low
    clip_high: float = 0.2  # clips the same ratio above 1 + clip_high
    # Weight of the KL to the policy at the start of the run; 0: no reference copy is kept.
    kl_coefficient: float = 0.001
    # `loss`: the KL is a term of the loss; `reward`: it is subtracted from each token's reward (PPO only).
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coefficient: float = 0.0  # weight of the entropy, which is subtracted from the loss
    # How the loss is averaged. `token_mean`: over all tokens; `sequence_mean`: the mean of each trajectory's mean;
    # `constant_length`: the sum divided by trajectories x context_tokens.
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    # Source of the old policy's log-probs. `trainer`: computed before a step's first update, or in the update itself
    # if the step has only one; `sampler`: recorded while sampling, which saves a pass over the batch.
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    ratio: Literal["token", "sequence"] = "token"  # ratio of policy to old policy per token, or per trajectory (GSPO)
    # Limits the loss of a token with negative advantage to dual_clip x abs(advantage) (arXiv 1912.09729); 0: off.
    dual_clip: float = 0.0
    guard: float = 0.0  # weight of a penalty on good actions that become less likely (arXiv 2512.04220); 0: off
    importance_cap: float = 0.0  # weights each token by min(p_old / p_sampler, importance_cap); 0: off
    # Rollouts per optimizer step, in complete groups. The published value of 256 cuts groups of 5.
    mini_batch_rollouts: int = 320
    micro_batch_rows: int = 4  # rows per forward and backward pass, over all devices
    learning_rate: float = 1e-6  # learning rate of AdamW; constant after the warm-up
    warmup_ratio: float = 0.285  # share of all updates over which the learning rate rises linearly to its full value
    weight_decay: float = 0.01  # weight decay of AdamW, on all trained parameters
    beta1: float = 0.9  # AdamW's decay rate of the mean gradient
    beta2: float = 0.999  # AdamW's decay rate of the mean squared gradient
    gradient_clip: float = 1.0  # maximum global norm of the gradient; larger gradients are scaled down to it
    max_bad_steps: int = 3  # consecutive updates with a non-finite loss or gradient after which the run stops


@dataclass(frozen=True)
class TrainSection:
    steps: int = 1005  # training steps; each collects rollouts of `prompts` questions and updates on them
    prompts: int = 512  # questions per step
    # Dynamic sampling (DAPO): up to this many times, a step draws `prompts` more questions to replace groups whose
    # rewards are all equal; 0: off.
    dynamic_sampling_rounds: int = 0
    checkpoint_every_steps: int = 50  # writes a checkpoint at multiples of this step, and at the end
    # Also writes a checkpoint after a step that ends at least this many minutes after the last one; 0: off.
    checkpoint_every_minutes: float = 20.0
    keep_checkpoints: int = 3  # number of newest checkpoints to keep
    keep_every_steps: int = 0  # also keeps the checkpoints at multiples of this step; 0: none
    trajectories_per_step: int = 64  # rollouts written to trajectories/ at each step


@dataclass(frozen=True)
class CriticSection:
    """Used with learning.algorithm=ppo; the critic shares all other settings with the policy."""

    learning_rate: float = 1e-5  # learning rate of the critic's AdamW
    warmup_ratio: float = 0.015  # share of all updates over which the critic's learning rate rises linearly
    value_clip: float = 0.5  # a value that moves further than this in one step does not lower the loss; 0: no clip
    pretrain_steps: int = 0  # number of first steps in which only the critic is trained


@dataclass(frozen=True)
class AlarmSection:
    """A metric that crosses its threshold logs a warning (train/monitoring/alarms.py).

    Metrics are means over the last `window` steps, except that only the last probe counts.
    """

    window: int = 10  # steps in each mean; no alarm before this many steps are done
    reward_fall: float = 0.1  # fall of the mean reward below its highest value; up to 0.05 in good runs of the demo
    # Share of sequential questions that are split; up to 0.65 in the middle of good runs of the demo.
    over_splitting: float = 0.75
    no_search: float = 0.3  # share of rollouts without a search
    wrong_though_seen: float = 0.5  # share of wrong answers among rollouts that had the right answer in a passage
    # Fall of the log-prob of right rollouts, in nats per token, while the reward did not rise.
    likelihood_fall: float = 0.3
    entropy_rise: float = 0.5  # rise of the entropy above its lowest value, in nats per token
    gap: float = 0.1  # mean absolute difference of sampler and trainer log-probs, in nats per token
    # Steps between probes. A probe repeats one rollout per question with passages retrieved for other questions; 0: no
    # probes.
    probe_every_steps: int = 25
    probe_gain: float = 0.05  # EM that the right passages must at least add in a probe


@dataclass(frozen=True)
class EvalSection:
    every_steps: int = 0  # steps between evaluations; 0: only before the first step and after the last
    questions_per_kind: int = 400  # maximum number of evaluated questions of each kind; 0: no evaluation
    # With every_steps, WORKDIR/best keeps the parameters with the highest value of this metric: one of BEST_FIGURES
    # over all validation questions, or over one kind, as in parallel/em.
    best_metric: str = "em"
    temperature: float = 0.0  # sampling temperature of evaluations; 0: greedy
    also_greedy: bool = False  # evaluates greedily as well, before the first step and after the last
    seed: int = 1  # seed of the sampled answers; the run's own seed does not affect them


BEST_FIGURES = ("em", "f1", "decomposition_ratio", "valid_format")


def best_metric(text: str) -> tuple[str, str]:
    """Splits eval.best_metric into (kind or "all", metric); a prefix `eval/`, as in metrics.jsonl, is accepted.

    Raises:
      UserError: there is no such metric.
    """
    *kind, figure = text.removeprefix("eval/").split("/")
    if figure not in BEST_FIGURES or len(kind) > 1 or (kind and kind[0] not in ("all", *KINDS)):
        raise UserError(
            f"config.eval.best_metric: found {text!r}, accepted: {', '.join(BEST_FIGURES)}, or one of them for a kind "
            f"({', '.join(KINDS)}), as in {KINDS[0]}/em"
        )
    return (kind or ["all"])[0], figure


@dataclass(frozen=True)
class SFTSection:
    """Used by launch/sft.py; model, mesh, lengths, micro-batches and checkpoints come from the other sections."""

    epochs: int = 2  # passes over the transcripts
    batch_rows: int = 16  # transcripts per optimizer step
    learning_rate: float = 1e-5  # peak learning rate of AdamW; adapters need about ten times as much
    warmup_ratio: float = 0.05  # share of all steps over which the learning rate rises linearly to its peak
    final_learning_rate_ratio: float = 0.1  # final learning rate of the cosine decay, as a share of the peak
    weight_decay: float = 0.01  # weight decay of AdamW, on all trained parameters
    validation_share: float = 0.0  # share of the transcripts to hold out; their loss is logged once per epoch


Method = Literal["parallelsearch", "search_r1", "parallel_prompt", "r1"]


@dataclass(frozen=True)
class Config:
    """The config of a run. `launch/train.py` writes it to config.json in the run directory."""

    seed: int = 0  # seed of rollouts, question order, and randomly initialized weights or adapters
    method: Method = "parallelsearch"  # the paper's method, or a baseline (see Methods below)
    model: ModelSection = field(default_factory=ModelSection)  # model weights, dtypes and memory options
    mesh: MeshSection = field(default_factory=MeshSection)  # how devices share the work
    data: DataSection = field(default_factory=DataSection)  # questions and their prompts
    retrieval: RetrievalSection = field(default_factory=RetrievalSection)  # where passages come from
    rollout: RolloutSection = field(default_factory=RolloutSection)  # number, length and sampling of rollouts
    reward: RewardSection = field(default_factory=RewardSection)  # the reward of a rollout
    learning: LearningSection = field(default_factory=LearningSection)  # the loss and its optimizer
    critic: CriticSection = field(default_factory=CriticSection)  # the critic of PPO
    train: TrainSection = field(default_factory=TrainSection)  # length of a run, and what it saves
    alarms: AlarmSection = field(default_factory=AlarmSection)  # thresholds for warnings during a run
    eval: EvalSection = field(default_factory=EvalSection)  # evaluations before, during and after training
    sft: SFTSection = field(default_factory=SFTSection)  # supervised fine-tuning before a run


# Fields of older runs and config files that have another name now.
RENAMED = {
    "config.critic.alone_steps": "config.critic.pretrain_steps",
    "config.retrieval.patience_s": "config.retrieval.retry_deadline_s",
    "config.reward.search_price": "config.reward.search_penalty",
    "config.rollout.widths": "config.rollout.num_buckets",
    "config.train.redraws": "config.train.dynamic_sampling_rounds",
}


def from_mapping(values: Mapping[str, Any], cls: type = Config, prefix: str = "config") -> Any:
    """Builds a dataclass from a nested mapping and checks keys and types; missing keys take their defaults.

    Raises:
      UserError: an unknown key (the message gives its new name or the nearest known one) or a value of another type.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        if f"{prefix}.{key}" in RENAMED:
            raise UserError(f"{prefix}.{key}: this field is now called {RENAMED[f'{prefix}.{key}']}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(sorted(known))}"
            raise UserError(f"{prefix}: unknown key {key!r}; {hint}")
        arguments[key] = _checked(value, hints[key], f"{prefix}.{key}")
    return cls(**arguments)


def _checked(value: Any, hint: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping | ConfigDict):
            raise UserError(f"{name}: found {value!r}, accepted: a section of fields")
        return from_mapping(value, hint, name)
    if typing.get_origin(hint) is Literal:
        accepted = typing.get_args(hint)
        if value not in accepted:
            raise UserError(f"{name}: found {value!r}, accepted: {', '.join(map(str, accepted))}")
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{name}: found {value!r}, accepted: a list")
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)) or value != value:  # NaN
        raise UserError(f"{name}: found {value!r} ({type(value).__name__}), accepted: {hint.__name__}")
    return value


def config_dict(**sections: Any) -> ConfigDict:
    """The defaults, changed by `sections`, as a ConfigDict in which flags can set every field.

    Raises:
      UserError: as `from_mapping`.
    """
    return ConfigDict(to_mapping(from_mapping(sections)))


# The fields that each baseline changes. Prompt templates other than the default one are kept.
_OUTCOME_ONLY = {"decomposition": 0.0, "search_count": 0.0}
_METHODS: dict[Method, dict[str, dict[str, Any]]] = {
    "parallelsearch": {},
    "parallel_prompt": {"reward": _OUTCOME_ONLY},
    "search_r1": {"data": {"template": "sequential"}, "retrieval": {"max_sub_queries": 1}, "reward": _OUTCOME_ONLY},
    "r1": {
        "data": {"template": "direct"},
        "rollout": {"search_turns": 0, "initial_search": False},
        "reward": _OUTCOME_ONLY,
    },
}


def with_method(config: Config) -> Config:
    """Sets the fields in which the config's `method` differs from the others (arXiv 2508.09303, section 4).

    - parallelsearch: changes nothing;
    - parallel_prompt: the prompt explains splitting, and only answer and format are rewarded;
    - search_r1: one query per search (text after `##` is ignored), and only answer and format are rewarded;
    - r1: no search, and only answer and format are rewarded.
    """
    sections = dict(_METHODS[config.method])
    if config.data.template != DataSection.template:
        sections.pop("data", None)
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def to_mapping(config: Config) -> dict[str, Any]:
    """The inverse of `from_mapping`; the result can be written as JSON."""
    return dataclasses.asdict(config)

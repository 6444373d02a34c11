"""What a run is: frozen dataclasses with units in the names, and the one way from a ConfigDict to them.

`configs/*.py` return the deltas on these defaults; `--config.section.field=value` overrides one field. The comment
above or behind a field of a section is what docs/configuration.md says of it (docs/reference.py).
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

MAX_SIZE = 2**31  # of anything that a config.json says


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder (names as in its config.json, in words); models/hf.py says which families there are."""

    vocab_rows: int  # V, rows of the embedding (not all need hold a token)
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
    qkv_bias: bool = True  # queries, keys and values have one (Qwen2.5)
    qk_norm: bool = False  # queries and keys are normed, head by head, before they are turned (Qwen3)

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
            raise UserError(f"model: head_dim={self.head_dim} must be even (rotary embedding turns pairs)")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: W + scale a b in place of W."""

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


# Shapes as in the published config.json files of Qwen2.5 and Qwen3; `toy` is the policy that ships with the package.
PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(2048, 128, 4, 4, 2, 32, 384, tied=True, rope_theta=10_000.0, max_positions=2048),
    "tiny": DecoderConfig(152_064, 64, 2, 4, 2, 16, 128, tied=True),  # the real vocabulary on next to no weights
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
    path: str = ""  # HF directory or hub id; empty: random weights of `preset`; "toy": the policy that ships
    preset: str = "7b"  # one of PRESETS, read only when path is empty
    tokenizer: str = ""  # HF tokenizer directory; empty: the one at `path`
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # compute; the master weights are float32
    # Of the sampling copy and the KV cache. On a CPU only products with weights are in 16 bits, here and in `dtype`;
    # activations and cache are float32.
    sampling_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    # Sampling reads the layers' kernels quantized to 8 bits (models/int8.py): on a TPU half the bytes of 16 bits, and
    # further from what is trained, by `logp_gap`; learning.importance_cap weighs for it.
    int8_weights: bool = False
    int8_cache: bool = False  # the same for the KV cache
    # On a GPU, and on one CPU, a decode step reads each layer's weights from arrays of their own, copied once a call,
    # which takes as much memory as the layers once more, in float32 on a CPU without instructions for sampling_dtype.
    # Else it copies a slice of the stacked weights before every product.
    unstacked_decoding: bool = True
    shard_residual: bool = False  # training splits positions over `tensor` between layers: less memory, more traffic
    # What the backward pass computes anew of each layer: nothing, all but the products with weights, or everything.
    # Less is faster and takes more memory; launch/plan.py --search says what fits.
    remat: Remat = "full"
    # Above 0: only adapters of this rank are trained; the weights stay as they are, in sampling_dtype, and are the
    # reference.
    lora_rank: int = 0
    lora_alpha: float = 32.0  # the adapters count alpha / rank
    # PEFT directory of LoRA adapters that are put on the weights of `path`, with a rank and alpha of their own.
    # Training continues them, and the reference has them too.
    adapters: str = ""

    @property
    def lora(self) -> Lora | None:
        return Lora(self.lora_rank, self.lora_alpha) if self.lora_rank else None


@dataclass(frozen=True)
class MeshSection:
    data: int = 1  # whole copies of what is trained, each with rows of its own; one of the three sizes may be -1
    fsdp: int = -1  # weights, optimizer and rows are split over these; -1: all devices that data and tensor leave
    tensor: int = 1  # heads, MLPs and vocabulary are split over these, for sampling too


@dataclass(frozen=True)
class DataSection:
    source: str = ""  # a question file, a directory of launch/prepare_data.py, or "closed_world"
    validation: str = ""  # questions that are evaluated and never trained on: a file or a prepared directory
    # In place of `validation`: this share of `source`, picked by a hash of (source, id), kept out of training.
    validation_share: float = 0.0
    prompt: Literal["template", "row"] = "template"  # row: the chat messages that come with the question
    template: str = "parallel"  # a packaged template's name or a user's file
    world_names: Literal["known", "new"] = "known"  # new: names that no cold start has seen (data/names.py)
    world_seed: int = 0  # of the closed world; the run's own seed changes neither world nor evaluation
    world_questions: int = 6000  # training questions drawn from the closed world
    parallel_share: float = 0.5  # of them, parallel ones; what this and sequential_share leave are single ones
    sequential_share: float = 0.4  # of them, sequential ones


@dataclass(frozen=True)
class RetrievalSection:
    index: str = ""  # a directory made by launch/build_index.py; several over one corpus, by commas, are fused
    corpus: str = ""  # a jsonl corpus, encoded when the run starts (small ones only)
    # Servers that speak Search-R1's /retrieve: "," separates replicas of one index, "|" the parts of a sharded corpus.
    url: str = ""
    timeout_s: float = 60.0  # for a server's whole answer
    patience_s: float = 300.0  # how long a run waits for its servers before it saves and stops
    token_file: str = ""  # the bearer token that the servers ask for
    topk: int = 3  # passages per sub-query
    cache_queries: int = 65_536  # answers kept in this process, least recently used out first; 0 keeps none
    cache_mb: int = 1024  # what those answers take at most
    max_sub_queries: int = 8  # of one search; those behind them are not run


@dataclass(frozen=True)
class RolloutSection:
    slots: int = 64  # B, rows decoded together; N rollouts run over B slots
    samples: int = 5  # R, rollouts per question
    context_tokens: int = 6196  # S, ids a row can hold
    prompt_tokens: int = 2048  # of a row, for the prompt at most; a longer one loses its end
    turn_tokens: int = 500  # ids sampled in a turn at most
    obs_tokens: int = 1000  # ids of what comes back from a search at most, over all its sub-queries
    search_turns: int = 4  # turns that may search; one answer turn follows
    # After a reply that ends without a search or an answer: a corrective message and another turn, as published, or
    # the end of the rollout.
    after_eos: Literal["corrective", "end"] = "corrective"
    max_tokens_after_answer: int = 4  # ids sampled behind `</answer>`, in wait for a stop id
    temperature: float = 1.0  # of sampling; the loss scores by the same one
    top_p: float = 1.0  # sample of the likeliest ids that make up this share; 1: of all
    top_k: int = 0  # sample of so many likeliest ids; 0: of all
    widths: int = 4  # that prompts, passages and rows are padded to: fewer compile faster, more pad less
    yield_share: float = 0.125  # yield when this share of the live rows waits: for passages, or for the next rollout
    # A yield's searches run while the other rows decode, and are answered at the next yield. Worth it where a search
    # takes longer than the rows that wait for it are missed: over HTTP, or in a large index.
    overlap_search: bool = False
    label_subqueries: bool = True  # each sub-query stands above its passages, where a search has several
    initial_search: bool = False  # the question itself is searched before the first sampled token
    # Rollouts without an answer are learned from like all, left out of the loss, or charged reward.unfinished_penalty.
    unfinished: Literal["train", "mask", "penalise"] = "train"


@dataclass(frozen=True)
class RewardSection:
    profile: Literal["paper", "compat"] = "paper"  # by parsed actions, or by text as the public implementation has it
    outcome: Literal["em", "f1"] = "em"  # what the answer is worth
    format: float = 0.1  # paid to a wrong answer in a whole grammar, taken from a right one in a broken grammar
    final_format: float = 0.0  # paid to a wrong answer in a broken grammar
    decomposition: float = 0.15  # three times for splitting a parallel question, once for leaving another kind whole
    search_count: float = 0.35  # less as much for each search off one; for a sequential question, short of two
    mixed: Literal["sequential", "parallel"] = "sequential"  # which rule pays a bridge inside a comparison
    gate_bonus_on_outcome: bool = False  # decomposition and search_count are paid for right answers alone
    search_price: float = 0.0  # subtracted for every search that was run
    unfinished_penalty: float = 0.5  # subtracted when rollout.unfinished is "penalise"
    overlong_tokens: int = 0  # the last ids of the context cost up to that penalty too (arXiv 2503.14476 eq. 13)


@dataclass(frozen=True)
class LearningSection:
    # Where an id's advantage comes from: its trajectory's reward within a group, or a critic (section `critic`).
    algorithm: Literal["grpo", "ppo"] = "grpo"
    # Of GRPO: the reward less its group's mean, over the group's deviation or not, or less the mean of the others.
    advantage: Literal["std", "mean", "leave_one_out"] = "std"
    gamma: float = 1.0  # of PPO: what a reward loses by every sampled id that it is away
    gae_lambda: float = 1.0  # of PPO: 1 trusts rewards alone, 0 the critic's next value alone
    # Of PPO: over which ids of a step advantages get mean 0 and variance 1: all, or those of each kind of question.
    whiten: Literal["batch", "kind"] = "batch"
    clip_low: float = 0.2  # the ratio of policy to old policy is clipped below 1 less this
    clip_high: float = 0.2  # the same ratio is clipped above 1 plus this
    kl_coefficient: float = 0.001  # of the KL to the policy that the run began with; 0 keeps no copy of it
    kl_in: Literal["loss", "reward"] = "loss"  # reward: every id pays for it, with PPO alone
    entropy_coefficient: float = 0.0  # of the entropy, subtracted from the loss
    # The loss: the mean over ids, the mean of the trajectories' means, or the sum over trajectories x context_tokens.
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    # Where the old policy's log-probs come from: computed with the weights before the first update of a step (by the
    # update itself, where a step has one), or taken as the sampler recorded them, which saves a pass over the batch.
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    ratio: Literal["token", "sequence"] = "token"  # of policy to old policy, by id or by trajectory (GSPO)
    dual_clip: float = 0.0  # a bad action weighs at most so often its advantage (arXiv 1912.09729); 0: off
    guard: float = 0.0  # weight of what keeps good actions from growing less likely (arXiv 2512.04220); 0: off
    importance_cap: float = 0.0  # truncated importance weights of old policy against sampler; 0: off
    mini_batch_rollouts: int = 320  # rollouts per optimizer step, whole groups together (published: 256, cut groups)
    micro_batch_rows: int = 4  # rows per forward and backward pass, over all devices
    learning_rate: float = 1e-6  # of AdamW, the same from the end of the warm-up on
    warmup_ratio: float = 0.285  # share of all updates over which the rate rises to its full height
    weight_decay: float = 0.01  # of AdamW, for all that is trained
    beta1: float = 0.9  # of AdamW, what its mean gradient keeps of itself at an update
    beta2: float = 0.999  # of AdamW, the same for the mean of the squares
    gradient_clip: float = 1.0  # the largest global norm of a gradient; a larger one is scaled down to it
    max_bad_steps: int = 3  # non-finite updates in a row before the run stops


@dataclass(frozen=True)
class TrainSection:
    steps: int = 1005  # steps in all: rollouts of `prompts` questions, and the updates from them
    prompts: int = 512  # questions per step
    redraws: int = 0  # how often as many more are drawn, in place of groups whose rewards are all equal (DAPO)
    checkpoint_every_steps: int = 50  # a checkpoint is written at multiples of this, and at the end
    # One more is written behind the first step that ends so long after the last checkpoint; 0: none.
    checkpoint_every_minutes: float = 20.0
    keep_checkpoints: int = 3  # so many of the newest are kept
    keep_every_steps: int = 0  # checkpoints at its multiples are kept besides; 0: none
    trajectories_per_step: int = 64  # rows written to trajectories/ at each step


@dataclass(frozen=True)
class CriticSection:
    """Of learning.algorithm=ppo; what is not here is that of the policy."""

    learning_rate: float = 1e-5  # of the critic's AdamW
    warmup_ratio: float = 0.015  # the same for the critic's rate
    value_clip: float = 0.5  # a value earns nothing by moving further in one step; 0: no clip
    alone_steps: int = 0  # in so many first steps of a run the critic learns and the policy does not


@dataclass(frozen=True)
class AlarmSection:
    """From where on a run is warned of (train/alarms.py); figures are means over `window` steps, a probe's its own."""

    window: int = 10  # steps; no alarm rings before so many are done
    reward_fall: float = 0.1  # below its highest; in good runs of the demo up to .05
    # The share of sequential questions that are split; in good runs of the demo up to .65, in the middle of training.
    over_splitting: float = 0.75
    no_search: float = 0.3  # the share of rollouts without a search
    wrong_though_seen: float = 0.5  # the share of wrong ones among those that had the answer in a passage
    likelihood_fall: float = 0.3  # nats an id that right rollouts lost, while the reward did not rise
    entropy_rise: float = 0.5  # nats an id above its lowest
    gap: float = 0.1  # nats an id between sampler and trainer
    probe_every_steps: int = 25  # a rollout of each question with the passages of others; 0: never
    probe_gain: float = 0.05  # the EM that right passages bring at least


@dataclass(frozen=True)
class EvalSection:
    every_steps: int = 0  # 0: only before the first step and after the last
    questions_per_kind: int = 400  # at most so many of each kind are asked
    # With every_steps: the parameters with the highest value are kept in WORKDIR/best. A figure of BEST_FIGURES over
    # all validation questions, or over those of a kind: parallel/em.
    best_metric: str = "em"
    temperature: float = 0.0  # that the questions are answered at; 0: the likeliest id each time
    also_greedy: bool = False  # before the first step and after the last they are answered at 0 as well
    seed: int = 1  # of the answers; the run's own seed has no part in them


BEST_FIGURES = ("em", "f1", "decomposition_ratio", "valid_format")


def best_metric(text: str) -> tuple[str, str]:
    """(kind or "all", figure) of eval.best_metric; `eval/` in front, as in metrics.jsonl, is accepted.

    Raises:
      UserError: there is no such figure.
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
    """Supervised fine-tuning (launch/sft.py); model, mesh, lengths, micro-batches and checkpoints are the run's."""

    epochs: int = 2  # passes over the transcripts
    batch_rows: int = 16  # transcripts per optimizer step
    learning_rate: float = 1e-5  # peak of AdamW's; adapters take about ten times as much
    warmup_ratio: float = 0.05  # share of all steps over which the rate rises linearly to its peak
    final_learning_rate_ratio: float = 0.1  # after the warm-up the rate follows a cosine down to this share of it
    weight_decay: float = 0.01  # of AdamW, on all that is trained
    validation_share: float = 0.0  # share of the transcripts that are held out; their loss is logged per epoch


Method = Literal["parallelsearch", "search_r1", "parallel_prompt", "r1"]


@dataclass(frozen=True)
class Config:
    """A whole run. `launch/train.py` writes it to config.json in the run directory."""

    seed: int = 0  # of the rollouts, the order of questions, and weights or adapters that begin at random
    method: Method = "parallelsearch"  # the paper's, or a baseline as `with_method` has it
    model: ModelSection = field(default_factory=ModelSection)  # which weights, and how they are held and computed
    mesh: MeshSection = field(default_factory=MeshSection)  # how devices share the work
    data: DataSection = field(default_factory=DataSection)  # questions and their prompts
    retrieval: RetrievalSection = field(default_factory=RetrievalSection)  # what is searched
    rollout: RolloutSection = field(default_factory=RolloutSection)  # how many rollouts, how long, how sampled
    reward: RewardSection = field(default_factory=RewardSection)  # what a rollout earns
    learning: LearningSection = field(default_factory=LearningSection)  # the loss and its optimizer
    critic: CriticSection = field(default_factory=CriticSection)  # the critic of PPO
    train: TrainSection = field(default_factory=TrainSection)  # how long a run is, and what it saves
    alarms: AlarmSection = field(default_factory=AlarmSection)  # when a run is warned of
    eval: EvalSection = field(default_factory=EvalSection)  # evaluations before, during and after training
    sft: SFTSection = field(default_factory=SFTSection)  # supervised fine-tuning before a run


def from_mapping(values: Mapping[str, Any], cls: type = Config, prefix: str = "config") -> Any:
    """Builds the validated dataclass from a (nested) mapping; missing keys take their defaults.

    Raises:
      UserError: an unknown key (with the nearest known one) or a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
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
    """All defaults with the given deltas, as a ConfigDict whose every field can be set by a flag.

    Raises:
      UserError: as `from_mapping`.
    """
    return ConfigDict(to_mapping(from_mapping(sections)))


# What a baseline changes. A template of the user's own, and the toy policy's, stay as they are.
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
    """The config as its `method` has it; the methods differ in nothing else (arXiv 2508.09303, section 4).

    - parallelsearch: nothing changes;
    - parallel_prompt: told how to split, rewarded for answer and format alone;
    - search_r1: one query per search (what follows a `##` is not run), rewarded for answer and format alone;
    - r1: no search, rewarded for answer and format alone.
    """
    sections = dict(_METHODS[config.method])
    if config.data.template != DataSection.template:
        sections.pop("data", None)
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def to_mapping(config: Config) -> dict[str, Any]:
    """The inverse of `from_mapping`, ready for json."""
    return dataclasses.asdict(config)

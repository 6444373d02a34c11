"""The settings that affect a run's results, as a checkpoint records them, and their changes on resume.

A record holds the fields of `DECIDES_NUMBERS` by value. For those of `DECIDES_BY_CONTENT` it holds the path or name
and a fingerprint of the contents, because a directory may be moved or replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psearch_jax.config import Config, to_mapping

Record = dict[str, Any]
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
WEIGHTS = ("config.json", "*.safetensors")  # the files that identify a directory of weights
_BLOCK, _BLOCKS = 4096, 64  # size in bytes and number of a large file's sampled blocks

# Every field is in one of these three sets (tested). First, fields that affect the results: compared by value.
DECIDES_NUMBERS = frozenset(
    (
        "seed method model.dtype model.sampling_dtype model.int8_weights model.int8_cache model.lora_rank "
        "model.lora_alpha data.prompt data.world_names data.world_seed data.world_questions data.parallel_share "
        "data.sequential_share retrieval.topk retrieval.max_sub_queries rollout.samples rollout.context_tokens "
        "rollout.prompt_tokens rollout.turn_tokens rollout.obs_tokens rollout.search_turns "
        "rollout.max_tokens_after_answer rollout.after_eos rollout.temperature rollout.top_p rollout.top_k "
        "rollout.label_subqueries rollout.initial_search rollout.unfinished reward.profile reward.format "
        "reward.final_format reward.decomposition reward.search_count reward.mixed reward.gate_bonus_on_outcome "
        "reward.unfinished_penalty reward.outcome reward.search_penalty reward.overlong_tokens learning.advantage "
        "learning.clip_low learning.clip_high learning.kl_coefficient learning.aggregation learning.ratio "
        "learning.dual_clip learning.guard learning.algorithm learning.gamma learning.gae_lambda learning.kl_in "
        "learning.whiten learning.entropy_coefficient critic.learning_rate critic.warmup_ratio critic.value_clip "
        "critic.pretrain_steps learning.importance_cap learning.old_logprobs learning.mini_batch_rollouts "
        "learning.learning_rate learning.warmup_ratio learning.weight_decay learning.beta1 learning.beta2 "
        "learning.gradient_clip train.prompts train.dynamic_sampling_rounds eval.questions_per_kind eval.temperature "
        "eval.also_greedy eval.seed eval.best_metric data.validation_share sft.epochs sft.batch_rows "
        "sft.learning_rate sft.warmup_ratio sft.final_learning_rate_ratio sft.weight_decay sft.validation_share"
    ).split()
)
# Fields that name something, such as files: compared by contents, because files may be moved or replaced.
DECIDES_BY_CONTENT = frozenset(
    (
        "model.path model.preset model.tokenizer model.adapters data.source data.validation data.template "
        "retrieval.index retrieval.corpus"
    ).split()
)
# Fields that change a run's length, speed, memory, servers or outputs, or its results only by rounding.
FREE_TO_CHANGE = frozenset(
    (
        "model.shard_residual model.remat model.unstacked_decoding mesh.data mesh.fsdp mesh.tensor "
        "retrieval.url retrieval.timeout_s retrieval.retry_deadline_s retrieval.token_file "
        "retrieval.cache_queries retrieval.cache_mb rollout.slots rollout.num_buckets rollout.yield_share "
        "rollout.overlap_search learning.micro_batch_rows learning.max_bad_steps train.steps "
        "train.checkpoint_every_steps train.checkpoint_every_minutes train.keep_checkpoints "
        "train.keep_every_steps train.trajectories_per_step eval.every_steps alarms.window alarms.over_splitting "
        "alarms.reward_fall alarms.no_search alarms.wrong_though_seen alarms.likelihood_fall alarms.entropy_rise "
        "alarms.gap alarms.probe_every_steps alarms.probe_gain"
    ).split()
)


def fields(config: Config) -> dict[str, Any]:
    """Every field by its dotted name."""
    out: dict[str, Any] = {}
    for name, value in to_mapping(config).items():
        out |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return out


def record(config: Config, contents: Mapping[str, tuple[str, str]]) -> Record:
    """The record of a run.

    Args:
      config: with the method's settings applied.
      contents: for each field of `DECIDES_BY_CONTENT`, what it names and the fingerprint of that.
    """
    values = {name: value for name, value in fields(config).items() if name in DECIDES_NUMBERS}
    return values | {name: {"names": named, "is": digest} for name, (named, digest) in contents.items()}


def differences(saved: Mapping[str, Any] | None, now: Record) -> dict[str, str]:
    """The old and new value of every field that differs. A field missing from the saved record had its default."""
    if saved is None:
        return {"settings": "none are recorded in the checkpoint"}
    defaults = fields(Config())
    out = {}
    for name, new in now.items():
        old = saved.get(name, defaults.get(name))
        if isinstance(new, dict):
            if not isinstance(old, dict):
                out[name] = f"not recorded, now {new['names']!r}"
            elif old["is"] != new["is"]:
                same = old["names"] == new["names"]
                out[name] = (
                    f"{new['names']!r} has other contents" if same else f"{old['names']!r}, now {new['names']!r}"
                )
        elif old != new:
            out[name] = f"{old!r}, now {new!r}"
    return out


def described(changes: Mapping[str, str]) -> str:
    """Differences in one line."""
    return "; ".join(f"{name}: {change}" for name, change in changes.items())


def fingerprint(path: str | Path, patterns: Sequence[str] = ()) -> str:
    """A digest of files' sizes and sampled blocks, independent of their directory. Reads about 300 kB of each file.

    Args:
      patterns: the files of a directory to include, as for `Path.glob`.
    """
    path, digest = Path(path), hashlib.sha256()
    files = sorted({p for pattern in patterns for p in path.glob(pattern)}) if path.is_dir() else [path]
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else ""
        size = file.stat().st_size
        digest.update(f"{name} {size};".encode())
        with open(file, "rb") as opened:
            step = max(_BLOCK, size // _BLOCKS)
            for start in (*range(0, size, step), max(0, size - _BLOCK)):
                opened.seek(start)
                digest.update(opened.read(_BLOCK))
    return digest.hexdigest()


def text_fingerprint(*texts: str) -> str:
    """The digest of texts in memory."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()

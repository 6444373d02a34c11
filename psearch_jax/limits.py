"""The values that the fields of a config accept, and the rules between fields."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from psearch_jax.config import PRESETS, Config, best_metric
from psearch_jax.types import UserError

HOTTEST = 2.0  # maximum temperature of a request
MAX_SEED = 2**63 - 1  # maximum seed of a request


class Limit(NamedTuple):
    """The accepted values of a field, in words for messages, and a predicate."""

    accepted: str
    holds: Callable[[Any], bool]


def _are_urls(text: str) -> bool:
    urls = (url.strip() for url in re.split(r"[,|]", text))
    return not text or all(re.fullmatch(r"https?://[^/\s]+/\S*", url) for url in urls)


_AT_LEAST_1 = Limit("at least 1", lambda value: value >= 1)
_AT_LEAST_0 = Limit("at least 0", lambda value: value >= 0)  # a negative count would be a slice from the end
_SHARE = Limit("above 0, at most 1", lambda value: 0 < value <= 1)
_FROM_0_TO_1 = Limit("from 0 to 1", lambda value: 0 <= value <= 1)
_SEED = Limit("at least 0, below 2**32", lambda value: 0 <= value < 2**32)

# The limits of single fields. A field without an entry accepts every value of its type.
LIMITS: dict[str, Limit] = {
    **dict.fromkeys(
        (
            "rollout.slots rollout.samples rollout.turn_tokens rollout.prompt_tokens rollout.num_buckets "
            "train.prompts train.steps train.checkpoint_every_steps train.keep_checkpoints retrieval.topk "
            "retrieval.max_sub_queries "
            "learning.micro_batch_rows learning.mini_batch_rollouts learning.max_bad_steps data.world_questions "
            "alarms.window sft.epochs sft.batch_rows"
        ).split(),
        _AT_LEAST_1,
    ),
    **dict.fromkeys(
        (
            "eval.temperature eval.questions_per_kind eval.every_steps train.trajectories_per_step "
            "rollout.search_turns rollout.max_tokens_after_answer rollout.top_k retrieval.cache_queries "
            "retrieval.cache_mb retrieval.retry_deadline_s data.parallel_share data.sequential_share data.world_seed "
            "learning.kl_coefficient learning.entropy_coefficient learning.dual_clip learning.guard "
            "reward.search_penalty reward.overlong_tokens train.dynamic_sampling_rounds train.keep_every_steps "
            "train.checkpoint_every_minutes model.lora_rank critic.value_clip critic.pretrain_steps "
            "alarms.probe_every_steps"
        ).split(),
        _AT_LEAST_0,
    ),
    **dict.fromkeys(
        (
            "learning.learning_rate critic.learning_rate learning.weight_decay learning.warmup_ratio "
            "critic.warmup_ratio learning.clip_high sft.learning_rate sft.weight_decay"
        ).split(),
        _AT_LEAST_0,
    ),
    **dict.fromkeys(("learning.beta1", "learning.beta2"), Limit("at least 0, below 1", lambda value: 0 <= value < 1)),
    **dict.fromkeys(("learning.clip_low", "sft.warmup_ratio", "sft.final_learning_rate_ratio"), _FROM_0_TO_1),
    "sft.validation_share": Limit("at least 0, below 1", lambda value: 0 <= value < 1),
    "learning.gradient_clip": Limit("above 0 (inf: no clip)", lambda value: value > 0),
    **dict.fromkeys(("seed", "eval.seed"), _SEED),
    **dict.fromkeys(("rollout.top_p", "rollout.yield_share"), _SHARE),
    "retrieval.timeout_s": Limit("above 0", lambda value: value > 0),
    "retrieval.url": Limit("http://host:port/retrieve", _are_urls),
    "model.preset": Limit(", ".join(PRESETS), PRESETS.__contains__),
}
# Limits that apply only to training runs.
TRAINING_LIMITS: dict[str, Limit] = {
    "data.validation_share": Limit("at least 0, below 1", lambda value: 0 <= value < 1),
    "rollout.temperature": Limit("above 0 (training samples)", lambda value: value > 0),
    **dict.fromkeys(("learning.gamma", "learning.gae_lambda"), _FROM_0_TO_1),
}


def validate(config: Config, training: bool = True) -> None:
    """Checks that the fields are in range and agree with each other; `training` adds the checks for a training run.

    Raises:
      UserError: one line that names the field, or the fields that do not agree.
    """
    for name, limit in (LIMITS | (TRAINING_LIMITS if training else {})).items():
        value = functools.reduce(getattr, name.split("."), config)
        if not limit.holds(value):
            raise UserError(f"config.{name}: found {value!r}, accepted: {limit.accepted}")
    r = config.rollout
    if config.data.parallel_share + config.data.sequential_share > 1:
        raise UserError("config.data: parallel_share + sequential_share is above 1, accepted: a sum of at most 1")
    if r.prompt_tokens >= r.context_tokens:
        raise UserError(
            f"config.rollout: prompt_tokens={r.prompt_tokens} must be below context_tokens={r.context_tokens}"
        )
    if training:
        _validate_learning(config)


def _validate_validation(config: Config) -> None:
    data, closed_world = config.data, config.data.source == "closed_world"
    best_metric(config.eval.best_metric)
    sources = [name for name in ("validation", "validation_share") if getattr(data, name)]
    if len(sources) > 1:
        raise UserError("config.data: found both validation and validation_share, accepted: one of them")
    if sources and closed_world:
        raise UserError(
            f"config.data.{sources[0]}: found with the closed world, which has its own evaluation questions"
        )
    if sources and not config.eval.questions_per_kind:
        raise UserError(f"config.eval.questions_per_kind: found 0 with data.{sources[0]}, accepted: at least 1")
    if config.eval.every_steps and not (sources or (closed_world and config.eval.questions_per_kind)):
        raise UserError(
            f"config.eval.every_steps: found {config.eval.every_steps} but no evaluation questions, accepted: 0, or "
            "set data.validation=FILE or data.validation_share above 0"
        )


def _validate_learning(config: Config) -> None:
    _validate_validation(config)
    r, le, t, w = config.rollout, config.learning, config.train, config.reward
    if w.profile == "compat" and (w.outcome != "em" or w.search_penalty):
        raise UserError("config.reward: profile=compat requires outcome=em and search_penalty=0")
    if r.top_p < 1 or r.top_k > 0:
        # learning.importance_cap cannot correct for this: the recorded log-probs are taken before the filter.
        raise UserError(
            f"config.rollout: top_p={r.top_p}, top_k={r.top_k} sample from another distribution than the loss scores; "
            "accepted in training: top_p=1 and top_k=0 (launch/eval.py supports both)"
        )
    _validate_algorithm(config)
    if le.mini_batch_rollouts % r.samples:
        raise UserError(
            f"config.learning.mini_batch_rollouts={le.mini_batch_rollouts} must be a multiple of "
            f"rollout.samples={r.samples}, because groups are never split"
        )
    if le.mini_batch_rollouts % le.micro_batch_rows:
        raise UserError(
            f"config.learning.mini_batch_rollouts={le.mini_batch_rollouts} must be a multiple of "
            f"micro_batch_rows={le.micro_batch_rows}"
        )
    if le.old_logprobs == "sampler" and le.importance_cap:
        raise UserError(
            f"config.learning.importance_cap={le.importance_cap} has no effect with old_logprobs=sampler, where the "
            "sampler's log-probs are the old policy's; accepted: 0 (learning.dual_clip bounds the loss)"
        )
    if 0 < le.dual_clip < 1 + le.clip_high:
        raise UserError(
            f"config.learning.dual_clip={le.dual_clip} is below 1 + clip_high={1 + le.clip_high}, "
            "accepted: 0, or at least that"
        )
    if t.prompts * r.samples % le.mini_batch_rollouts:
        raise UserError(
            f"config.learning.mini_batch_rollouts={le.mini_batch_rollouts} must divide train.prompts x "
            f"rollout.samples = {t.prompts * r.samples}, so that all optimizer steps have the same size"
        )


def _validate_algorithm(config: Config) -> None:
    le = config.learning
    several = config.train.prompts * config.rollout.samples > le.mini_batch_rollouts
    if le.guard and le.old_logprobs == "trainer" and not several:
        raise UserError(
            f"config.learning.guard={le.guard} with old_logprobs=trainer needs more than one update per step; "
            f"accepted: 0, or learning.mini_batch_rollouts below {le.mini_batch_rollouts}"
        )
    if le.algorithm == "grpo":
        if config.rollout.samples == 1:
            raise UserError(
                "config.rollout.samples=1 makes every advantage 0; accepted: at least 2, or any with "
                "learning.algorithm=ppo"
            )
        if le.kl_in == "reward":
            raise UserError("config.learning.kl_in=reward: accepted with learning.algorithm=ppo")
        if le.whiten == "kind":
            raise UserError("config.learning.whiten=kind: accepted with learning.algorithm=ppo")
        return
    if config.train.dynamic_sampling_rounds:
        raise UserError(
            f"config.train.dynamic_sampling_rounds={config.train.dynamic_sampling_rounds} replaces groups with equal "
            "rewards, but learning.algorithm=ppo has no groups; accepted: 0"
        )
    if config.critic.pretrain_steps >= config.train.steps:
        raise UserError(
            f"config.critic.pretrain_steps={config.critic.pretrain_steps} leaves no step for the policy, train.steps="
            f"{config.train.steps}; accepted: fewer than that"
        )

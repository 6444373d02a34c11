"""Checks of a config: values that single fields accept (declared with the fields), and rules between fields."""

from __future__ import annotations

import functools
from typing import Any

from psearch_jax.config import Config
from psearch_jax.config.setting import settings_of
from psearch_jax.types import UserError

MAX_TEMPERATURE = 2.0  # maximum temperature of a request
MAX_SEED = 2**63 - 1  # maximum seed of a request


def check_fields(config: Any, training: bool = True) -> None:
    """Checks every field against the values that its declaration accepts.

    Args:
      config: an instance of a dataclass whose fields are declared by `config.setting.setting`.
      training: whether to check the fields that are limited only in training runs.

    Raises:
      UserError: one line that names the field.
    """
    for name, setting in settings_of(type(config)).items():
        accepted, value = setting.accepted, functools.reduce(getattr, name.split("."), config)
        if accepted and (training or not setting.training_only) and not accepted.holds(value):
            raise UserError(f"config.{name}: found {value!r}, accepted: {accepted.words}")


def validate(config: Config, training: bool = True) -> None:
    """Checks that the fields are in range and agree with each other; `training` adds the checks for a training run.

    Raises:
      UserError: one line that names the field, or the fields that do not agree.
    """
    check_fields(config, training)
    r = config.rollout
    if config.data.parallel_share + config.data.sequential_share > 1:
        raise UserError("config.data: parallel_share + sequential_share is above 1, accepted: a sum of at most 1")
    passages = config.retrieval.passages
    if len(passages) > 1:
        raise UserError(f"config.retrieval: found {' and '.join(passages)}, accepted: one of index, corpus and url")
    if r.prompt_tokens >= r.context_tokens:
        raise UserError(
            f"config.rollout: prompt_tokens={r.prompt_tokens} must be below context_tokens={r.context_tokens}"
        )
    if training:
        _validate_learning(config)


def _validate_validation(config: Config) -> None:
    data, closed_world = config.data, config.data.source == "closed_world"
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
    other = w.search_penalty or w.sub_query_penalty or w.gate_bonus_on_outcome or w.mixed != "sequential"
    if w.profile == "compat" and (w.outcome != "em" or other):
        raise UserError(
            "config.reward: profile=compat requires outcome=em, search_penalty=0, sub_query_penalty=0, "
            "gate_bonus_on_outcome=False and mixed=sequential"
        )
    if w.parallelism == "critical_path" and (w.profile == "compat" or r.samples < 2):
        raise UserError(
            "config.reward.parallelism: found critical_path, which compares the rollouts of a group; accepted with "
            "reward.profile=paper and rollout.samples of at least 2"
        )
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
    if le.importance_level == "sequence" and not le.importance_cap:
        raise UserError(
            "config.learning.importance_level: found sequence without learning.importance_cap, accepted: token, or an "
            "importance_cap above 0"
        )
    if 0 < le.dual_clip < 1 + le.clip_high:
        raise UserError(
            f"config.learning.dual_clip={le.dual_clip} is below 1 + clip_high={1 + le.clip_high}, "
            "accepted: 0, or at least that"
        )
    if config.mesh.rollout_devices and t.dynamic_sampling_rounds:
        raise UserError(
            f"config.mesh.rollout_devices: found {config.mesh.rollout_devices} with train.dynamic_sampling_rounds="
            f"{t.dynamic_sampling_rounds}, accepted: one of them"
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

"""Checks of a config: values that single fields accept (declared with the fields), and rules between fields."""

from __future__ import annotations

import functools
from typing import Any

from psearch_jax.config import Config
from psearch_jax.config.setting import settings_of
from psearch_jax.types import UserError

MAX_TEMPERATURE = 2.0  # maximum temperature of a request
MAX_SEED = 2**63 - 1  # maximum seed of a request


def check_fields(config: Any) -> None:
    """Checks every field against the values that its declaration accepts.

    Args:
      config: an instance of a dataclass whose fields are declared by `config.setting.setting`.

    Raises:
      UserError: one line that names the field.
    """
    for name, setting in settings_of(type(config)).items():
        accepted, value = setting.accepted, functools.reduce(getattr, name.split("."), config)
        if accepted and not accepted.holds(value):
            raise UserError(f"config.{name}: found {value!r}, accepted: {accepted.words}")


def validate(config: Config, training: bool = True) -> None:
    """Checks that the fields are in range and agree with each other; `training` adds the checks for a training run.

    Raises:
      UserError: one line that names the field, or the fields that do not agree.
    """
    check_fields(config)
    r = config.rollout
    passages = config.retrieval.passages
    _require(len(passages) < 2, f"retrieval: found {' and '.join(passages)}, accepted: one of index, corpus and url")
    _require(
        r.prompt_tokens < r.context_tokens,
        f"rollout: prompt_tokens={r.prompt_tokens} must be below context_tokens={r.context_tokens}",
    )
    _require(
        not r.tools or (r.dialect != "tags" and r.search_turns),
        f"rollout.tools={r.tools}: found with dialect={r.dialect} and search_turns={r.search_turns}, accepted with "
        "dialect=tool_calls, or one of your own, and search_turns of at least 1",
    )
    _require(
        r.dialect == "tags" or config.reward.profile == "paper",
        f"reward.profile=compat parses tags; accepted with rollout.dialect={r.dialect}: paper",
    )
    if training:
        _validate_evaluation(config)
        _validate_reward(config)
        _validate_algorithm(config)
        _validate_learning(config)


def _require(holds: object, message: str) -> None:
    """Raises `UserError` with the message about the config unless the condition holds."""
    if not holds:
        raise UserError(f"config.{message}")


def _validate_evaluation(config: Config) -> None:
    data, evaluation, closed_world = config.data, config.eval, config.data.source == "closed_world"
    held_out = [name for name in ("validation", "validation_share") if getattr(data, name)]
    named = "".join(held_out)
    _require(len(held_out) < 2, "data: found both validation and validation_share, accepted: one of them")
    _require(
        not (held_out and closed_world),
        f"data.{named}: found with the closed world, which has its own evaluation questions",
    )
    _require(
        not held_out or evaluation.questions_per_kind,
        f"eval.questions_per_kind: found 0 with data.{named}, accepted: at least 1",
    )
    _require(
        not evaluation.every_steps or held_out or (closed_world and evaluation.questions_per_kind),
        f"eval.every_steps: found {evaluation.every_steps} but no evaluation questions, accepted: 0, or set "
        "data.validation=FILE or data.validation_share above 0",
    )


def _validate_reward(config: Config) -> None:
    w = config.reward
    _require(
        w.profile == "paper" or (w.outcome == "em" and not w.sub_query_penalty and not w.gated),
        "reward: profile=compat requires outcome=em, sub_query_penalty=0 and gated=False",
    )
    _require(not (w.gated and w.critical_path), "reward.gated has no effect with critical_path; accepted: False")
    needs_search = [f"reward.{name}" for name in ("evidence", "no_search_penalty") if getattr(w, name)]
    _require(
        config.rollout.search_turns or not needs_search,
        f"{', '.join(needs_search)}: found with rollout.search_turns=0, where nothing is searched for; accepted: 0",
    )
    _require(
        not w.critical_path or (w.profile == "paper" and config.rollout.samples > 1),
        f"reward.critical_path={w.critical_path} compares the rollouts of a group; accepted with "
        "reward.profile=paper and rollout.samples of at least 2",
    )


def _validate_learning(config: Config) -> None:
    r, le, t = config.rollout, config.learning, config.train
    mini_batch = f"learning.mini_batch_rollouts={le.mini_batch_rollouts}"
    _require(
        # learning.importance_cap cannot correct for this: the recorded log-probs are taken before the filter.
        r.top_p == 1 and r.top_k == 0,
        f"rollout: top_p={r.top_p}, top_k={r.top_k} sample from another distribution than the loss scores; "
        "accepted in training: top_p=1 and top_k=0 (launch/eval.py supports both)",
    )
    _require(
        le.mini_batch_rollouts % r.samples == 0,
        f"{mini_batch} must be a multiple of rollout.samples={r.samples}, because groups are never split",
    )
    _require(
        t.prompts * r.samples % le.mini_batch_rollouts == 0,
        f"{mini_batch} must divide train.prompts x rollout.samples = {t.prompts * r.samples}, so that all optimizer "
        "steps have the same size",
    )
    _require(
        not (le.old_logprobs == "sampler" and le.importance_cap),
        f"learning.importance_cap={le.importance_cap} has no effect with old_logprobs=sampler, where the sampler's "
        "log-probs are the old policy's; accepted: 0",
    )
    _require(
        le.kl_coefficient or not (le.teacher or le.kl_to == "wrong"),
        f"learning: teacher={le.teacher!r} and kl_to={le.kl_to} need a KL term; accepted: kl_coefficient above 0",
    )
    _require(
        bool(t.scripted) == bool(t.scripted_steps),
        f"train: found scripted={t.scripted!r} with scripted_steps={t.scripted_steps}; accepted: both or none",
    )
    _require(
        not t.scripted_steps or (r.samples > 1 and not r.initial_search),
        f"train.scripted_steps={t.scripted_steps} replaces a rollout of every group by one without an initial search; "
        "accepted with rollout.samples of at least 2 and rollout.initial_search=false",
    )


def _validate_algorithm(config: Config) -> None:
    le, steps, rounds = config.learning, config.train.steps, config.train.dynamic_sampling_rounds
    if le.algorithm == "grpo":
        _require(
            config.rollout.samples > 1,
            "rollout.samples=1 makes every advantage 0; accepted: at least 2, or any with learning.algorithm=ppo",
        )
        _require(le.kl_in == "loss", "learning.kl_in=reward: accepted with learning.algorithm=ppo")
        return
    _require(
        not rounds,
        f"train.dynamic_sampling_rounds={rounds} replaces groups with equal rewards, but learning.algorithm=ppo has "
        "no groups; accepted: 0",
    )
    _require(
        config.critic.pretrain_steps < steps,
        f"critic.pretrain_steps={config.critic.pretrain_steps} leaves no step for the policy, train.steps={steps}; "
        "accepted: fewer than that",
    )

"""Command-line flags of the programs that use a policy: which policy, and which passages it searches.

All other settings are fields of the config, set by `--config.SECTION.FIELD`, as in training.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from psearch_jax.config import Config, Method, defaults, from_mapping, to_mapping, with_method
from psearch_jax.limits import MAX_TEMPERATURE
from psearch_jax.runtime import cli, hub
from psearch_jax.runtime.paths import TOYS, is_remote
from psearch_jax.types import UserError

DEFAULTS = str(Path(defaults.__file__))  # for cli.run: fields can be set without a config file
METHODS = list(get_args(Method))
EXAMPLES = ("parallel", "sequential", "parallel")  # kinds of the example questions
PATIENCE_S = 10.0  # maximum retrieval.timeout_s and retry_deadline_s while somebody waits, unless the user sets them
_NO_EFFECT = {  # on the answers to a user's questions: why
    "seed": "--seed of launch/ask.py, or seed in a request, is the seed of an answer",
    "rollout.slots": "--slots of launch/serve_agent.py says how many are answered together",
    "rollout.samples": "each is answered once",
    "rollout.temperature": "each has its own (--temperature of launch/ask.py, temperature in a request)",
    "rollout.overlap_search": "the others are always decoded during a search",
}


def define_flags(model: str | None) -> None:
    """Defines the flags; call it once, before they are parsed. `model`: default of --model; None: it is required."""
    flags.DEFINE_string(
        "model", model, "Run directory, checkpoint, HF directory or hub id, or toy.", required=not model
    )
    flags.DEFINE_string("adapters", None, "PEFT directory of LoRA adapters to put on the weights of --model.")
    flags.DEFINE_bool("best", False, "Use the run's best checkpoint by validation instead of its newest.")
    config_flags.DEFINE_config_file("config", None, "Config file with token budgets, prompt and retrieval settings.")
    flags.DEFINE_string("index", None, "Index directory made by launch/build_index.py.")
    flags.DEFINE_string("corpus", None, "A jsonl corpus instead of an index (small corpora only).")
    flags.DEFINE_string("retriever_url", None, "Servers that speak /retrieve, instead of an index.")


def temperature_flag(default: float) -> flags.FlagHolder[float]:
    """Defines --temperature."""
    holder = flags.DEFINE_float("temperature", default, "Sampling temperature; 0 is greedy.", 0.0, MAX_TEMPERATURE)
    cli.finite("temperature")
    return holder


def model() -> str:
    """The policy that --model and --best select."""
    if not flags.FLAGS.best:
        return flags.FLAGS.model
    from psearch_jax.train.checkpointing.best import find_best

    return str(find_best(flags.FLAGS.model))


def config(model: str, default: Config = Config()) -> Config:  # noqa: B008 (frozen)
    """The config from --config, or else the config of the policy's run, or else `default`.

    The flags that name adapters and passages override it, and `--config.SECTION.FIELD` overrides both. Passages that
    either of them names replace those of the config.

    Raises:
      UserError: there is no such policy, adapters are named for a run's checkpoints, more than one flag names
        passages, or a field has a value that is not accepted.
    """
    path = Path(model)
    if model not in TOYS and not is_remote(model) and not path.exists() and path.parent.is_dir():
        if not hub.reachable(model):  # reported before other missing flags
            raise UserError(f"--model={model}: there is no such directory")
    from psearch_jax.train.checkpointing.run_config import has_checkpoints, load_run_config

    values = flags.FLAGS
    adapters = {"--adapters": values.adapters, "--config.model.adapters": _overrides().get("model.adapters")}
    for flag, directory in adapters.items():
        if directory and has_checkpoints(model):
            raise UserError(
                f"{flag}={directory}: found with --model={model}, whose checkpoints are complete policies; accepted: "
                "with weights in Hugging Face format (launch/export_hf.py writes them)"
            )
    if values["config"].present:
        config = from_mapping(values.config.to_dict())
    else:
        config = load_run_config(model) or default
    if values.adapters:
        config = replace(config, model=replace(config.model, adapters=values.adapters, lora_rank=0))
    if chosen := passages():
        # Never send the token of the run's own server to another server.
        config = replace(config, retrieval=replace(config.retrieval, **chosen, token_file=""))
    return apply_overrides(config)


def apply_overrides(config: Config) -> Config:
    """The config with the fields that `--config.SECTION.FIELD` sets."""
    fields = ConfigDict(to_mapping(config))
    fields.update_from_flattened_dict(_overrides())
    return from_mapping(fields.to_dict())


def refuse_without_effect(fields: Mapping[str, str], what: str) -> None:
    """Raises `UserError` if the command line sets a field that has no effect on `what`; `fields`: why, by field."""
    for field, value in _overrides().items():
        if field in fields:
            raise UserError(f"--config.{field}: found {value!r}, which has no effect on {what}: {fields[field]}")


def _overrides() -> dict[str, Any]:
    """The values that `--config.SECTION.FIELD` sets, by SECTION.FIELD."""
    return {} if flags.FLAGS.config is None else config_flags.get_override_values(flags.FLAGS["config"])


def passages() -> dict[str, str]:
    """The passages that the command line names, as fields of `config.retrieval`; empty if it names none.

    Raises `UserError` if several flags name passages.
    """
    named = {}
    for field, flag in {"index": "index", "corpus": "corpus", "url": "retriever_url"}.items():
        named[f"--{flag}"] = field, flags.FLAGS[flag].value
        named[f"--config.retrieval.{field}"] = field, _overrides().get(f"retrieval.{field}")
    named = {flag: (field, value) for flag, (field, value) in named.items() if value}
    service = _overrides().get("retrieval.service") or ""  # may use what the others name
    if len(named) > 1 and not service:
        raise UserError(f"{', '.join(named)}: found several, accepted: one of them")
    others = {"index": "", "corpus": "", "url": ""}
    return others | dict(named.values()) | {"service": service} if named or service else {}


def in_closed_world(config: Config) -> Config:
    """The config with the passages of the closed world. Raises `UserError` if the command line names others."""
    if named := "".join(passages().values()):
        raise UserError(
            f"--index, --corpus, --retriever_url: found {named} with the closed world, which has its own passages"
        )
    retrieval = replace(config.retrieval, index="", corpus="", url="", service="")
    return replace(config, retrieval=retrieval, data=replace(config.data, source="closed_world"))


def to_serve(root: Path, slots: int, samples: int = 1) -> Config:
    """The config of a policy that answers single questions.

    A policy that ships uses configs/smoke.py and, unless a flag names passages, searches the closed world.

    Args:
      root: the directory of the repository.
      slots: rows decoded together, rounded up to a multiple of the number of devices.
      samples: slots / samples prompts are prefilled at a time.

    Raises:
      UserError: no passages to search, or more than one flag names passages.
    """
    default = Config()
    if flags.FLAGS.model in TOYS:
        sys.path.insert(0, str(root))
        default = from_mapping(importlib.import_module("configs.smoke").get_config().to_dict())
        if flags.FLAGS.model == "toy_tools":
            default = replace(default, rollout=replace(default.rollout, dialect="tool_calls"))
    base = config(model(), default)
    refuse_without_effect(_NO_EFFECT, "single questions")
    # A user who waits should learn within seconds that a server is down, whatever suits the policy's training.
    patience = {
        name: min(PATIENCE_S, getattr(base.retrieval, name))
        for name in ("timeout_s", "retry_deadline_s")
        if f"retrieval.{name}" not in _overrides()
    }
    retrieval = replace(base.retrieval, **patience)
    # A question that a user asks has no stored prompt, so the default template replaces `row`.
    template = Config().data.template if base.data.prompts_in_rows else base.data.template
    data = replace(base.data, template=template, source="" if passages() else base.data.source)
    rollout = replace(base.rollout, slots=-(-slots // jax.device_count()) * jax.device_count(), samples=samples)
    # On a CPU, XLA would convert all 16-bit weights to float32 in every call, in more memory.
    on_cpu = {"sampling_dtype": "float32"} if jax.default_backend() == "cpu" else {}
    served = replace(base, data=data, retrieval=retrieval, rollout=rollout, model=replace(base.model, **on_cpu))
    if with_method(served).rollout.search_turns and data.source != "closed_world" and not retrieval.passages:
        raise UserError(
            "--index: none given, accepted: a directory made by launch/build_index.py (or --corpus, --retriever_url)"
        )
    return served


def examples(world: object | None) -> tuple[str, ...]:
    """Example questions about a closed world; none without one."""
    if world is None:
        return ()
    from psearch_jax.closed_world.question_forms import questions

    return tuple(questions(world, "eval", kind, 1, seed)[0].text for seed, kind in enumerate(EXAMPLES))

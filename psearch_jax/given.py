"""What the programs that use a policy are given: flags that name it, and what it searches in."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
from absl import flags
from ml_collections import config_flags

from psearch_jax.config import Config, MeshSection, Method, ModelSection, from_mapping, with_method
from psearch_jax.types import UserError

METHODS = list(get_args(Method))
EXAMPLES = ("parallel", "sequential", "parallel")  # their kinds
PATIENCE_S = 10.0  # with servers of passages


def define_flags(model: str | None) -> None:
    """Defines the flags, once and before they are parsed. `model`: of whom names none; None: it has to be named."""
    flags.DEFINE_string(
        "model", model, "Run directory, checkpoint, HF directory or hub id, or toy.", required=not model
    )
    flags.DEFINE_string("adapters", None, "PEFT directory of LoRA adapters to put on the weights of --model.")
    flags.DEFINE_bool("best", False, "Of a run directory: the best checkpoint by validation, not the newest.")
    config_flags.DEFINE_config_file("config", None, "Budgets, prompt and retrieval of a file in configs/.")
    flags.DEFINE_enum("method", None, METHODS, "How to search.")
    flags.DEFINE_string("index", None, "Index directory made by launch/build_index.py.")
    flags.DEFINE_string("corpus", None, "A jsonl corpus in place of an index (small ones only).")
    flags.DEFINE_string("retriever_url", None, "Server that speaks /retrieve, in place of an index; also several.")
    flags.DEFINE_string("retriever_token_file", None, "File with the bearer token that --retriever_url asks for.")
    flags.DEFINE_integer("topk", None, "Passages per sub-query.", lower_bound=1)
    flags.DEFINE_integer("tensor", None, "Devices over which each layer is split; default: the config's.", 1)


def model() -> str:
    """The policy that the flags name."""
    if not flags.FLAGS.best:
        return flags.FLAGS.model
    from psearch_jax.train.best import find_best

    return str(find_best(flags.FLAGS.model))


def config(model: str, default: Config = Config()) -> Config:  # noqa: B008 (frozen)
    """Budgets, prompt and retrieval by --config, else of the run that a policy belongs to, else the default.

    Over them stand the method, the passages and the split of layers that flags name.

    Raises:
      UserError: passages of several kinds.
    """
    given = flags.FLAGS
    if given.config is not None:
        found = from_mapping(given.config.to_dict())
    else:
        from psearch_jax.train.run_config import config_of

        found = config_of(model) or default
    retrieval, mesh = found.retrieval, found.mesh
    if given.adapters:
        found = replace(found, model=replace(found.model, adapters=given.adapters, lora_rank=0))
    if passages():
        # The token of the run's own server is for no other.
        names = {"index": given.index, "corpus": given.corpus, "url": given.retriever_url, "token_file": None}
        retrieval = replace(retrieval, **{name: value or "" for name, value in names.items()})
    if given.retriever_token_file:
        retrieval = replace(retrieval, token_file=given.retriever_token_file)
    if given.topk:
        retrieval = replace(retrieval, topk=given.topk)
    if given.tensor:
        mesh = MeshSection(tensor=given.tensor)
    return replace(found, retrieval=retrieval, mesh=mesh, method=given.method or found.method)


def passages() -> bool:
    """Whether a flag names passages. Raises `UserError` where several do."""
    named = [name for name in ("index", "corpus", "retriever_url") if flags.FLAGS[name].value]
    if len(named) > 1:
        raise UserError("--index, --corpus, --retriever_url: found several, accepted: one of them")
    return bool(named)


def to_serve(root: Path, slots: int, samples: int = 1) -> Config:
    """The config of a policy that answers single questions.

    The toy policy's is that of configs/smoke.py, and its world is searched where no passages are named.

    Args:
      root: of the repository.
      slots: rows decoded together at least; as many more as the devices need.
      samples: prompts are prefilled for slots / samples at a time.

    Raises:
      UserError: no passages to search in, or several kinds of them.
    """
    default = Config()
    if flags.FLAGS.model == "toy":
        sys.path.insert(0, str(root))
        default = from_mapping(importlib.import_module("configs.smoke").get_config().to_dict())
    found = config(model(), default)
    # Who waits is told within seconds that nobody answers; and there is a question, and no row of a file.
    retrieval = replace(found.retrieval, patience_s=min(PATIENCE_S, found.retrieval.patience_s))
    data = replace(found.data, prompt="template", source="" if passages() else found.data.source)
    rollout = replace(found.rollout, slots=-(-slots // jax.device_count()) * jax.device_count(), samples=samples)
    found = replace(found, data=data, retrieval=retrieval, rollout=rollout, model=_for_device(found.model))
    places = (data.source == "closed_world", retrieval.index, retrieval.corpus, retrieval.url)
    if with_method(found).rollout.search_turns and not any(places):
        raise UserError(
            "--index: none given, accepted: a directory of launch/build_index.py (or --corpus, --retriever_url)"
        )
    return found


def _for_device(model: ModelSection) -> ModelSection:
    """The model sampled in float32 on a CPU: XLA widens all 16-bit weights there in every call, in more memory."""
    if jax.default_backend() != "cpu" or model.int8_weights:
        return model
    return replace(model, sampling_dtype="float32")


def examples(world: object | None) -> tuple[str, ...]:
    """Questions about a closed world; none about other passages."""
    if world is None:
        return ()
    from psearch_jax.data.asking import questions

    return tuple(questions(world, "eval", kind, 1, seed)[0].text for seed, kind in enumerate(EXAMPLES))

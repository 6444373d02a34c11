"""What a run needs from disk or the network, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from psearch_jax.config import Config
from psearch_jax.data.prepared import are_there
from psearch_jax.eval.benchmarks import CLOSED_WORLD
from psearch_jax.runtime import hub
from psearch_jax.runtime.paths import is_remote, on_disk, packaged
from psearch_jax.types import UserError
from retrieval.protocol import Retriever


def missing_inputs(config: Config, training: bool = True, retriever: Retriever | None = None) -> list[str]:
    """One line for each input that is missing or cannot be found, with the command that creates it.

    Args:
      retriever: an existing retriever, with which the config need not name passages.
    """
    lines = []
    path = config.model.path
    if path and path != "toy" and not is_remote(path) and not Path(path).is_dir() and not hub.reachable(path):
        lines.append(
            f"config.model.path={path}: neither a directory nor a reachable hub id; get it with "
            f"`hf download {path} --local-dir=DIR` and set --config.model.path=DIR"
        )
    if not path and not config.model.tokenizer:
        lines.append("config.model.tokenizer: random weights (model.path is empty) need a tokenizer directory")
    if training and not config.data.source:
        lines.append(
            "config.data.source: a jsonl or parquet file of questions, or a directory made by launch/prepare_data.py; "
            "for example FlashRAG's, with `hf download RUC-NLPIR/FlashRAG_datasets hotpotqa/train.jsonl "
            "--repo-type=dataset --local-dir=DIR`"
        )
    closed_world, retrieval = config.data.source == CLOSED_WORLD, config.retrieval
    named_passages = closed_world or retrieval.passages
    if needs_retriever(config) and not (named_passages or retriever):
        lines.append(
            "config.retrieval.index (or .corpus, .url): an index made with `python launch/build_index.py "
            "--corpus=FILE.jsonl --encoder=hashing --out=DIR`"
        )
    named = (
        ("model.path", path),
        ("data.source", config.data.source if training and not closed_world else ""),
        ("data.validation", config.data.validation if training else ""),
        ("retrieval.index", config.retrieval.index),
        ("retrieval.corpus", config.retrieval.corpus),
        ("retrieval.token_file", config.retrieval.token_file if config.retrieval.url else ""),
        ("model.adapters", config.model.adapters),
        ("model.tokenizer", packaged(config.model.tokenizer)),
    )
    for name, path in named:
        if not path:
            continue
        if name in ("data.source", "data.validation"):
            if not are_there(path):
                lines.append(_not_found(name, path))
            continue
        try:
            exists = on_disk(path, f"config.{name}").exists()
        except UserError as error:
            lines.append(str(error))
            continue
        if name == "model.tokenizer":
            if not exists and not hub.reachable(path, "tokenizer_config.json"):
                lines.append(
                    f"config.{name}={path}: neither a directory nor a reachable hub id such as "
                    "Qwen/Qwen2.5-0.5B-Instruct"
                )
        elif name != "model.path" and not exists:
            lines.append(_not_found(name, path))
    return lines


def _not_found(name: str, path: str) -> str:
    """A line about an input; a run's config can name files relative to the directory where the run was started."""
    relative = not is_remote(path) and not Path(path).is_absolute()
    return f"config.{name}={path}: not found" + (f" in {Path.cwd()}" if relative else "")


def needs_retriever(config: Config) -> bool:
    """Whether rollouts of this config need a retriever."""
    if config.train.replay:
        return False
    return config.rollout.search_turns > 0 or config.rollout.initial_search

"""What a run needs, checked before anything is loaded, and what config, model and meshes must agree on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.data.prepared import location_exists
from psearch_jax.eval.benchmarks import CLOSED_WORLD
from psearch_jax.runtime import hub
from psearch_jax.runtime.paths import TOYS, is_remote, on_disk, packaged
from psearch_jax.sharding import check_heads, check_rows
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question, UserError
from retrieval.protocol import Retriever

MEASURED = 200  # questions whose tokens are counted
WORD = re.compile(r"[^\W\d_]{3,}")
LEAST_BYTES = 1.5  # of a word's tokens on average; with fewer, the vocabulary spells it
MOST_SPELLED = 0.05  # of the words; a vocabulary of the same language spells less than .01


def missing_inputs(config: Config, training: bool = True, retriever: Retriever | None = None) -> list[str]:
    """One line for each input on disk or the network that is missing, with the command that creates it.

    Args:
      retriever: an existing retriever, with which the config need not name passages.
    """
    model, data, retrieval = config.model, config.data, config.retrieval
    tokenizer = packaged(model.tokenizer)
    lines = []
    models = {"model.path": model.path, "learning.teacher": config.learning.teacher if training else ""}
    for name, path in models.items():
        if path not in ("", *TOYS) and not is_remote(path) and not _exists_here_or_on_hub(path):
            lines.append(
                f"config.{name}={path}: neither a directory nor a reachable hub id; get it with "
                f"`hf download {path} --local-dir=DIR` and set --config.{name}=DIR"
            )
        elif training and path and Path(path, "policy").is_dir():
            lines.append(f"config.{name}={path}: a run directory, accepted: the model that it wrote, {path}/policy")
    if not model.path and not tokenizer:
        lines.append("config.model.tokenizer: random weights (model.path is empty) need a tokenizer directory")
    elif tokenizer and not is_remote(tokenizer) and not _exists_here_or_on_hub(tokenizer, "tokenizer_config.json"):
        lines.append(
            f"config.model.tokenizer={tokenizer}: neither a directory nor a reachable hub id such as "
            "Qwen/Qwen2.5-0.5B-Instruct"
        )
    if training and not data.source:
        lines.append(
            "config.data.source: a jsonl or parquet file of questions, or a directory made by launch/prepare_data.py; "
            "for example FlashRAG's, with `hf download RUC-NLPIR/FlashRAG_datasets hotpotqa/train.jsonl "
            "--repo-type=dataset --local-dir=DIR`"
        )
    if needs_retriever(config, training) and not (data.source == CLOSED_WORLD or retrieval.passages or retriever):
        lines.append(
            "config.retrieval.index (or .corpus, .url): an index made with `python launch/build_index.py "
            "--corpus=FILE.jsonl --encoder=hashing --out=DIR`"
        )
    if training:
        questions = {"data.source": data.source, "data.validation": data.validation}
        files = {name: path for name, path in questions.items() if path not in ("", CLOSED_WORLD)}
        lines += [_not_found(name, path) for name, path in files.items() if not location_exists(path)]
    local = {
        **{name: path if is_remote(path) else "" for name, path in models.items()},
        "model.tokenizer": tokenizer if is_remote(tokenizer) else "",
        "model.adapters": model.adapters,
        "retrieval.index": retrieval.index,
        "retrieval.corpus": retrieval.corpus,
        "retrieval.token_file": retrieval.token_file if retrieval.url else "",
        "train.scripted": config.train.scripted if training and not config.train.replay else "",
    }
    for name, path in local.items():
        try:
            if path and not on_disk(path, f"config.{name}").exists():
                lines.append(_not_found(name, path))
        except UserError as error:  # it is in an object store
            lines.append(str(error))
    return lines


def needs_retriever(config: Config, training: bool) -> bool:
    """Whether rollouts of this config need a retriever; training on recorded ones does not, their evaluation does."""
    if training and config.train.replay:
        return False
    return config.rollout.search_turns > 0 or config.rollout.initial_search


def check_vocabulary(tokenizer: Tokenizer, questions: Sequence[Question]) -> str:
    """How many words of the first questions the vocabulary spells letter by letter, such as names.

    Raises:
      UserError: there are many, so the policy cannot have learned them.
    """
    words = sorted({word for question in questions[:MEASURED] for word in WORD.findall(question.text)})
    spelled = [w for w in words if len(w.encode()) < LEAST_BYTES * len(tokenizer.encode_foreign(f" {w}"))]
    text = f"{len(spelled)} of {len(words)} words spelled"
    if len(spelled) > MOST_SPELLED * len(words):
        raise UserError(
            f"tokenizer {tokenizer.name}: {text}, such as {', '.join(spelled[:3])}; accepted: at most "
            f"{MOST_SPELLED:.0%}. The toy policies know only the words and syllables of the closed world "
            "(docs/quickstart.md); other texts need a model of their language (docs/small_model.md)"
        )
    return text


def _exists_here_or_on_hub(path: str, file: str = "config.json") -> bool:
    return Path(path).is_dir() or hub.reachable(path, file)


def _not_found(name: str, path: str) -> str:
    """A line about an input; a run's config can name files relative to the directory where the run was started."""
    relative = not is_remote(path) and not Path(path).is_absolute()
    return f"config.{name}={path}: not found" + (f" in {Path.cwd()}; set --config.{name}=PATH" if relative else "")


def check_run(
    config: Config, model: DecoderConfig, mesh: Mesh | None, rollout_mesh: Mesh | None, processes: int
) -> None:
    """Checks heads, positions, rows and slots against the model and the devices.

    Args:
      mesh: the one that trains; None if nothing is trained.
      rollout_mesh: the one that samples; None if nothing is sampled.
      processes: the number of processes that share prompts and slots.

    Raises:
      UserError: one line that names the field.
    """
    context = config.rollout.context_tokens
    if context > model.max_positions:
        raise UserError(
            f"config.rollout.context_tokens: found {context}, accepted: at most the model's {model.max_positions} "
            "positions"
        )
    shared = {}
    if mesh is not None:
        check_heads(mesh, model.heads)
        check_rows(mesh, learning__micro_batch_rows=config.learning.micro_batch_rows)
        shared["train.prompts"] = config.train.prompts
    if rollout_mesh is not None:
        check_heads(rollout_mesh, model.heads, "rollout_tensor" if config.mesh.rollout_tensor else "tensor")
        check_rows(rollout_mesh, rollout__slots=config.rollout.slots)
        shared["rollout.slots"] = config.rollout.slots
    for field, value in shared.items():
        if value % processes:
            raise UserError(f"config.{field}: found {value}, accepted: a multiple of the {processes} processes")

"""The settings that affect a run's results, as a checkpoint records them, and their changes on resume.

A record holds the fields with `Resume.SAME_VALUE` by value. For those with `Resume.SAME_CONTENT` it holds the path or
name and a fingerprint of the contents, because a directory may be moved or replaced.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from psearch_jax.config import Config, to_mapping
from psearch_jax.config.setting import Resume, settings_of
from psearch_jax.runtime import processes
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")

Record = dict[str, Any]
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
WEIGHTS = ("config.json", "*.safetensors")  # the files that identify a directory of weights
# Fields, or prefixes of fields, that change the results of an evaluation.
_OF_EVALUATION = ("data.source", "data.template", "data.validation", "data.world", "eval.questions_per_kind")
_OF_EVALUATION += ("eval.temperature", "method", "model.", "retrieval.", "rollout.")
_OF_TRAINING = ("model.dtype", "rollout.samples", "rollout.temperature")  # although they have such a prefix
_BLOCK, _BLOCKS = 4096, 64  # size in bytes and number of a large file's sampled blocks


def fields(config: Config) -> dict[str, Any]:
    """Every field by its dotted name."""
    out: dict[str, Any] = {}
    for name, value in to_mapping(config).items():
        out |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return out


def record(config: Config, contents: Mapping[str, tuple[str, str]], unused: Sequence[str] = ()) -> Record:
    """The record of a run.

    Args:
      config: with the method's settings applied.
      contents: for each field with `Resume.SAME_CONTENT`, what it names and the fingerprint of that.
      unused: sections of the config that the run does not read.
    """
    declared = settings_of(Config)
    values = {
        name: value
        for name, value in fields(config).items()
        if declared[name].resume is Resume.SAME_VALUE and name.partition(".")[0] not in unused
    }
    return values | {name: {"names": named, "is": digest} for name, (named, digest) in contents.items()}


def differences(saved: Mapping[str, Any], now: Record) -> dict[str, str]:
    """The old and new value of every field that differs. A field missing from the saved record had its default."""
    defaults = fields(Config())
    out = {}
    for name, new in now.items():
        old = saved.get(name, defaults.get(name))
        if not isinstance(new, dict):
            if old != new:
                out[name] = f"{old!r}, now {new!r}"
        elif not isinstance(old, dict):
            if old != new["names"]:
                out[name] = f"not recorded, now {new['names']!r}"
        elif old["is"] != new["is"] and old["names"] == new["names"]:
            out[name] = f"{new['names']!r} has other contents"
        elif old["is"] != new["is"]:
            out[name] = f"{old['names']!r}, now {new['names']!r}"
    return out


def affect_evaluation(changes: Iterable[str], now: Record) -> bool:
    """Whether evaluations before and after the change of these fields cannot be compared.

    Args:
      now: the record after the change.
    """
    own_questions = bool(now.get("data.validation", {}).get("is"))  # none are held out from data.source
    others = {*_OF_TRAINING, *(["data.source"] if own_questions else [])}
    return any(name.startswith(_OF_EVALUATION) and name not in others for name in changes)


def check_changes(loop: Mapping[str, Any], now: Record, workdir: Path, allow_changes: bool) -> dict[str, str]:
    """The settings that changed since a checkpoint, as `differences` describes them; logs them.

    Args:
      loop: what the checkpoint records about the run's position, with its settings.

    Raises:
      UserError: settings changed, and `allow_changes` is false; or the algorithm changed.
    """
    changes = processes.broadcast(lambda: differences(loop.get("settings", {}), now))
    description = "; ".join(f"{name}: {change}" for name, change in changes.items())
    if "learning.algorithm" in changes:  # a critic can only be created at step 0
        raise UserError(
            f"{workdir}: learning.algorithm was {changes['learning.algorithm']}; accepted: the one that the run "
            "started with, or another --workdir"
        )
    if changes and not allow_changes:
        raise UserError(
            f"{workdir}: after step {loop['step']} this run would resume with other settings, {description}; "
            "accepted: the original settings, or --allow_changes"
        )
    if changes:
        log.warning("resuming with other settings: %s", description)
    return changes


def hash_files(path: str | Path, patterns: Sequence[str] = ()) -> str:
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


def hash_texts(*texts: str) -> str:
    """The digest of texts in memory."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()

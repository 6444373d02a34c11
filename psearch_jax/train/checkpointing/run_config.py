"""The config that a policy was trained with."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import jax

from psearch_jax.config import Config, MeshSection, from_mapping
from psearch_jax.runtime.paths import absolute, locate, read_json
from psearch_jax.train.checkpointing.checkpoint import find_checkpoint
from psearch_jax.types import UserError


def config_of(model: str) -> Config | None:
    """The config of the run that `model`, a checkpoint or run directory, belongs to; None if it is neither.

    A mesh that does not fit this machine's devices is replaced by the default one.

    Raises:
      UserError: config.json cannot be read.
    """
    path = locate(model)
    in_hf_format = (path / "config.json").is_file() and not (path / "checkpoints").is_dir()
    if not path.is_dir() or in_hf_format:
        return None
    file = absolute(find_checkpoint(path)).parents[1] / "config.json"
    if not file.is_file():
        return None
    values = read_json(file)
    try:
        config = from_mapping(values)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    sizes = astuple(config.mesh)
    known = math.prod(size for size in sizes if size > 0)
    if jax.device_count() % known or (-1 not in sizes and known != jax.device_count()):  # the run used another machine
        config = replace(config, mesh=MeshSection())
    return config

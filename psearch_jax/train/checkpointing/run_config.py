"""The config that a policy was trained with, and the part of it that an export keeps."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import jax

from psearch_jax.config import Config, DecoderConfig, MeshSection, from_mapping, to_mapping
from psearch_jax.models import hf
from psearch_jax.runtime.paths import TOYS, absolute, locate, packaged, read_json
from psearch_jax.sharding import mesh_sizes
from psearch_jax.text.prompts import load_template, packaged_templates
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing.checkpoint import find_checkpoint
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")
EXPORTED = "psearch.json"  # in an export: a config with method, prompt, budgets and number of passages
PROMPT = "prompt.txt"  # in an export: a prompt template that is not packaged


def load_run_config(model: str) -> Config | None:
    """The config of the run that `model`, a checkpoint or run directory, belongs to, or of an export; else None.

    Its mesh has all devices, with the sampler's `tensor` if the run had another one for sampling. A mesh that does not
    fit this machine's devices is replaced by the default one.

    Raises:
      UserError: config.json cannot be read.
    """
    path = locate(model)
    if not has_checkpoints(model):
        return _of_export(path) if (path / EXPORTED).is_file() else None
    file = absolute(find_checkpoint(path)).parents[1] / "config.json"
    if not file.is_file():
        return None
    values = read_json(file)
    if "exercise_rows" in values:
        raise UserError(f"{file}: a run of experiments/toy found, accepted: the directory policy/ that it writes")
    try:
        config = from_mapping(values)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    mesh = MeshSection(tensor=config.mesh.rollout_tensor) if config.mesh.rollout_tensor else config.mesh
    try:
        mesh_sizes(mesh, jax.device_count())
    except UserError:  # the run used another machine
        mesh = MeshSection()
    return replace(config, mesh=mesh)


def has_checkpoints(model: str) -> bool:
    """Whether `model` is a run directory or a checkpoint; not one in Hugging Face format, a hub id or `toy`."""
    path = locate(model)
    in_hf_format = (path / "config.json").is_file() and not (path / "checkpoints").is_dir()
    return model not in TOYS and path.is_dir() and not in_hf_format


def locate_tokenizer(config: Config, recorded: str) -> str:
    """A directory or hub id with the tokenizer of a checkpoint.

    The directory that the config names, if it exists; else the recorded one. If this machine lacks both: what the
    config names, or else the run's initial weights.
    """
    named = packaged(config.model.tokenizer)
    if named and Path(named).is_dir():
        return named
    if Path(recorded).is_dir():
        return recorded
    if named or not Path(recorded).is_absolute():
        return named or recorded
    return hf.locate_recorded_model(recorded, config.model.path, "tokenizer_config.json") or recorded


def make_export_shape(shape: DecoderConfig, tokenizer: Tokenizer) -> DecoderConfig:
    """The shape with the stop ids of the tokenizer, at which the policy has learned to end its messages.

    The files of a base model name fewer: other programs would generate past the answer.
    """
    return replace(shape, eos_ids=tuple(dict.fromkeys((*shape.eos_ids, *sorted(tokenizer.stop_ids)))))


def make_export_files(config: Config) -> dict[str, bytes]:
    """The files that an export adds so that its policy is asked as it was trained, by name.

    Empty if the prompt template is a file that does not exist any more: the export then needs a config to be asked.
    With data.template=row it keeps that, and no template: the policy was not trained with one.
    """
    sections = to_mapping(config)
    template, files = config.data.template, {}
    if config.data.prompts_in_rows:
        log.warning(
            "data.template=row: the policy was trained with the prompts of its data; launch/ask.py asks it with "
            "--config.data.template (default: %s)",
            Config().data.template,
        )
    elif template not in packaged_templates():
        try:
            files[PROMPT], template = load_template(template).encode(), PROMPT
        except UserError as error:
            log.warning("the export does not remember prompt and budgets: %s", error)
            return {}
    kept = {
        "method": config.method,
        "data": {"template": template},
        "retrieval": {name: sections["retrieval"][name] for name in ("topk", "max_sub_queries")},
        "rollout": sections["rollout"],
    }
    return files | {EXPORTED: (json.dumps(kept, indent=2) + "\n").encode()}


def _of_export(directory: Path) -> Config:
    try:
        config = from_mapping(read_json(directory / EXPORTED))
    except UserError as error:
        raise UserError(f"{directory / EXPORTED}: {error}") from None
    if config.data.template != PROMPT:
        return config
    return replace(config, data=replace(config.data, template=str(directory / PROMPT)))

"""Loads the model and the tokenizer that a config names."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import PRESETS, Config, DecoderConfig, ModelSection
from psearch_jax.models import decoder, hf, lora, peft
from psearch_jax.runtime.paths import packaged
from psearch_jax.sharding import STORAGE, param_shardings, put
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing import settings
from psearch_jax.types import UserError


def load_weights(
    config: Config, mesh: Mesh, model: DecoderConfig | None, params: nnx.State | None, dtype: jnp.dtype
) -> tuple[DecoderConfig, nnx.State, str]:
    """Shape, parameters (storage-sharded, in `dtype`) and the directory that they were loaded from, or "".

    Args:
      model, params: existing shape and weights; default: those that the config names.
    """

    def shard(abstract: nnx.State) -> nnx.State:
        return param_shardings(abstract, STORAGE, mesh)

    if params is not None and model is not None:
        return model, jax.device_put(params, shard(params)), ""
    if config.model.path:
        path = hf.resolve(config.model.path)
        model, params = hf.load_hf(path, shard, dtype)
        return model, params, path
    model = PRESETS[config.model.preset]
    return model, decoder.random_params(model, config.seed, dtype, shard), ""


def load_teacher(config: Config, mesh: Mesh, tokenizer: Tokenizer) -> tuple[DecoderConfig, nnx.State, str]:
    """Shape, weights (storage-sharded, in the sampling dtype) and directory of the teacher that the config names.

    Raises:
      UserError: it has another tokenizer than the policy; its weights are not loaded then.
    """
    named = config.learning.teacher
    path = hf.resolve(named, "config.learning.teacher")
    if Tokenizer.load(path).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"config.learning.teacher={named}: its tokenizer is not the policy's ({tokenizer.name}), accepted: a "
            "model with the same token ids"
        )
    section = replace(config.model, path=path)
    return load_weights(replace(config, model=section), mesh, None, None, jnp.dtype(section.sampling_dtype))


def with_adapter_shape(config: Config) -> Config:
    """The config with the rank and alpha of the adapters that it names.

    Raises:
      UserError: they cannot be read, or their rank is not config.model.lora_rank although that is set.
    """
    section = config.model
    if not section.adapters:
        return config
    adapter = peft.read_shape(section.adapters)
    if section.lora_rank not in (0, adapter.rank):
        raise UserError(
            f"config.model.lora_rank: found {section.lora_rank} with adapters of rank {adapter.rank} in "
            f"{section.adapters}, accepted: that rank, or 0"
        )
    return replace(config, model=replace(section, lora_rank=adapter.rank, lora_alpha=adapter.alpha))


def init_adapters(config: Config, model: DecoderConfig, mesh: Mesh) -> nnx.State:
    """The initial adapters of a run, storage-sharded: those that the config names, or else new ones."""
    adapters = config.model.lora
    assert adapters is not None
    shardings = param_shardings(lora.abstract_adapters(model, adapters), STORAGE, mesh)
    if config.model.adapters:
        return put(peft.load_adapters(config.model.adapters, model), shardings)
    return jax.jit(lambda: lora.init_adapters(model, adapters, config.seed), out_shardings=shardings)()


def describe_policy(section: ModelSection, path: str, tokenizer: Tokenizer) -> dict[str, tuple[str, str]]:
    """For each field that names a part of the policy, the path it names and a hash of the content.

    Args:
      path: the directory of the weights; empty if they are random.
    """
    adapters, preset = section.adapters, f"random weights of {section.preset}"
    return {
        "model.path": (path, settings.hash_files(path, settings.WEIGHTS)) if path else (preset, preset),
        "model.tokenizer": (tokenizer.directory, settings.hash_texts(*tokenizer.identity)),
        "model.adapters": (adapters, settings.hash_files(adapters, settings.ADAPTERS) if adapters else ""),
    }


def load_tokenizer(config: Config, model: DecoderConfig, path: str) -> Tokenizer:
    """The tokenizer that the config names, or else the one at `path`.

    Raises:
      UserError: there is none, or it does not match the model.
    """
    path = packaged(config.model.tokenizer) or path
    tokenizer = Tokenizer.load(path, model.eos_ids)
    if tokenizer.size > model.vocab_rows:
        raise UserError(
            f"{path}: the tokenizer has {tokenizer.size} token ids, the model {model.vocab_rows} embedding rows; "
            "accepted: at most one token id per row"
        )
    for eos in model.eos_ids:
        if eos >= tokenizer.size or tokenizer.token_bytes[eos] is not None:
            raise UserError(
                f"{path}: config.json lists {eos} as an end-of-text token, which is not a control token of the "
                f"tokenizer (its own: {sorted(tokenizer.stop_ids - {eos})})"
            )
    return tokenizer

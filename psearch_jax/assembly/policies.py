"""Loads the model and the tokenizer that a config names."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import PRESETS, Config, DecoderConfig
from psearch_jax.models import decoder, hf, lora, peft
from psearch_jax.runtime.paths import TOY_POLICY, packaged
from psearch_jax.sharding import STORAGE, param_shardings, put
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import UserError


def load_weights(
    config: Config, mesh: Mesh, model: DecoderConfig | None, params: nnx.State | None, dtype: jnp.dtype
) -> tuple[DecoderConfig, nnx.State, str]:
    """Shape, parameters (storage-sharded, in `dtype`) and the directory that they were loaded from, or "".

    Args:
      model, params: existing shape and weights; default: those that the config names.
    """

    def place(abstract: nnx.State) -> nnx.State:
        return param_shardings(abstract, STORAGE, mesh)

    if params is not None and model is not None:
        return model, jax.device_put(params, place(params)), ""
    if config.model.path:
        path = str(TOY_POLICY) if config.model.path == "toy" else hf.resolve(config.model.path)
        model, params = hf.load_hf(path, place, dtype)
        return model, params, path
    model = PRESETS[config.model.preset]
    return model, decoder.random_params(model, config.seed, dtype, place), ""


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


def first_adapters(config: Config, model: DecoderConfig, mesh: Mesh) -> nnx.State:
    """The initial adapters of a run, storage-sharded: those that the config names, or else new ones."""
    adapters = config.model.lora
    assert adapters is not None
    places = param_shardings(lora.abstract_adapters(model, adapters), STORAGE, mesh)
    if config.model.adapters:
        return put(peft.load_adapters(config.model.adapters, model), places)
    return jax.jit(lambda: lora.init_adapters(model, adapters, config.seed), out_shardings=places)()


def load_tokenizer(config: Config, model: DecoderConfig, path: str) -> Tokenizer:
    """The tokenizer that the config names, or else the one at `path`.

    Raises:
      UserError: there is none, or it does not match the model.
    """
    where = packaged(config.model.tokenizer) or path
    tokenizer = Tokenizer.load(where, model.eos_ids)
    _match(tokenizer, model, where)
    return tokenizer


def _match(tokenizer: Tokenizer, model: DecoderConfig, path: str) -> None:
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

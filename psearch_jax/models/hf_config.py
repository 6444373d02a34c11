"""Models in Hugging Face's format: the names of their tensors, and their config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.config import FAMILIES, DecoderConfig, Family, find_family
from psearch_jax.runtime.paths import read_json
from psearch_jax.types import UserError

# (path in our parameters, HF name, HF axes, our axes). A dot in the HF axes separates array dimensions; letters
# without a dot between them are merged into one. `{i}` marks a name that exists once per layer, which we stack on
# axis L.
TABLE: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("embedding",), "model.embed_tokens.weight", "V.D", "VD"),
    (("final_norm",), "model.norm.weight", "D", "D"),
    (("lm_head",), "lm_head.weight", "V.D", "DV"),
    (("layers", "attention_norm"), "model.layers.{i}.input_layernorm.weight", "D", "D"),
    (("layers", "q_kernel"), "model.layers.{i}.self_attn.q_proj.weight", "NH.D", "DNH"),
    (("layers", "q_bias"), "model.layers.{i}.self_attn.q_proj.bias", "NH", "NH"),
    (("layers", "k_kernel"), "model.layers.{i}.self_attn.k_proj.weight", "KH.D", "DKH"),
    (("layers", "k_bias"), "model.layers.{i}.self_attn.k_proj.bias", "KH", "KH"),
    (("layers", "v_kernel"), "model.layers.{i}.self_attn.v_proj.weight", "KH.D", "DKH"),
    (("layers", "v_bias"), "model.layers.{i}.self_attn.v_proj.bias", "KH", "KH"),
    (("layers", "q_norm"), "model.layers.{i}.self_attn.q_norm.weight", "H", "H"),
    (("layers", "k_norm"), "model.layers.{i}.self_attn.k_norm.weight", "H", "H"),
    (("layers", "o_kernel"), "model.layers.{i}.self_attn.o_proj.weight", "D.NH", "NHD"),
    (("layers", "mlp_norm"), "model.layers.{i}.post_attention_layernorm.weight", "D", "D"),
    (("layers", "gate_kernel"), "model.layers.{i}.mlp.gate_proj.weight", "F.D", "DF"),
    (("layers", "up_kernel"), "model.layers.{i}.mlp.up_proj.weight", "F.D", "DF"),
    (("layers", "down_kernel"), "model.layers.{i}.mlp.down_proj.weight", "D.F", "FD"),
)
# Field of DecoderConfig -> field of config.json.
_SIZES = {
    "vocab_rows": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
# The same for the scaled rotary positions of type `llama3`.
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low": "low_freq_factor",
    "rope_high": "high_freq_factor",
    "rope_positions": "original_max_position_embeddings",
}
_ONLY = {"use_sliding_window": False, "hidden_act": "silu"}  # as Family.only, of all families


def tensor_table(family: Family) -> list[tuple[tuple[str, ...], str, str, str]]:
    """The rows of `TABLE` with the family's names."""
    return [(path, family.own_name(name), hf_axes, our_axes) for path, name, hf_axes, our_axes in TABLE]


def read_config(directory: str | Path) -> DecoderConfig:
    """Reads config.json (transformers 4 and 5 spell the rotary base differently) and generation_config.json.

    Raises:
      UserError: a missing file or field, or another architecture.
    """
    path = Path(directory) / "config.json"
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type not in [*FAMILIES]:
        raise UserError(f"{path}: model_type is {model_type!r}, accepted: {', '.join(map(repr, FAMILIES))}")
    family = FAMILIES[model_type]
    raw |= {name: raw[own] for name, own in family.names.items() if own in raw}
    rope: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):  # transformers applies the second where both are given
        scaling = raw.get(field) or {}
        if not isinstance(scaling, dict):
            raise UserError(f"{path}: {field} is {json.dumps(scaling)}, accepted: an object")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise UserError(f"{path}: {field} has type {kind!r}, accepted: 'default' (no scaling) or 'llama3'")
        if kind == "llama3" and (lacking := [name for name in _LLAMA3.values() if name not in scaling]):
            raise UserError(f"{path}: {field} lacks {lacking[0]}, needed: {', '.join(_LLAMA3.values())}")
        rope |= scaling
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f'{path}: layer_types is {json.dumps(kinds)}, accepted: a list of only "full_attention"')
    for field, value in {**_ONLY, **family.only}.items():
        given = raw.get(field, family.defaults.get(field))
        if given not in (None, value):
            raise UserError(f"{path}: {field} is {json.dumps(given)}, accepted: {json.dumps(value)}")
    eos_ids = _eos_ids(path, raw)
    try:
        values: dict[str, Any] = {"num_key_value_heads": raw["num_attention_heads"], "max_position_embeddings": 32_768}
        values |= {**family.defaults, **{name: value for name, value in raw.items() if value is not None}}
        values.setdefault("head_dim", int(values["hidden_size"]) // max(1, int(values["num_attention_heads"])))
        return DecoderConfig(
            **{field: int(values[name]) for field, name in _SIZES.items()},
            tied=bool(values.get("tie_word_embeddings", False)),
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10_000.0))),
            **{
                field: type(getattr(DecoderConfig, field))(rope[name])
                for field, name in _LLAMA3.items()
                if name in rope
            },
            rms_eps=float(values.get("rms_norm_eps", 1e-6)),
            eos_ids=eos_ids,
            bos_id=raw.get("bos_token_id"),
            family=family.model_type,
            **family.options,
        )
    except KeyError as missing:
        raise UserError(f"{path}: field {family.own_name(missing.args[0])!r} is missing") from None
    except UserError as error:  # the sizes contradict each other
        raise UserError(f"{path}: {error}") from None
    except (TypeError, ValueError, OverflowError):
        names = (*_SIZES.values(), "rms_norm_eps", "rope_theta")
        numbers = {name: raw[name] for name in names if name in raw and not _is_number(raw[name])}
        raise UserError(f"{path}: found {numbers or rope}, accepted: numbers") from None


def _eos_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The stop ids of generation_config.json next to `path`; without it, those of the config itself."""
    generation, eos = path.with_name("generation_config.json"), raw.get("eos_token_id")
    if generation.is_file() and "eos_token_id" in (values := read_json(generation)):
        path, eos = generation, values["eos_token_id"]
    stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in stops):
        raise UserError(f"{path}: eos_token_id is {json.dumps(eos)}, accepted: an integer, or a list of integers")
    return tuple(stops)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def write_config(directory: Path, config: DecoderConfig, dtype: Any) -> None:
    """Writes generation_config.json and config.json."""
    family, eos = find_family(config), list(config.eos_ids)
    generation = {"do_sample": True} | ({"eos_token_id": eos} if eos else {})
    scaling = None
    if config.rope_factor != 1:
        scaling = {"rope_type": "llama3"} | {name: getattr(config, field) for field, name in _LLAMA3.items()}
    fields = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        **{name: getattr(config, field) for field, name in _SIZES.items()},
        **_ONLY,
        **family.only,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,  # read by transformers 4
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta},  # transformers 5
        "rms_norm_eps": config.rms_eps,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if eos else None,
        "torch_dtype": np.dtype(dtype).name,
    }
    fields = {family.own_name(name): value for name, value in fields.items()}
    for name, value in (("generation_config.json", generation), ("config.json", fields)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Hugging Face directories in and out: one table of names, read both ways.

A Qwen-2 checkpoint is config.json, generation_config.json, tokenizer files and one or more safetensors files.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.config import Qwen2Config
from psearch_jax.models import qwen2
from psearch_jax.types import UserError

# (path in our parameters, HF name, HF axes, our axes). A dot in the HF axes separates array dimensions; letters that
# stand together are merged into one. `{i}` marks a name that exists once per layer and is stacked on axis L.
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
    (("layers", "o_kernel"), "model.layers.{i}.self_attn.o_proj.weight", "D.NH", "NHD"),
    (("layers", "mlp_norm"), "model.layers.{i}.post_attention_layernorm.weight", "D", "D"),
    (("layers", "gate_kernel"), "model.layers.{i}.mlp.gate_proj.weight", "F.D", "DF"),
    (("layers", "up_kernel"), "model.layers.{i}.mlp.up_proj.weight", "F.D", "DF"),
    (("layers", "down_kernel"), "model.layers.{i}.mlp.down_proj.weight", "D.F", "FD"),
)
_SHARD_BYTES = 4_500_000_000
_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "eos_token_id",
)


def read_config(directory: str | Path) -> Qwen2Config:
    """Reads config.json (transformers 4 and 5 spell the rotary base differently) and generation_config.json.

    Raises:
      UserError: a missing file or field, or another architecture.
    """
    path = Path(directory) / "config.json"
    raw = _read_json(path)
    if raw.get("model_type") != "qwen2":
        raise UserError(f"{path}: model_type is {raw.get('model_type')!r}, accepted: 'qwen2'")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{path}: rope_type is {rope.get('rope_type', rope.get('type'))!r}, accepted: 'default'")
    if raw.get("use_sliding_window"):
        raise UserError(f"{path}: use_sliding_window is true, accepted: false")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: hidden_act is {raw['hidden_act']!r}, accepted: 'silu'")
    eos = raw.get("eos_token_id")
    generation = Path(directory) / "generation_config.json"
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id", eos)
    try:
        heads = int(raw["num_attention_heads"])
        return Qwen2Config(
            vocab_rows=int(raw["vocab_size"]),
            width=int(raw["hidden_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads", heads)),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            mlp=int(raw["intermediate_size"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 32_768)),
            eos_ids=tuple(eos) if isinstance(eos, list) else (int(eos),) if eos is not None else (),
        )
    except KeyError as missing:
        raise UserError(f"{path}: field {missing} is missing") from None
    except UserError as error:  # the sizes contradict each other
        raise UserError(f"{path}: {error}") from None
    except (TypeError, ValueError):
        numbers = {k: raw[k] for k in _NUMBERS if k in raw and not isinstance(raw[k], int)}
        raise UserError(f"{path}: found {numbers or rope}, accepted: numbers") from None


def reachable(hub_id: str) -> bool:
    """Whether a hub id is in the local cache or its config.json can be fetched; costs one small download."""
    if hub_id.startswith((".", "/", "~")) or hub_id.count("/") != 1:
        return False
    from huggingface_hub import hf_hub_download  # a dependency of transformers

    try:
        hf_hub_download(hub_id, "config.json", etag_timeout=5)
    except Exception:  # the hub client raises a dozen kinds (offline, not found, no access); each means no
        return False
    return True


def resolve(path: str) -> str:
    """The local directory of a model: `path` itself, or the snapshot of a hub id (downloaded if it has to be).

    Raises:
      UserError: neither a directory nor a hub id that can be fetched.
    """
    if Path(path).is_dir():
        return path
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"config.model.path: {path!r} is not a directory, accepted: an HF directory or a hub id")
    from huggingface_hub import snapshot_download  # a dependency of transformers

    try:
        return snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt"])
    except Exception as error:  # the hub client raises a dozen kinds; each means the same to the user
        raise UserError(
            f"config.model.path: {path!r} is not a directory and could not be fetched from the hub "
            f"({type(error).__name__}); download it elsewhere with `hf download {path}` and give its directory"
        ) from error


def load_hf(
    directory: str | Path, shardings: Callable[[nnx.State], nnx.State] | None = None
) -> tuple[Qwen2Config, nnx.State]:
    """Loads float32 parameters from a directory.

    Args:
      shardings: from the abstract parameters to the NamedSharding of each; default: one device.

    Raises:
      UserError: a missing, unknown or wrongly shaped tensor, named with its file.
    """
    config = read_config(directory)
    _, abstract = qwen2.abstract_params(config)
    placement = shardings(abstract) if shardings else None
    reader = _Reader(Path(directory), config)
    wanted = dict(nnx.to_flat_state(abstract))
    places = dict(nnx.to_flat_state(placement)) if placement is not None else {}
    loaded = {}
    for path, hf_name, hf_axes, our_axes in TABLE:
        if path not in wanted:
            continue
        if "{i}" in hf_name:
            array = np.empty(wanted[path].shape, np.float32)
            for i in range(config.layers):
                array[i] = reader.take(hf_name.format(i=i), hf_axes, our_axes)
        else:
            array = reader.take(hf_name, hf_axes, our_axes)
        value = jax.device_put(array, places[path].get_value() if path in places else None)
        loaded[path] = wanted[path].replace(value)
    reader.refuse_unread(ignore=("lm_head.weight",) if config.tied else ())
    return config, nnx.from_flat_state(loaded)


def save_hf(
    params: nnx.State,
    config: Qwen2Config,
    tokenizer_directory: str | Path,
    out: str | Path,
    dtype: Any = np.float32,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a directory that transformers loads: weights, config, generation config and the tokenizer's files.

    Written beside and renamed, so that `out` is whole or absent.

    Raises:
      UserError: `out` exists, or there is no tokenizer in `tokenizer_directory`.
    """
    from safetensors.numpy import save_file

    out, tokenizer_directory = Path(out), Path(tokenizer_directory)
    if not any((tokenizer_directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(
            f"{tokenizer_directory}: no tokenizer.json or vocab.json found, accepted: a tokenizer directory"
        )
    if out.exists():
        raise UserError(f"{out}: exists already, accepted: a directory that is not there yet")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        shards: list[dict[str, np.ndarray]] = [{}]
        sizes, where = [0], {}
        numbers: list[tuple[str, int]] = []
        for name, array in _exported(params, config):
            array = np.ascontiguousarray(array.astype(dtype))
            if sizes[-1] and sizes[-1] + array.nbytes > shard_bytes:
                save_file(shards[-1], beside / f"part-{len(shards)}", metadata={"format": "pt"})
                shards[-1] = {}  # written: its memory is free again
                shards.append({})
                sizes.append(0)
            shards[-1][name] = array
            sizes[-1] += array.nbytes
            numbers.append((name, len(shards)))
        save_file(shards[-1], beside / f"part-{len(shards)}", metadata={"format": "pt"})
        total = len(shards)
        for number in range(1, total + 1):
            final = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            os.replace(beside / f"part-{number}", beside / final)
            where.update({name: final for name, n in numbers if n == number})
        if total > 1:
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
            _write_json(beside / "model.safetensors.index.json", index)
        for name in _TOKENIZER_FILES:
            if (tokenizer_directory / name).is_file():
                shutil.copy(tokenizer_directory / name, beside / name)
        _write_json(beside / "config.json", _hf_config(config, np.dtype(dtype).name))
        eos = list(config.eos_ids)
        _write_json(beside / "generation_config.json", {"do_sample": True} | ({"eos_token_id": eos} if eos else {}))
        beside.chmod(0o755)
        os.replace(beside, out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def _hf_config(config: Qwen2Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": config.vocab_rows,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # read by transformers 5
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_positions,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "eos_token_id": config.eos_ids[0] if config.eos_ids else None,
        "torch_dtype": dtype,
    }


def _sizes(config: Qwen2Config) -> dict[str, int]:
    return {
        "V": config.vocab_rows,
        "D": config.width,
        "N": config.heads,
        "K": config.kv_heads,
        "H": config.head_dim,
        "F": config.mlp,
    }


def _exported(params: nnx.State, config: Qwen2Config) -> Iterator[tuple[str, np.ndarray]]:
    flat = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    for path, hf_name, hf_axes, our_axes in TABLE:
        if path not in flat:
            continue
        order = [our_axes.index(letter) for letter in hf_axes.replace(".", "")]
        shape = [int(np.prod([_sizes(config)[c] for c in group])) for group in hf_axes.split(".")]
        count = config.layers if "{i}" in hf_name else 1
        for i in range(count):
            array = flat[path][i] if "{i}" in hf_name else flat[path]
            yield hf_name.format(i=i), np.asarray(jax.device_get(array)).transpose(order).reshape(shape)


class _Reader:
    """Tensors of a directory by name, one at a time, each checked against the shape that the config implies."""

    def __init__(self, directory: Path, config: Qwen2Config):
        from safetensors import SafetensorError, safe_open

        self._sizes = _sizes(config)
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise UserError(f"{index}: found weight_map {weight_map!r}, accepted: tensor names and their files")
            files = sorted({directory / name for name in weight_map.values()})
        else:
            files = [directory / "model.safetensors"]
        self._where = {}
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}: not found, accepted: safetensors weights")
            try:
                handle = safe_open(file, framework="flax")
            except SafetensorError as error:
                raise UserError(f"{file}: not a whole safetensors file ({error})") from None
            for name in handle.keys():
                self._where[name] = (file, handle)
        self._files, self._unread = files, set(self._where)

    def take(self, name: str, hf_axes: str, our_axes: str) -> np.ndarray:
        if name not in self._where:
            raise UserError(f"{self._files[0]}: tensor {name!r} is missing; it holds another architecture")
        file, handle = self._where[name]
        self._unread.discard(name)
        groups = hf_axes.split(".")
        expected = tuple(int(np.prod([self._sizes[c] for c in group])) for group in groups)
        found = tuple(handle.get_slice(name).get_shape())
        if found != expected:
            raise UserError(f"{file}: tensor {name!r} has shape {found}, config.json asks for {expected}")
        letters = hf_axes.replace(".", "")
        array = np.asarray(jnp.asarray(handle.get_tensor(name), jnp.float32))
        return array.reshape([self._sizes[c] for c in letters]).transpose([letters.index(c) for c in our_axes])

    def refuse_unread(self, ignore: tuple[str, ...]) -> None:
        rest = sorted(n for n in self._unread - set(ignore) if not n.endswith("rotary_emb.inv_freq"))
        if rest:
            raise UserError(f"{self._where[rest[0]][0]}: unknown tensor {rest[0]!r} ({len(rest)} in all)")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: not found") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: found a {type(value).__name__}, accepted: a JSON object")
    return value


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

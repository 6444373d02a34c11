"""Loads and writes Hugging Face directories, with one table of names for both directions.

A checkpoint is config.json, generation_config.json, tokenizer files and one or more safetensors files.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from psearch_jax.config import DecoderConfig, Lora
from psearch_jax.models import decoder
from psearch_jax.models import lora as adapters
from psearch_jax.models.tensors import Tensor, TensorReader, write_files
from psearch_jax.runtime import hub, progress
from psearch_jax.runtime.paths import TOY_POLICY, atomic_directory, check_new, locate, read_json
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
# By model_type: its class in transformers, and the fields of DecoderConfig that its config.json does not contain.
FAMILIES: dict[str, tuple[str, dict[str, bool]]] = {
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True, "qk_norm": False}),
    "qwen3": ("Qwen3ForCausalLM", {"qkv_bias": False, "qk_norm": True}),
}
_SHARD_BYTES = 4_500_000_000
_PIECE_BYTES = 2**26  # float32 bytes of a tensor that the host holds at a time while writing
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
)


def read_config(directory: str | Path) -> DecoderConfig:
    """Reads config.json (transformers 4 and 5 spell the rotary base differently) and generation_config.json.

    Raises:
      UserError: a missing file or field, or another architecture.
    """
    path = Path(directory) / "config.json"
    raw = read_json(path)
    family = raw.get("model_type")
    if family not in [*FAMILIES]:
        raise UserError(f"{path}: model_type is {family!r}, accepted: {', '.join(map(repr, FAMILIES))}")
    _, options = FAMILIES[family]
    rope: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):  # transformers applies the second where both are given
        values = raw.get(field) or {}
        if not isinstance(values, dict):
            raise UserError(f"{path}: {field} is {json.dumps(values)}, accepted: an object")
        kind = values.get("rope_type", values.get("type", "default"))
        if kind != "default":
            raise UserError(f"{path}: {field} has type {kind!r}, accepted: 'default', which scales no position")
        rope |= values
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f'{path}: layer_types is {json.dumps(kinds)}, accepted: a list of only "full_attention"')
    only = {"use_sliding_window": False, "hidden_act": "silu"}
    only |= {} if options["qkv_bias"] else {"attention_bias": False}
    for field, value in only.items():
        if raw.get(field) not in (None, value):
            raise UserError(f"{path}: {field} is {json.dumps(raw[field])}, accepted: {json.dumps(value)}")
    eos_ids = _eos_ids(path, raw)
    try:
        heads = int(raw["num_attention_heads"])
        return DecoderConfig(
            vocab_rows=int(raw["vocab_size"]),
            width=int(raw["hidden_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // max(1, heads)),
            mlp=int(raw["intermediate_size"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 32_768)),
            eos_ids=eos_ids,
            **options,
        )
    except KeyError as missing:
        raise UserError(f"{path}: field {missing} is missing") from None
    except UserError as error:  # the sizes contradict each other
        raise UserError(f"{path}: {error}") from None
    except (TypeError, ValueError, OverflowError):
        numbers = {k: raw[k] for k in _NUMBERS if k in raw and not _is_number(raw[k])}
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


def locate_recorded_model(path: str, name: str, file: str = "config.json") -> str | None:
    """Where to load the model whose directory `path` a checkpoint recorded: `path`, or if this machine lacks it, the
    `name` by which the model was requested (`toy`, a directory, or a hub id with `file`); None if neither exists."""
    if Path(path).is_dir():
        return path
    if name == "toy":
        return str(TOY_POLICY)
    return name if name and (Path(name).is_dir() or hub.reachable(name, file)) else None


def resolve(path: str) -> str:
    """The local directory of a model: `path` itself, or the snapshot of a hub id (downloaded if necessary).

    Raises:
      UserError: neither a directory nor a hub id that can be fetched.
    """
    if Path(path).is_dir():
        return path
    if not hub.is_hub_id(path):
        raise UserError(f"config.model.path: {path!r} is not a directory, accepted: an HF directory or a hub id")
    return hub.snapshot(path, ["*.json", "*.safetensors", "*.txt", "*.jinja"], "config.model.path")


def load_hf(
    directory: str | Path,
    shardings: Callable[[nnx.State], nnx.State] | None = None,
    dtype: Any = np.float32,
) -> tuple[DecoderConfig, nnx.State]:
    """Loads parameters from a directory directly onto their devices: the host holds one layer's tensor at a time.

    Args:
      shardings: from the abstract parameters to the NamedSharding of each; default: one device.
      dtype: of the loaded arrays.

    Raises:
      UserError: a missing, unknown or wrongly shaped tensor; the message names it and its file.
    """
    config = read_config(directory)
    _, abstract = decoder.abstract_params(config)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placement = shardings(abstract) if shardings else jax.tree.map(lambda _: here, abstract)
    reader = TensorReader(Path(directory))
    expected = {tensor.name: tensor.shape for tensor in tensors_of(config, lambda *_: ())}
    for name, shape in expected.items():  # before allocating arrays of the sizes in config.json
        reader.check(name, shape)
    reader.refuse_others(expected.keys() | ({"lm_head.weight"} if config.tied else set()))
    wanted, places = dict(nnx.to_flat_state(abstract)), dict(nnx.to_flat_state(placement))
    with progress.step("loading weights", len(wanted)):
        loaded = _load(reader, config, wanted, places, dtype)
    return config, nnx.from_flat_state(loaded)


def _load(
    reader: TensorReader,
    config: DecoderConfig,
    wanted: Mapping[tuple[str, ...], nnx.Variable],
    places: Mapping[tuple[str, ...], nnx.Variable],
    dtype: Any,
) -> dict[tuple[str, ...], nnx.Variable]:
    """The arrays of a directory by their paths in our parameters, each on its devices."""
    loaded = {}
    for path, hf_name, hf_axes, our_axes in TABLE:
        if path not in wanted:
            continue
        shape, place = wanted[path].shape, places[path].get_value()

        def read(name: str, shape: tuple[int, ...], sharding: Any, axes=(hf_axes, our_axes)) -> jax.Array:
            known: dict[Any, np.ndarray] = {}  # devices with the same part share one read

            def part(index: tuple[slice, ...]) -> np.ndarray:
                key = tuple((s.start, s.stop) for s in index)
                if key not in known:
                    known[key] = _part(reader, name, *axes, index, config).astype(dtype)
                return known[key]

            return jax.make_array_from_callback(shape, sharding, part)

        if "{i}" in hf_name:
            value = jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=place)()
            put = jax.jit(jax.lax.dynamic_update_index_in_dim, static_argnums=3, donate_argnums=0, out_shardings=place)
            one = NamedSharding(place.mesh, P(*place.spec[1:])) if isinstance(place, NamedSharding) else place
            for i in range(config.layers):
                value = jax.block_until_ready(put(value, read(hf_name.format(i=i), shape[1:], one), i, 0))
        else:
            value = read(hf_name, shape, place)
        loaded[path] = wanted[path].replace(value)
        progress.advance()
    return loaded


def _part(
    reader: TensorReader, name: str, hf_axes: str, our_axes: str, index: tuple[slice, ...], config: DecoderConfig
) -> np.ndarray:
    """The part of a tensor that `index` over our axes selects, in the order of our axes."""
    sizes = _sizes(config)
    groups = hf_axes.split(".")
    wanted = dict(zip(our_axes, index, strict=True))
    slices = []
    for group in groups:  # of merged axes only the first is ever split
        first, inner = group[0], math.prod(sizes[c] for c in group[1:])
        start, stop, _ = wanted[first].indices(sizes[first])
        slices.append(slice(start * inner, stop * inner))
        sizes[first] = stop - start
    letters = hf_axes.replace(".", "")
    array = reader.take(name, tuple(slices)).reshape([sizes[c] for c in letters])
    return array.transpose([letters.index(c) for c in our_axes])


def save_hf(
    params: nnx.State,
    config: DecoderConfig,
    tokenizer_directory: str | Path,
    out: str | Path,
    dtype: Any = np.float32,
    shard_bytes: int = _SHARD_BYTES,
    lora: Lora | None = None,
    files: Mapping[str, bytes] | None = None,
) -> float:
    """Writes a directory that transformers loads: weights, configs, the tokenizer's files, and a card (README.md).

    On a disk, it is written to a temporary directory and renamed, so that `out` is complete or absent. On an object
    store, config.json comes last: without it the directory is no model. The host holds one layer's tensor at a time.

    Args:
      lora: `params` contain adapters, which are merged into the weights one kernel at a time.
      files: further files, by name.

    Returns:
      With adapters: the error from rounding the merged kernels to `dtype`, relative to what the adapters add (norms
      over all kernels). Else 0.

    Raises:
      UserError: `out` exists, there is no tokenizer in `tokenizer_directory`, or the parameters are not those of
        `config`.
    """
    out, tokenizer_directory = locate(out), Path(tokenizer_directory)
    if not any((tokenizer_directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise UserError(
            f"{tokenizer_directory}: no tokenizer.json or vocab.json found, accepted: a tokenizer directory"
        )
    check_new(out)
    merge = _Merge(params, lora, dtype)
    tensors = list(_exported(merge, config))  # parameters of another shape are refused here
    with atomic_directory(out) as target:
        write_files(target, tensors, dtype, shard_bytes)
        for name in _TOKENIZER_FILES:
            if (tokenizer_directory / name).is_file():
                (target / name).write_bytes((tokenizer_directory / name).read_bytes())
        for name, content in (files or {}).items():
            (target / name).write_bytes(content)
        (target / "README.md").write_text(_card(merge, _family(config), dtype, bool(files)), encoding="utf-8")
        write_config(target, config, dtype)
    return merge.relative_error


class _Merge:
    """The arrays of an export by their paths, and the rounding error of the merged kernels."""

    def __init__(self, params: nnx.State, lora: Lora | None, dtype: Any):
        base, low = adapters.split_adapters(params)
        if (low is None) != (lora is None):
            raise ValueError("lora: needed if `params` contain adapters, and only then")
        self.lora, self._dtype = lora, jnp.dtype(dtype)
        self.values = {path: variable.get_value() for path, variable in nnx.to_flat_state(base)}
        self._low = {path[-1]: variable.get_value() for path, variable in nnx.to_flat_state(low or nnx.State({}))}
        self._lost = self._added = 0.0

    @property
    def relative_error(self) -> float:
        return math.sqrt(self._lost / self._added) if self._added else 0.0

    def pieces(self, path: tuple[str, ...], layer: int | None, hf_axes: str, our_axes: str) -> Iterator[np.ndarray]:
        """One tensor in pieces along its first axis, see `_pieces`."""
        value, name = self.values[path], path[-1]
        if self.lora and name in adapters.KERNELS:
            a, b = (self._low[f"{name}_{side}"] for side in "ab")
            value, lost, added = adapters.merged(value, a, b, layer, self.lora, self._dtype)
            self._lost, self._added, layer = self._lost + float(lost), self._added + float(added), None
        yield from _pieces(value, layer, hf_axes, our_axes)


def _card(merge: _Merge, family: str, dtype: Any, asked: bool) -> str:
    """The README.md of an export: what its user must know about the weights."""
    name, lora = jnp.dtype(dtype).name, merge.lora
    text = f"# A policy trained with psearch_jax\n\n{family} weights in {name}.\n"
    if asked:
        text += (
            "\n`launch/ask.py --model=DIR --index=INDEX` takes the settings of its training from psearch.json, such "
            "as the token budgets.\n"
        )
    if lora:
        text += (
            f"\nAdapters of rank {lora.rank} (alpha {lora.alpha:g}) were merged into every kernel of the layers in "
            f"float32, and the sums rounded to {name}. This rounding changed what the adapters add by a relative "
            f"error of {merge.relative_error:.2g} (norms over all kernels). The policy was trained and "
            "evaluated without it.\n"
        )
    return text


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def write_config(directory: Path, config: DecoderConfig, dtype: Any) -> None:
    """Writes generation_config.json and config.json."""
    eos = list(config.eos_ids)
    _write_json(directory / "generation_config.json", {"do_sample": True} | ({"eos_token_id": eos} if eos else {}))
    _write_json(directory / "config.json", _hf_config(config, np.dtype(dtype).name))


def _family(config: DecoderConfig) -> str:
    """The model_type of a shape."""
    fields = asdict(config).items()
    return next(name for name, (_, options) in FAMILIES.items() if options.items() <= fields)


def _hf_config(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    family = _family(config)
    return {
        "architectures": [FAMILIES[family][0]],
        "model_type": family,
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


def _sizes(config: DecoderConfig) -> dict[str, int]:
    return {
        "V": config.vocab_rows,
        "D": config.width,
        "N": config.heads,
        "K": config.kv_heads,
        "H": config.head_dim,
        "F": config.mlp,
    }


def tensors_of(config: DecoderConfig, pieces: Callable[..., Any]) -> Iterator[Tensor]:
    """The tensors of a checkpoint; `pieces(path, layer or None, shape)` yields one in pieces along its first axis."""
    sizes, shapes = _sizes(config), _shapes(config)
    for path, hf_name, hf_axes, _ in TABLE:
        if path not in shapes:
            continue
        shape = tuple(math.prod(sizes[c] for c in group) for group in hf_axes.split("."))
        for i in range(config.layers) if "{i}" in hf_name else (None,):
            yield Tensor(hf_name.format(i=i), shape, functools.partial(pieces, path, i, shape))


def _shapes(config: DecoderConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The shape of every parameter of a model, by its path."""
    return {path: variable.shape for path, variable in nnx.to_flat_state(decoder.abstract_params(config)[1])}


def _exported(merge: _Merge, config: DecoderConfig) -> Iterator[Tensor]:
    wanted, actual = _shapes(config), {path: value.shape for path, value in merge.values.items()}
    for path in wanted | actual:
        if actual.get(path) != wanted.get(path):
            shapes = f"found shape {actual.get(path)}, the config asks for {wanted.get(path)}"
            raise UserError(f"{'.'.join(path)}: {shapes}")
    axes = {path: (hf_axes, our_axes) for path, _, hf_axes, our_axes in TABLE}
    return tensors_of(config, lambda path, layer, _: merge.pieces(path, layer, *axes[path]))


def _pieces(array: jax.Array, layer: int | None, hf_axes: str, our_axes: str) -> Iterator[np.ndarray]:
    """One tensor with Hugging Face's axes, in pieces along its first axis that fit in host memory.

    Each piece is assembled from the devices' shards: slicing the global array would gather it on every device.
    """
    letters = hf_axes.replace(".", "")
    axis = our_axes.index(letters[0])
    lead = 0 if layer is None else 1
    shape = array.shape[lead:]
    rows = max(1, _PIECE_BYTES * shape[axis] // (4 * math.prod(shape)))
    for start in range(0, shape[axis], rows):
        stop = min(start + rows, shape[axis])
        piece = np.empty([stop - start if i == axis else n for i, n in enumerate(shape)], array.dtype)
        for shard in array.addressable_shards:
            index = [s.indices(n)[:2] for s, n in zip(shard.index[lead:], shape, strict=True)]
            first, last = max(start, index[axis][0]), min(stop, index[axis][1])
            if shard.replica_id or first >= last:
                continue
            data = _slice_rows(shard.data, layer, first - index[axis][0], last - first, axis)
            place = [slice(*bounds) for bounds in index]
            place[axis] = slice(first - start, last - start)
            piece[tuple(place)] = jax.device_get(data)
        yield piece.transpose([our_axes.index(c) for c in letters])


@functools.partial(jax.jit, static_argnames=("size", "axis"))
def _slice_rows(array: jax.Array, layer: int | None, start: int, size: int, axis: int) -> jax.Array:
    """`size` entries along `axis` from `start` on; of `layer`, if the array is stacked."""
    if layer is None:
        return jax.lax.dynamic_slice_in_dim(array, start, size, axis)
    starts, sizes = [layer] + [0] * (array.ndim - 1), [1, *array.shape[1:]]
    starts[axis + 1], sizes[axis + 1] = start, size
    return jax.lax.dynamic_slice(array, starts, sizes)[0]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Loads and writes Hugging Face directories.

A checkpoint is config.json, generation_config.json, tokenizer files and one or more safetensors files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora, find_family
from psearch_jax.models import decoder
from psearch_jax.models import lora as adapters
from psearch_jax.models.hf_config import read_config, tensor_table, write_config
from psearch_jax.models.lora import axis_sizes
from psearch_jax.models.tensors import Tensor, TensorReader, write_files
from psearch_jax.runtime import hub, progress
from psearch_jax.runtime.paths import TOYS, atomic_directory, check_new, locate
from psearch_jax.types import UserError

_SHARD_BYTES = 2_000_000_000  # of a file, which the host holds while it is written
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def locate_recorded_model(path: str, name: str, file: str = "config.json") -> str | None:
    """Where to load the model whose directory `path` a checkpoint recorded: `path`, or if this machine lacks it, the
    `name` by which the model was requested (`toy`, a directory, or a hub id with `file`); None if neither exists."""
    if Path(path).is_dir():
        return path
    if name in TOYS:
        return str(TOYS[name])
    return name if name and (Path(name).is_dir() or hub.reachable(name, file)) else None


def resolve(path: str, field: str = "config.model.path") -> str:
    """The local directory of a model: a policy that ships, `path` itself, or a hub id's snapshot (fetched if needed).

    Raises:
      UserError: neither a directory nor a hub id that can be fetched.
    """
    if path in TOYS:
        return str(TOYS[path])
    if Path(path).is_dir():
        return path
    if not hub.is_hub_id(path):
        raise UserError(f"{field}: {path!r} is not a directory, accepted: an HF directory or a hub id")
    return hub.snapshot(path, ["*.json", "*.safetensors", "*.txt", "*.jinja"], field)


def load_hf(
    directory: str | Path,
    shardings: Callable[[nnx.State], nnx.State] | None = None,
    dtype: Any = np.float32,
) -> tuple[DecoderConfig, nnx.State]:
    """Loads parameters from a directory directly onto their devices: the host holds one parameter at a time.

    Args:
      shardings: from the abstract parameters to the NamedSharding of each; default: one device.
      dtype: of the loaded arrays.

    Raises:
      UserError: a missing, unknown or wrongly shaped tensor; the message names it and its file.
    """
    config = read_config(directory)
    family = find_family(config)
    _, abstract = decoder.abstract_params(config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placement = shardings(abstract) if shardings else jax.tree.map(lambda _: device, abstract)
    reader = TensorReader(Path(directory))
    expected = {entry.name: entry.shape for entry in _entries(config)}
    for name, shape in expected.items():  # before allocating arrays of the sizes in config.json
        reader.check(name, shape)
    reader.refuse_others(expected.keys() | ({family.own_name("lm_head.weight")} if config.tied else set()))
    parameters, places = dict(nnx.to_flat_state(abstract)), dict(nnx.to_flat_state(placement))
    loaded = {}
    with progress.step("loading weights", len(parameters)):
        for path, *names in tensor_table(family):
            if path in parameters:
                read = functools.cache(functools.partial(_read_part, reader, config, *names, dtype))
                shape, sharding = parameters[path].shape, places[path].get_value()
                # Devices with the same part share one read; slices are hashable only from Python 3.12 on.
                array = jax.make_array_from_callback(
                    shape, sharding, lambda index, read=read: read(tuple((s.start, s.stop) for s in index))
                )
                loaded[path] = parameters[path].replace(jax.block_until_ready(array))
                progress.advance()
    return config, nnx.from_flat_state(loaded)


def _read_part(
    reader: TensorReader,
    config: DecoderConfig,
    hf_name: str,
    hf_axes: str,
    our_axes: str,
    dtype: Any,
    bounds: tuple[tuple[int | None, int | None], ...],
) -> np.ndarray:
    """The part of one of our parameters within `bounds`, (start, stop) of each axis; names as in `tensor_table`."""
    index = [slice(*pair) for pair in bounds]
    layers = range(config.layers)[index.pop(0)] if "{i}" in hf_name else (None,)
    sizes = axis_sizes(config)
    by_axis = dict(zip(our_axes, index, strict=True))
    slices = []
    for group in hf_axes.split("."):  # of merged axes only the first is ever split
        first, inner = group[0], math.prod(sizes[c] for c in group[1:])
        start, stop, _ = by_axis[first].indices(sizes[first])
        slices.append(slice(start * inner, stop * inner))
        sizes[first] = stop - start
    letters = hf_axes.replace(".", "")
    order = [letters.index(c) for c in our_axes]
    arrays = []
    for layer in layers:
        array = reader.take(hf_name.format(i=layer), tuple(slices)).reshape([sizes[c] for c in letters])
        arrays.append(array.transpose(order).astype(dtype))
    return np.stack(arrays) if "{i}" in hf_name else arrays[0]


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
    store, config.json comes last: without it the directory is no model. The host holds the tensors of one file.

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
    export = _Export(params, config, lora, dtype)
    with atomic_directory(out) as target:
        write_files(target, export.tensors, dtype, shard_bytes)
        for name in _TOKENIZER_FILES:
            if (tokenizer_directory / name).is_file():
                (target / name).write_bytes((tokenizer_directory / name).read_bytes())
        for name, content in (files or {}).items():
            (target / name).write_bytes(content)
        card = _card(find_family(config).model_type, dtype, lora, export.relative_error, bool(files))
        (target / "README.md").write_text(card, encoding="utf-8")
        write_config(target, config, dtype)
    return export.relative_error


class _Entry(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]  # in our parameters
    layer: int | None  # of our stacked array
    order: tuple[int, ...]  # the transposition from our axes to those of the tensor


def _entries(config: DecoderConfig) -> Iterator[_Entry]:
    """The tensors of a model's checkpoint."""
    sizes, parameters = axis_sizes(config), dict(nnx.to_flat_state(decoder.abstract_params(config)[1]))
    for path, hf_name, hf_axes, our_axes in tensor_table(find_family(config)):
        if path not in parameters:
            continue
        shape = tuple(math.prod(sizes[c] for c in group) for group in hf_axes.split("."))
        order = tuple(our_axes.index(c) for c in hf_axes if c != ".")
        for layer in range(config.layers) if "{i}" in hf_name else (None,):
            yield _Entry(hf_name.format(i=layer), shape, path, layer, order)


class _Export:
    """The tensors of an export, and the rounding error of the kernels merged so far."""

    def __init__(self, params: nnx.State, config: DecoderConfig, lora: Lora | None, dtype: Any):
        base, low = adapters.split_adapters(params)
        if (low is None) != (lora is None):
            raise ValueError("lora: needed if `params` contain adapters, and only then")
        self._lora, self._dtype = lora, jnp.dtype(dtype)
        self._values = {path: variable.get_value() for path, variable in nnx.to_flat_state(base)}
        self._low = {path[-1]: variable.get_value() for path, variable in nnx.to_flat_state(low or nnx.State({}))}
        self._lost = self._added = 0.0
        expected = {path: v.shape for path, v in nnx.to_flat_state(decoder.abstract_params(config)[1])}
        actual = {path: value.shape for path, value in self._values.items()}
        for path in expected | actual:
            if actual.get(path) != expected.get(path):
                shapes = f"found shape {actual.get(path)}, the config asks for {expected.get(path)}"
                raise UserError(f"{'.'.join(path)}: {shapes}")
        self.tensors = [Tensor(e.name, e.shape, functools.partial(self._compute, e)) for e in _entries(config)]

    @property
    def relative_error(self) -> float:
        return math.sqrt(self._lost / self._added) if self._added else 0.0

    def _compute(self, entry: _Entry) -> np.ndarray:
        value, name = self._values[entry.path], entry.path[-1]
        if self._lora and name in adapters.KERNELS:
            a, b = (self._low[f"{name}_{side}"] for side in "ab")
            value, lost, added = adapters.merge_kernel(value, a, b, entry.layer, self._lora, self._dtype)
            self._lost, self._added = self._lost + float(lost), self._added + float(added)
        elif entry.layer is not None:
            value = jax.lax.dynamic_index_in_dim(value, entry.layer, keepdims=False)
        return np.asarray(value).transpose(entry.order).reshape(entry.shape)


def _card(family: str, dtype: Any, lora: Lora | None, relative_error: float, has_settings: bool) -> str:
    """The README.md of an export: what its user must know about the weights."""
    name = jnp.dtype(dtype).name
    text = f"# A policy trained with psearch_jax\n\n{family} weights in {name}.\n"
    if has_settings:
        text += (
            "\n`launch/ask.py --model=DIR --index=INDEX` takes the settings of its training from psearch.json, such "
            "as the token budgets.\n"
        )
    if lora:
        text += (
            f"\nAdapters of rank {lora.rank} (alpha {lora.alpha:g}) were merged into every kernel of the layers in "
            f"float32, and the sums rounded to {name}. This rounding changed what the adapters add by a relative "
            f"error of {relative_error:.2g} (norms over all kernels). The policy was trained and evaluated without "
            "it.\n"
        )
    return text

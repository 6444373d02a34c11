"""Loads and writes Hugging Face directories.

A checkpoint is config.json, generation_config.json, tokenizer files and one or more safetensors files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
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
from psearch_jax.models.hf_config import TABLE, axis_sizes, find_family, read_config, write_config
from psearch_jax.models.tensors import Tensor, TensorReader, write_files
from psearch_jax.runtime import hub, progress
from psearch_jax.runtime.paths import TOY_POLICY, atomic_directory, check_new, locate
from psearch_jax.types import UserError

_SHARD_BYTES = 4_500_000_000
_PIECE_BYTES = 2**26  # float32 bytes of a tensor that the host holds at a time while writing


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
    sizes = axis_sizes(config)
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
        (target / "README.md").write_text(_card(merge, find_family(config), dtype, bool(files)), encoding="utf-8")
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
            value, lost, added = adapters.merge_kernel(value, a, b, layer, self.lora, self._dtype)
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


def tensors_of(config: DecoderConfig, pieces: Callable[..., Any]) -> Iterator[Tensor]:
    """The tensors of a checkpoint; `pieces(path, layer or None, shape)` yields one in pieces along its first axis."""
    sizes, shapes = axis_sizes(config), _shapes(config)
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

"""Safetensors directories: reads parts of tensors, and writes tensors one file at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.runtime.paths import read_json
from psearch_jax.types import UserError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    """A tensor whose values are computed when it is written."""

    name: str
    shape: tuple[int, ...]
    compute: Callable[[], np.ndarray]


def write_files(directory: Path, tensors: Iterable[Tensor], dtype: Any, file_bytes: int) -> None:
    """Writes tensors as one file, or as several with an index if one would be larger than `file_bytes`."""
    from safetensors.numpy import save

    dtype = np.dtype(dtype)
    files: list[list[Tensor]] = [[]]
    total = size = 0  # bytes of all files, and of the last one
    for tensor in tensors:
        added = math.prod(tensor.shape) * dtype.itemsize
        if size and size + added > file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        total, size = total + added, size + added
    weight_map = {}
    for number, members in enumerate(files, 1):
        several = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = several if len(files) > 1 else "model.safetensors"
        arrays = {tensor.name: np.ascontiguousarray(tensor.compute(), dtype) for tensor in members}
        (directory / name).write_bytes(save(arrays, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(arrays, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class TensorReader:
    """The tensors of a directory by name, from one file or from several with an index.

    Raises:
      UserError: a file is missing or incomplete.
    """

    def __init__(self, directory: Path):
        from safetensors import SafetensorError, safe_open

        index = directory / INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise UserError(f"{index}: found weight_map {weight_map!r}, accepted: tensor names and their files")
            for name in weight_map.values():  # a model must not name files elsewhere
                if not isinstance(name, str) or Path(name).name != name:
                    raise UserError(f"{index}: weight_map names {name!r}, accepted: files in the same directory")
            files = sorted({directory / name for name in weight_map.values()})
        else:
            files = [directory / "model.safetensors"]
        self._where = {}
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}: not found, accepted: safetensors weights")
            try:
                handle = safe_open(file, framework="np")
            except SafetensorError as error:
                raise UserError(f"{file}: not a complete safetensors file ({error})") from None
            for name in handle.keys():
                self._where[name] = (file, handle)
        self._directory, self._files = directory, files

    def check(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises UserError if the tensor does not exist or has another shape."""
        if name not in self._where:
            hint = "; with tie_word_embeddings the embedding takes its place" if name == "lm_head.weight" else ""
            raise UserError(
                f"{self._directory}: tensor {name!r} is in none of its {len(self._files)} safetensors files: "
                f"config.json describes another model, or weights are missing{hint}"
            )
        file, handle = self._where[name]
        shape = tuple(handle.get_slice(name).get_shape())
        if shape != expected:
            raise UserError(f"{file}: tensor {name!r} has shape {shape}, config.json asks for {expected}")

    def take(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part of a tensor at `index`; only that part is read."""
        return self._where[name][1].get_slice(name)[index]

    def refuse_others(self, expected: Collection[str]) -> None:
        """Raises UserError if there is a tensor that is not in `expected`."""
        rest = sorted(n for n in self._where if n not in expected and not n.endswith("rotary_emb.inv_freq"))
        if rest:
            raise UserError(f"{self._where[rest[0]][0]}: unknown tensor {rest[0]!r} ({len(rest)} in all)")

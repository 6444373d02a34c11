"""Safetensors directories: reads parts of tensors, writes streams of tensors, and never holds a full file in memory.

A file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and offsets of every
tensor), and the bytes of the tensors, one after the other.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from psearch_jax.runtime.paths import read_json
from psearch_jax.types import UserError

INDEX = "model.safetensors.index.json"
_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}


@dataclass(frozen=True)
class Tensor:
    """A tensor whose values are computed while it is written."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]  # its slices along the first axis, in order

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def write_tensors(path: Path, tensors: Sequence[Tensor], dtype: Any) -> None:
    """Writes one file, piece by piece."""
    dtype = np.dtype(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size * dtype.itemsize
        header[tensor.name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece, dtype).view(np.uint8).data)


def write_files(directory: Path, tensors: Iterable[Tensor], dtype: Any, file_bytes: int) -> None:
    """Writes tensors as one file, or as several with an index if one would be larger than `file_bytes`."""
    itemsize = np.dtype(dtype).itemsize
    files: list[list[Tensor]] = [[]]
    held = 0  # bytes of the last file
    for tensor in tensors:
        if held and held + tensor.size * itemsize > file_bytes:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += tensor.size * itemsize
    where, total = {}, len(files)
    for number, part in enumerate(files, 1):
        name = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        write_tensors(directory / name, part, dtype)
        where |= {tensor.name: name for tensor in part}
    if total > 1:
        size = itemsize * sum(tensor.size for part in files for tensor in part)
        index = {"metadata": {"total_size": size}, "weight_map": where}
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

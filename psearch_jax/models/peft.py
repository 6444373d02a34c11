"""Adapters as a directory in Hugging Face's PEFT format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora, find_family
from psearch_jax.models import hf_config, lora
from psearch_jax.runtime.paths import atomic_directory, check_new, locate, read_json, write_atomically
from psearch_jax.types import UserError, first_line

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


def save_adapters(
    adapters: nnx.State, config: DecoderConfig, adapter: Lora, base: str, out: str | Path, dtype: Any = jnp.float32
) -> None:
    """Writes adapters so that PEFT can load them with the base model; `out` is then complete or absent.

    Args:
      adapters: in the tree structure of `lora.abstract_adapters`.
      base: name or path of the base model, recorded for information.
      dtype: of the written arrays.

    Raises:
      UserError: `out` exists.
    """
    from safetensors.numpy import save

    out = locate(out)
    check_new(out)
    stacks = {path[-1]: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(adapters) if path[0] == "adapters"}
    tensors = {
        name: np.ascontiguousarray(stacks[array][layer].reshape(shape[::-1]).T, jnp.dtype(dtype))
        for name, array, layer, shape in _entries(config, adapter.rank)
    }
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in _module_names(config).values()}),
    }
    with atomic_directory(out) as target:
        write_atomically(target / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        write_atomically(target / CONFIG, json.dumps(record, indent=2) + "\n")


def read_shape(path: str | Path) -> Lora:
    """Rank and alpha of the adapters in a PEFT directory.

    Raises:
      UserError: there are none, or they are not plain LoRA.
    """
    path = locate(path)
    record = read_json(path / CONFIG)
    rank, alpha = record.get("r"), record.get("lora_alpha")
    numbers = isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0
    if record.get("peft_type") != "LORA" or not numbers:
        raise UserError(
            f"{path / CONFIG}: peft_type={record.get('peft_type')!r}, r={rank!r}, lora_alpha={alpha!r} found, "
            "accepted: LORA, a rank of at least 1, a number"
        )
    for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"):
        if record.get(name):
            raise UserError(f"{path / CONFIG}: {name}={record[name]!r} found, accepted: plain LoRA without it")
    return Lora(rank, float(alpha))


def load_adapters(path: str | Path, config: DecoderConfig) -> nnx.State:
    """The adapters of a PEFT directory, float32.

    Raises:
      UserError: as `read_shape`, or they are not on every kernel of this model's layers and on nothing else.
    """
    import safetensors

    path, adapter = locate(path), read_shape(path)
    stacks: dict[str, list[np.ndarray]] = {}
    try:
        with safetensors.safe_open(path / WEIGHTS, framework="np") as file:
            others = set(file.keys())
            for name, array, _, shape in _entries(config, adapter.rank):
                if name not in others:
                    raise UserError(f"{path / WEIGHTS}: no {name}, accepted: adapters on every kernel")
                others.discard(name)
                tensor = file.get_tensor(name)
                if tensor.shape != shape:
                    raise UserError(f"{path / WEIGHTS}: {name} has shape {tensor.shape}, accepted: {shape}")
                stacks.setdefault(array, []).append(tensor.astype(np.float32).T)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path / WEIGHTS}: cannot be read ({first_line(error)})") from None
    if others:
        raise UserError(f"{path / WEIGHTS}: {min(others)} found, accepted: adapters on the layers' kernels only")
    flat = nnx.to_flat_state(lora.abstract_adapters(config, adapter))
    return nnx.from_flat_state(
        {where: v.replace(jnp.asarray(np.stack(stacks[where[-1]]).reshape(v.shape))) for where, v in flat}
    )


def _entries(config: DecoderConfig, rank: int) -> Iterator[tuple[str, str, int, tuple[int, int]]]:
    """Of every tensor its name, our stacked array that contains it transposed, the layer, and the tensor's shape."""
    sizes, modules = lora.axis_sizes(config), _module_names(config)
    for kernel, axes in lora.KERNELS.items():
        for side, letters in zip("ab", axes, strict=True):
            size = math.prod(sizes[c] for c in letters)
            shape = (rank, size) if side == "a" else (size, rank)
            for layer in range(config.layers):
                name = f"{_PREFIX}{modules[kernel].format(i=layer)}.lora_{side.upper()}.weight"
                yield name, f"{kernel}_{side}", layer, shape


def _module_names(config: DecoderConfig) -> dict[str, str]:
    """The name in transformers of the module that owns each kernel, with `{i}` for the layer."""
    table = hf_config.tensor_table(find_family(config))
    return {path[-1]: name.removesuffix(".weight") for path, name, *_ in table if path[-1] in lora.KERNELS}

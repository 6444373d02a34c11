"""Adapters as a directory in Hugging Face's PEFT format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora
from psearch_jax.models import hf, lora
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
    flat = {path[-1]: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(adapters) if path[0] == "adapters"}
    tensors, sizes = {}, lora.axis_sizes(config)
    for kernel, (inner, outer) in lora.KERNELS.items():
        inputs, outputs = (math.prod(sizes[c] for c in axes) for axes in (inner, outer))
        a = flat[f"{kernel}_a"].reshape(config.layers, inputs, adapter.rank).swapaxes(1, 2)
        b = flat[f"{kernel}_b"].reshape(config.layers, adapter.rank, outputs).swapaxes(1, 2)
        for layer in range(config.layers):
            name = _PREFIX + module_name(kernel, layer)
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a[layer].astype(jnp.dtype(dtype)))
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b[layer].astype(jnp.dtype(dtype)))
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
        "target_modules": sorted({module_name(kernel, 0).rpartition(".")[2] for kernel in lora.KERNELS}),
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

    path, adapter, sizes = locate(path), read_shape(path), lora.axis_sizes(config)
    abstract, rank = lora.abstract_adapters(config, adapter), adapter.rank
    try:
        with safetensors.safe_open(path / WEIGHTS, framework="np") as file:
            names = set(file.keys())
            values = {}
            for kernel, axes in lora.KERNELS.items():
                for side, letters in zip("AB", axes, strict=True):
                    size = math.prod(sizes[c] for c in letters)
                    shape = (rank, size) if side == "A" else (size, rank)
                    layers = []
                    for layer in range(config.layers):
                        name = f"{_PREFIX}{module_name(kernel, layer)}.lora_{side}.weight"
                        if name not in names:
                            raise UserError(f"{path / WEIGHTS}: no {name}, accepted: adapters on every kernel")
                        names.discard(name)
                        tensor = file.get_tensor(name)
                        if tensor.shape != shape:
                            raise UserError(f"{path / WEIGHTS}: {name} has shape {tensor.shape}, accepted: {shape}")
                        layers.append(tensor.astype(np.float32).T)
                    values[f"{kernel}_{side.lower()}"] = np.stack(layers)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path / WEIGHTS}: cannot be read ({first_line(error)})") from None
    if names:
        raise UserError(f"{path / WEIGHTS}: {sorted(names)[0]} found, accepted: adapters on the layers' kernels only")
    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state(
        [(where, v.replace(jnp.asarray(values[where[-1]].reshape(v.shape)))) for where, v in flat]
    )


def module_name(kernel: str, layer: int) -> str:
    """The name in transformers of the module that owns a kernel."""
    (hf_name,) = (name for where, name, _, _ in hf.TABLE if where[-1] == kernel)
    return hf_name.format(i=layer).removesuffix(".weight")

"""BERT in Flax NNX, loaded from a Hugging Face directory.

Letters in shapes: B rows, T positions, D width, N heads, F mlp, V words, P learned positions,
Y token types, L layers. The layers are stacked
on a leading axis L and run by one `lax.scan`; one matrix product computes query, key and value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from retrieval.protocol import CorpusError, read_object

NUMBERS = {
    "vocab_rows": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
}


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder."""

    vocab_rows: int
    width: int
    layers: int
    heads: int
    mlp: int
    positions: int
    types: int
    norm_eps: float


class Bert(nnx.Module):
    """The encoder without its pooler. `__call__` returns the last hidden states."""

    def __init__(self, config: BertConfig, weights: dict[str, np.ndarray], dtype: Any = jnp.float32):
        """`weights`: the arrays of `weight_shapes(config)`. They are stored, and computed with, in `dtype`."""
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.weights = nnx.Dict({name: nnx.Param(jnp.asarray(value, dtype)) for name, value in weights.items()})

    def __call__(self, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        """Token ids [B, T] int32 and the number of real tokens per row [B] -> hidden states [B, T, D] in `dtype`."""
        c, w = self.config, {name: value[...] for name, value in self.weights.items()}
        B, T = ids.shape
        x = w["words"][ids] + w["positions"][:T] + w["types"][0]
        x = _layer_norm(x, w["embedding_scale"], w["embedding_bias"], c.norm_eps)

        def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            x = x.reshape(B * T, c.width)  # XLA's products of two-dimensional arrays are its fastest on a CPU
            qkv = _dense(x, p["qkv_kernel"], p["qkv_bias"]).reshape(B, T, 3, c.heads, c.width // c.heads)
            q, k, v = jnp.moveaxis(qkv, 2, 0)
            mixed = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths).reshape(B * T, c.width)
            out = _dense(mixed, p["out_kernel"], p["out_bias"])
            x = _layer_norm(x + out, p["attention_scale"], p["attention_bias"], c.norm_eps)
            hidden = _dense(x, p["up_kernel"], p["up_bias"])
            # GELU; jax.nn's erfc is slower on a CPU.
            hidden = hidden * 0.5 * (1 + jax.lax.erf(hidden * math.sqrt(0.5)))
            out = _dense(hidden, p["down_kernel"], p["down_bias"])
            x = _layer_norm(x + out, p["mlp_scale"], p["mlp_bias"], c.norm_eps)
            return x.reshape(B, T, c.width), None

        return jax.lax.scan(layer, x, {name: w[name] for name in LAYER_WEIGHTS})[0]


# Our name -> the letters of its shape, and its names in the file, with L in each layer. Kernels are transposed;
# the arrays of several names are concatenated.
WEIGHTS: dict[str, tuple[str, ...]] = {
    "words": ("V D", "embeddings.word_embeddings.weight"),
    "positions": ("P D", "embeddings.position_embeddings.weight"),
    "types": ("Y D", "embeddings.token_type_embeddings.weight"),
    "embedding_scale": ("D", "embeddings.LayerNorm.weight"),
    "embedding_bias": ("D", "embeddings.LayerNorm.bias"),
    "qkv_kernel": ("L D 3D", *(f"attention.self.{part}.weight" for part in ("query", "key", "value"))),
    "qkv_bias": ("L 3D", *(f"attention.self.{part}.bias" for part in ("query", "key", "value"))),
    "out_kernel": ("L D D", "attention.output.dense.weight"),
    "out_bias": ("L D", "attention.output.dense.bias"),
    "attention_scale": ("L D", "attention.output.LayerNorm.weight"),
    "attention_bias": ("L D", "attention.output.LayerNorm.bias"),
    "up_kernel": ("L D F", "intermediate.dense.weight"),
    "up_bias": ("L F", "intermediate.dense.bias"),
    "down_kernel": ("L F D", "output.dense.weight"),
    "down_bias": ("L D", "output.dense.bias"),
    "mlp_scale": ("L D", "output.LayerNorm.weight"),
    "mlp_bias": ("L D", "output.LayerNorm.bias"),
}
LAYER_WEIGHTS = tuple(name for name, (letters, *_) in WEIGHTS.items() if letters.startswith("L"))


def weight_shapes(c: BertConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every array of `Bert`."""
    sizes = {
        "V": c.vocab_rows,
        "P": c.positions,
        "Y": c.types,
        "L": c.layers,
        "D": c.width,
        "3D": 3 * c.width,
        "F": c.mlp,
    }
    return {name: tuple(sizes[letter] for letter in letters.split()) for name, (letters, *_) in WEIGHTS.items()}


def load_bert(directory: Path, dtype: Any = jnp.float32) -> Bert:
    """Read config.json and the safetensors files of `directory`.

    Raises:
      CorpusError: another architecture, or a file or an array that is missing or of another shape.
    """
    config = read_config(directory / "config.json")
    read, path = _open_weights(directory)
    weights = {}
    for ours, expected in weight_shapes(config).items():
        _, *names = WEIGHTS[ours]
        is_layer = ours in LAYER_WEIGHTS
        prefixes = [f"encoder.layer.{i}." for i in range(config.layers)] if is_layer else [""]
        arrays = [[read(prefix + name) for name in names] for prefix in prefixes]
        try:
            stacked = np.stack([np.concatenate([a.T if is_layer else a for a in parts], axis=-1) for parts in arrays])
        except ValueError as error:
            raise CorpusError(f"{path}: {names[0]} of some layer has another shape ({error})") from None
        weights[ours] = stacked if is_layer else stacked[0]
        if weights[ours].shape != expected:
            raise CorpusError(f"{path}: {ours} has shape {weights[ours].shape}, config.json says {expected}")
    return Bert(config, weights, dtype)


def read_config(path: Path) -> BertConfig:
    """Read config.json. Raises `CorpusError` naming a field that is missing or does not describe a BERT encoder."""
    raw = read_object(path)
    accepted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for field, value in accepted.items():
        if raw.get(field, value if field != "model_type" else None) != value:
            raise CorpusError(f"{path}: {field} is {raw.get(field)!r}, accepted: {value!r}")
    for field in NUMBERS.values():
        if not isinstance(raw.get(field), int) or raw[field] < 1:
            raise CorpusError(f"{path}: {field} is {raw.get(field, 'missing')!r}, expected an integer above 0")
    if raw["hidden_size"] % raw["num_attention_heads"]:
        raise CorpusError(
            f"{path}: num_attention_heads is {raw['num_attention_heads']}, which does not divide the width"
        )
    numbers = {ours: raw[theirs] for ours, theirs in NUMBERS.items()}
    eps = raw.get("layer_norm_eps", 1e-12)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise CorpusError(f"{path}: layer_norm_eps is {eps!r}, accepted: a number above 0 and below 1")
    return BertConfig(**numbers, norm_eps=float(eps))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of `directory`. Raises `CorpusError` when there are none."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise CorpusError(f"{directory}: has no model.safetensors; accepted: a BERT encoder saved as safetensors")
    return files


def _open_weights(directory: Path) -> tuple[Callable[[str], np.ndarray], Path]:
    """A function that reads an array by name as float32, and the first file. The files may prefix names by `bert.`."""
    sources: dict[str, Any] = {}
    files = weight_files(directory)
    for path in files:
        try:
            file = safe_open(path, "numpy")
        except (OSError, SafetensorError) as error:
            raise CorpusError(f"{path}: cannot be read ({error})") from None
        sources |= {name.removeprefix("bert."): (file, name) for name in file.keys()}

    def read(name: str) -> np.ndarray:
        if name not in sources:
            raise CorpusError(f"{files[0]}: {name} is missing")
        file, stored = sources[name]
        return np.asarray(file.get_tensor(stored), np.float32)

    return read, files[0]


def _dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Products of bfloat16 accumulate in float32, which is also the only fast way on CPUs with bfloat16 units."""
    return (jnp.matmul(x, kernel, preferred_element_type=jnp.float32) + bias).astype(x.dtype)


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (normal * scale + bias).astype(x.dtype)

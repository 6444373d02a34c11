"""The shapes of decoders and adapters, and the published shapes that `model.preset` names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from psearch_jax.types import UserError

MAX_SIZE = 2**31  # every size in a config.json must be below this


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder; models/hf.py maps the fields of config.json and lists the supported model families."""

    vocab_rows: int  # V, rows of the embedding; some may have no token
    width: int  # D
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    mlp: int  # F
    tied: bool  # the lm head is the transposed embedding
    rope_theta: float = 1_000_000.0
    rope_factor: float = 1.0  # of Llama 3's scaled rotary positions (models/layer.py, rope_cos_sin); 1: not scaled
    rope_low: float = 1.0  # turns over rope_positions below which a frequency is divided by rope_factor
    rope_high: float = 4.0  # turns above which a frequency is kept
    rope_positions: int = 8192  # positions of the training before the scaling
    rms_eps: float = 1e-6
    max_positions: int = 32_768
    bos_id: int | None = None  # only kept for exports: prompts come from the chat template
    eos_ids: tuple[int, ...] = ()  # from config.json and generation_config.json, if any
    qkv_bias: bool = True  # bias on the query, key and value projections (Qwen2.5)
    qk_norm: bool = False  # RMSNorm of queries and keys per head, before the rotary embedding (Qwen3)

    def __post_init__(self) -> None:
        sizes = ("vocab_rows", "width", "layers", "heads", "kv_heads", "head_dim", "mlp")
        for name in (*sizes, "max_positions", "rope_positions"):
            if not 0 < getattr(self, name) < MAX_SIZE:
                raise UserError(f"model: {name}={getattr(self, name)} found, accepted: 1 to {MAX_SIZE - 1}")
        for name in ("rope_theta", "rope_factor", "rope_low", "rope_high", "rms_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"model: {name}={getattr(self, name)} found, accepted: a number above 0")
        if self.rope_low >= self.rope_high:
            raise UserError(f"model: rope_low={self.rope_low} found, accepted: below rope_high={self.rope_high}")
        if self.heads % self.kv_heads:
            raise UserError(f"model: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"model: head_dim={self.head_dim} must be even (rotary embedding rotates pairs)")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: W + scale * a @ b instead of W."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def _qwen2(width: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool, vocab_rows: int) -> DecoderConfig:
    return DecoderConfig(vocab_rows, width, layers, heads, kv_heads, width // heads, mlp, tied)


def _qwen3(width: int, layers: int, heads: int, mlp: int, tied: bool) -> DecoderConfig:
    options = {"max_positions": 40_960, "qkv_bias": False, "qk_norm": True}
    return DecoderConfig(151_936, width, layers, heads, 8, 128, mlp, tied, **options)


def _llama(
    width: int, layers: int, heads: int, kv_heads: int, mlp: int, tied: bool, factor: float = 32.0
) -> DecoderConfig:
    options = {"rope_theta": 5e5, "rope_factor": factor, "rms_eps": 1e-5, "max_positions": 131_072, "qkv_bias": False}
    return DecoderConfig(128_256, width, layers, heads, kv_heads, width // heads, mlp, tied, **options)


def _smollm2(width: int, layers: int, heads: int, kv_heads: int, mlp: int, theta: float = 1e5) -> DecoderConfig:
    options = {"rope_theta": theta, "rms_eps": 1e-5, "max_positions": 8192, "qkv_bias": False}
    return DecoderConfig(49_152, width, layers, heads, kv_heads, width // heads, mlp, True, **options)


# Shapes from the published config.json files; `toy` is the policy that ships with the package.
PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(2048, 128, 4, 4, 2, 32, 384, tied=True, rope_theta=10_000.0, max_positions=2048),
    "tiny": DecoderConfig(152_064, 64, 2, 4, 2, 16, 128, tied=True),  # the real vocabulary with few weights
    "0.5b": _qwen2(896, 24, 14, 2, 4864, True, 151_936),
    "1.5b": _qwen2(1536, 28, 12, 2, 8960, True, 151_936),
    "3b": _qwen2(2048, 36, 16, 2, 11_008, True, 151_936),
    "7b": _qwen2(3584, 28, 28, 4, 18_944, False, 152_064),
    "14b": _qwen2(5120, 48, 40, 8, 13_824, False, 152_064),
    "32b": _qwen2(5120, 64, 40, 8, 27_648, False, 152_064),
    "72b": _qwen2(8192, 80, 64, 8, 29_568, False, 152_064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408, False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600, False),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, True),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, True),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14_336, False, 8.0),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28_672, False, 8.0),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 1.3e5),
}

"""The shapes of decoders and adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from psearch_jax.types import UserError

MAX_SIZE = 2**31  # every size in a config.json must be below this


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. families.py lists the model families; models/hf_config.py maps them to config.json."""

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
    # The model_type of exports, which changes no computation. "", as in records of older runs: see `find_family`.
    family: str = field(default="", compare=False)

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

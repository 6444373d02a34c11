"""The model families. One entry of `FAMILIES` declares everything that is particular to a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from psearch_jax.config.shapes import DecoderConfig
from psearch_jax.types import UserError


class Chat(NamedTuple):
    """A chat format."""

    stops: tuple[str, ...]  # tokens that end a message or a text
    assistant: str  # the text before a reply of the model


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers. "Fields" are those of config.json."""

    model_type: str
    hf_class: str  # in transformers
    options: Mapping[str, Any]  # of DecoderConfig, which config.json does not contain
    chats: tuple[Chat, ...] = ()  # the formats of the published models
    presets: Mapping[str, DecoderConfig] = field(default_factory=dict)  # published shapes; they get the options above
    hub_prefixes: tuple[str, ...] = ("",)  # what precedes a preset's name in hub ids, in lower case
    only: Mapping[str, Any] = field(default_factory=dict)  # accepted values of fields that change the computation
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that may be missing, as in transformers
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors and fields, where hf_config.py has others

    def __post_init__(self) -> None:
        presets = {name: replace(s, family=self.model_type, **self.options) for name, s in self.presets.items()}
        object.__setattr__(self, "presets", presets)

    def own_name(self, name: str) -> str:
        """Its name of a tensor, or of a field of config.json."""
        return self.names.get(name, name)


_CHATML = Chat(("<|im_end|>", "<|endoftext|>"), "<|im_start|>assistant")
_LLAMA3 = Chat(("<|eot_id|>", "<|end_of_text|>"), "<|start_header_id|>assistant<|end_header_id|>")
_LLAMA: dict[str, Any] = {"rms_eps": 1e-5, "max_positions": 131_072}
_SMOLLM2: dict[str, Any] = {"rms_eps": 1e-5, "max_positions": 8192}

# Shapes from the published config.json files: V, D, L, N, K, H, F, tied, rope_theta, rope_factor.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            {"qkv_bias": True, "qk_norm": False},
            (_CHATML,),
            {
                "0.5b": DecoderConfig(151_936, 896, 24, 14, 2, 64, 4864, True),
                "1.5b": DecoderConfig(151_936, 1536, 28, 12, 2, 128, 8960, True),
                "3b": DecoderConfig(151_936, 2048, 36, 16, 2, 128, 11_008, True),
                "7b": DecoderConfig(152_064, 3584, 28, 28, 4, 128, 18_944, False),
                "14b": DecoderConfig(152_064, 5120, 48, 40, 8, 128, 13_824, False),
                "32b": DecoderConfig(152_064, 5120, 64, 40, 8, 128, 27_648, False),
                "72b": DecoderConfig(152_064, 8192, 80, 64, 8, 128, 29_568, False),
            },
            hub_prefixes=("qwen2.5-", "qwen2-"),
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            {"qkv_bias": False, "qk_norm": True},
            (_CHATML,),
            {
                "qwen3-0.6b": DecoderConfig(151_936, 1024, 28, 16, 8, 128, 3072, True, max_positions=40_960),
                "qwen3-1.7b": DecoderConfig(151_936, 2048, 28, 16, 8, 128, 6144, True, max_positions=40_960),
                "qwen3-4b": DecoderConfig(151_936, 2560, 36, 32, 8, 128, 9728, True, max_positions=40_960),
                "qwen3-8b": DecoderConfig(151_936, 4096, 36, 32, 8, 128, 12_288, False, max_positions=40_960),
                "qwen3-14b": DecoderConfig(151_936, 5120, 40, 40, 8, 128, 17_408, False, max_positions=40_960),
                "qwen3-32b": DecoderConfig(151_936, 5120, 64, 64, 8, 128, 25_600, False, max_positions=40_960),
            },
            only={"attention_bias": False},
            defaults={"head_dim": 128},
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            {"qkv_bias": False, "qk_norm": False},
            (_LLAMA3, _CHATML),
            {
                "llama-3.2-1b": DecoderConfig(128_256, 2048, 16, 32, 8, 64, 8192, True, 5e5, 32.0, **_LLAMA),
                "llama-3.2-3b": DecoderConfig(128_256, 3072, 28, 24, 8, 128, 8192, True, 5e5, 32.0, **_LLAMA),
                "llama-3.1-8b": DecoderConfig(128_256, 4096, 32, 32, 8, 128, 14_336, False, 5e5, 8.0, **_LLAMA),
                "llama-3.1-70b": DecoderConfig(128_256, 8192, 80, 64, 8, 128, 28_672, False, 5e5, 8.0, **_LLAMA),
                "smollm2-135m": DecoderConfig(49_152, 576, 30, 9, 3, 64, 1536, True, 1e5, **_SMOLLM2),
                "smollm2-360m": DecoderConfig(49_152, 960, 32, 15, 5, 64, 2560, True, 1e5, **_SMOLLM2),
                "smollm2-1.7b": DecoderConfig(49_152, 2048, 24, 32, 32, 64, 8192, True, 1.3e5, **_SMOLLM2),
            },
            only={"attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
            defaults={"max_position_embeddings": 2048},
        ),
    )
}

# `toy` is the policy that ships with the package; `tiny` has the real vocabulary with few weights.
PRESETS: dict[str, DecoderConfig] = {
    "toy": DecoderConfig(2048, 128, 4, 4, 2, 32, 384, True, rope_theta=10_000.0, max_positions=2048, family="qwen2"),
    "tiny": DecoderConfig(152_064, 64, 2, 4, 2, 16, 128, True, family="qwen2"),
}
PRESETS |= {name: shape for family in FAMILIES.values() for name, shape in family.presets.items()}


def find_family(shape: DecoderConfig) -> Family:
    """The family that a shape records; if it records none, the first with its options. UserError if there is none."""
    for family in FAMILIES.values():
        if shape.family in ("", family.model_type) and family.options.items() <= asdict(shape).items():
            return family
    raise UserError(f"model: family={shape.family!r} with other options found, accepted: {', '.join(FAMILIES)}")

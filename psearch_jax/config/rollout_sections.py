"""The fields of a config that say how a policy is sampled: model, mesh, data, retrieval, rollouts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from psearch_jax.config.setting import Accepted, free, one_of, same_content, setting
from psearch_jax.config.shapes import PRESETS, Lora

Dtype = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "dots", "full"]


def _are_urls(text: str) -> bool:
    urls = (url.strip() for url in text.split(","))
    return not text or all(re.fullmatch(r"https?://[^/\s]+/\S*", url) for url in urls)


@dataclass(frozen=True)
class ModelSection:
    """Model weights, dtypes and memory options."""

    path: str = same_content(
        "", 'Hugging Face directory or hub id; "": random weights of `preset`; "toy": the toy policy of this package.'
    )
    preset: str = same_content("7b", "Shape for random weights, if `path` is empty.", accepted=one_of(PRESETS))
    tokenizer: str = same_content(
        "", 'Hugging Face tokenizer directory or hub id, or `toy`; "": the tokenizer at `path`.'
    )
    dtype: Dtype = setting("bfloat16", "Dtype of the training computation; the master weights are float32.")
    sampling_dtype: Dtype = setting(
        "bfloat16",
        "Dtype of the sampler's weights and KV cache. On a CPU, `sampling_dtype` and `dtype` apply only to matrix "
        "products with weights; activations and KV cache are float32.",
    )
    shard_residual: bool = free(
        False, "Training splits positions over the `tensor` axis between layers: less memory, more traffic."
    )
    remat: Remat = free(
        "full",
        "What the backward pass recomputes in each layer: `none`: nothing; `dots`: all but attention and the matrix "
        "products with weights; `full`: everything. Less recomputation is faster and needs more memory.",
    )
    lora_rank: int = setting(
        0,
        "Rank of LoRA adapters; 0: train all weights. With adapters, the base weights stay frozen in "
        "`sampling_dtype` and serve as the reference policy.",
        at_least=0,
    )
    lora_alpha: float = setting(32.0, "LoRA scaling: the adapters' output is multiplied by lora_alpha / lora_rank.")
    adapters: str = same_content(
        "",
        "PEFT directory of LoRA adapters to put on the weights of `path`; they bring their own rank and alpha. "
        "Training continues these adapters, and the reference policy includes them.",
    )

    @property
    def lora(self) -> Lora | None:
        return Lora(self.lora_rank, self.lora_alpha) if self.lora_rank else None


@dataclass(frozen=True)
class MeshSection:
    """How devices share the work. One of the three sizes of the training mesh may be -1: all remaining devices."""

    data: int = free(1, "Replicas of the training state, each with its own rows.")
    fsdp: int = free(-1, "Devices that share weights, optimizer state and rows.")
    tensor: int = free(1, "Devices over which heads, MLPs and vocabulary are split, in training and in sampling.")
    rollout_tensor: int = free(
        0,
        "`tensor` of the sampler: a divisor of `fsdp`, with a `tensor` of 1. Training is fastest with a small "
        "`tensor`; the sampler's weights are split over `tensor` only. 0: the same. Programs that do not train use "
        "this mesh alone.",
        at_least=0,
    )


@dataclass(frozen=True)
class DataSection:
    """Questions and their prompts."""

    source: str = same_content(
        "", 'Training questions: a question file, a directory made by launch/prepare_data.py, or "closed_world".'
    )
    validation: str = same_content("", "Questions for evaluation, never for training: a file or a prepared directory.")
    validation_share: float = setting(
        0.0,
        "Instead of `validation`: the share of `source` to hold out of training, chosen by a hash of (source, id).",
        at_least=0,
        below=1,
    )
    template: str = same_content(
        "parallel",
        "Prompt template: a packaged name, a file, or `row` for the chat messages stored with each question.",
    )
    world_names: Literal["known", "new"] = setting(
        "known", "Names in the closed world. `known`: cold starts contain them; `new`: no cold start does."
    )
    world_seed: int = setting(
        0, "Seed of the closed world; the run's own seed changes neither the world nor its evaluation.", at_least=0
    )
    world_questions: int = setting(6000, "Training questions drawn from the closed world.", at_least=1)

    @property
    def prompts_in_rows(self) -> bool:
        return self.template == "row"


@dataclass(frozen=True)
class RetrievalSection:
    """Where passages come from: at most one of `index`, `corpus` and `url`."""

    index: str = same_content("", "Index directory of launch/build_index.py.")
    corpus: str = same_content("", "Jsonl corpus that is encoded when the run starts; for small corpora only.")
    url: str = free(
        "",
        "Servers that speak Search-R1's /retrieve, replicas of one index separated by commas.",
        accepted=Accepted("http://host:port/retrieve", _are_urls),
    )
    timeout_s: float = free(60.0, "Seconds that a server may take for its complete answer.", above=0)
    retry_deadline_s: float = free(
        300.0, "Seconds that a run retries failing servers before it saves and stops.", at_least=0
    )
    token_file: str = free("", "File with the bearer token for the servers.")
    topk: int = setting(3, "Passages per sub-query.", at_least=1)
    max_sub_queries: int = setting(8, "Sub-queries that one search runs; further ones are ignored.", at_least=1)

    @property
    def passages(self) -> dict[str, str]:
        """The passages that the section names, by field: index, corpus or url; empty without any."""
        named = {"index": self.index, "corpus": self.corpus, "url": self.url}
        return {field: place for field, place in named.items() if place}


@dataclass(frozen=True)
class RolloutSection:
    """Number, length and sampling of rollouts."""

    slots: int = free(64, "Rollouts decoded at the same time; all rollouts of a step share these slots.", at_least=1)
    samples: int = setting(5, "Rollouts per question.", at_least=1)
    context_tokens: int = setting(6196, "Maximum tokens of a rollout, including prompt and passages.")
    prompt_tokens: int = setting(
        2048, "Maximum tokens of a prompt; the rollouts of a longer prompt end as `truncated`.", at_least=1
    )
    turn_tokens: int = setting(500, "Maximum tokens sampled in a turn.", at_least=1)
    obs_tokens: int = setting(1000, "Maximum tokens inserted after a search, over all its sub-queries.")
    search_turns: int = setting(4, "Turns in which the model may search; one answer turn follows.", at_least=0)
    temperature: float = setting(1.0, "Sampling temperature; the loss scores tokens at the same one.", above=0)
    top_p: float = setting(
        1.0,
        "Samples from the most likely tokens whose probabilities add up to this share; 1: from all tokens.",
        above=0,
        at_most=1,
    )
    top_k: int = setting(0, "Samples from this many most likely tokens; 0: from all tokens.", at_least=0)
    num_buckets: int = free(
        4, "Number of padded widths for prompts, passages and rows: fewer compile faster, more pad less.", at_least=1
    )
    overlap_search: bool = free(
        False,
        "Runs the searches of one yield while the other rows decode, and inserts the passages at the next yield. "
        "Useful when searching is slow: over HTTP, or in a large index.",
    )
    initial_search: bool = setting(False, "Searches for the question itself before the first sampled token.")

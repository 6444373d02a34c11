"""What the sampler keeps of every row between calls, what a row waits for, and the widths of the programs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax

from psearch_jax.models.kv_cache import KVCache


class Status(enum.IntEnum):
    """What a row waits for."""

    EMPTY = 0  # the slot holds no rollout
    RUNNING = 1  # samples on
    SEARCH = 2  # a search tag is complete: waits for its passages
    ANSWER = 3  # an answer tag is complete, and what the model wrote after it
    EOS = 4  # a stop id without an answer
    TURN_FULL = 5  # the turn's token budget is spent
    CONTEXT_FULL = 6  # no room for another id
    NOT_FINITE = 7  # a logit of the next id was a NaN or an infinity: nothing was sampled from it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    ids: jax.Array  # [B, S] int32; what lies past `length` is 0
    mask: jax.Array  # [B, S] bool, True where the id was sampled (the loss mask)
    logprobs: jax.Array  # [B, S] float32, of the sampled ids; 0 elsewhere
    cache: KVCache  # k, v [L, B, K, S, H]
    length: jax.Array  # [B] int32, ids known
    turn_left: jax.Array  # [B] int32, ids that may still be sampled in this turn
    budget_end: jax.Array  # [B] int32, the row stops when `length` reaches it; at most S
    automaton: jax.Array  # [B] int32, state of the tag automaton; its last row means: an answer is complete
    status: jax.Array  # [B] int32, a `Status`
    key: jax.Array  # [B, 2] uint32, the rollout's own random key
    steps: jax.Array  # [] int32, ids decoded so far for all rows at once


@dataclass(frozen=True)
class Widths:
    """The widths that the programs are compiled for, ascending."""

    prompts: tuple[int, ...]
    observations: tuple[int, ...]
    spans: tuple[int, ...]

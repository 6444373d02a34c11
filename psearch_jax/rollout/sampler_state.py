"""The sampler's state of every row between calls, the status of a row, and the widths of the programs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax

from psearch_jax.models.kv_cache import KVCache


class Status(enum.IntEnum):
    """What a row is doing, or why it stopped."""

    EMPTY = 0  # the slot holds no rollout
    RUNNING = 1  # being sampled
    SEARCH = 2  # a search tag is complete: waits for its passages
    ANSWER = 3  # a closing answer tag is complete, opened or not, and so are the tokens sampled after it
    EOS = 4  # a stop token without an answer
    TURN_FULL = 5  # the turn's token budget is spent
    CONTEXT_FULL = 6  # no room for another token
    NOT_FINITE = 7  # a logit of the next token was NaN or infinite: nothing was sampled from it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    ids: jax.Array  # [B, S] int32 token ids; 0 past `length`
    mask: jax.Array  # [B, S] bool, True where the token was sampled (the loss mask)
    logprobs: jax.Array  # [B, S] float32, of the sampled tokens; 0 elsewhere
    cache: KVCache  # its layout depends on the device
    length: jax.Array  # [B] int32, number of known tokens
    turn_left: jax.Array  # [B] int32, tokens that may still be sampled in this turn
    budget_end: jax.Array  # [B] int32, the row stops when `length` reaches it; at most S
    automaton: jax.Array  # [B] int32, state of the tag automaton; its last state means that an answer is complete
    status: jax.Array  # [B] int32, a `Status`
    key: jax.Array  # [B, 2] uint32, the rollout's own random key
    steps: jax.Array  # [] int32, decode steps so far, each of which samples a token for every running row
    row_steps: jax.Array  # [B] int32, of these, the steps in which the slot's row was running


@dataclass(frozen=True)
class Widths:
    """The widths that the programs are compiled for, ascending."""

    prompts: tuple[int, ...]
    observations: tuple[int, ...]
    spans: tuple[int, ...]

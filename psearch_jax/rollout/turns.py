"""From the tokens of a stopped row to its turn, and from the turn to what happens next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from psearch_jax.rollout.boundary import TOKENS_AFTER_ANSWER
from psearch_jax.rollout.rollouts import Rollout
from psearch_jax.rollout.sampler_programs import Status
from psearch_jax.text import tags
from psearch_jax.text.dialects import Dialect
from psearch_jax.types import Call, EndStatus, Turn


@dataclass(frozen=True)
class Search:
    """The row waits for the results of these calls."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Continue:
    """A corrective message follows; the model's next turn comes after it."""


@dataclass(frozen=True)
class End:
    """The rollout ends. A search of its last turn is neither run nor counted."""

    status: EndStatus


def decide(turn: Turn, status: Status, model_calls: int, search_turns: int, spent: bool) -> Continue | End | Search:
    """What follows a stopped row's turn.

    Args:
      status: why the row stopped.
      model_calls: earlier turns of the rollout in which the model sampled.
      search_turns: as in the config's section `rollout`.
      spent: whether the rollout may sample no further token.
    """
    if status == Status.ANSWER and turn.action == "answer":
        return End("answered")
    if status == Status.NOT_FINITE:
        return End("not_finite")
    if status == Status.CONTEXT_FULL or spent:
        return End("truncated")
    if model_calls == search_turns:
        return End("out_of_turns")
    return Search(turn.calls) if turn.action == "search" else Continue()


@dataclass(frozen=True)
class TurnParser:
    """A `ParseTurn` by the grammar of a dialect."""

    dialect: Dialect

    def __call__(self, rollout: Rollout, sampled: np.ndarray, status: Status) -> Turn:
        tokenizer, tokens = self.dialect.tokenizer, sampled
        if status == Status.NOT_FINITE:  # cut off at an arbitrary token: no search or answer counts
            return Turn(tokenizer.decode(tokens, control=True), "none", False, n_sampled=len(sampled))
        ended = len(tokens) > 0 and int(tokens[-1]) in tokenizer.stop_ids
        tokens = tokens[:-1] if ended else tokens
        # Write control tokens out: one inside a tag must break the tag for the parser, as it did for the automaton.
        text, tail_start = tokenizer.decode(tokens, control=True), None
        if status == Status.ANSWER:
            # The token that completes the tag is among the last few; its characters after the tag are not the tail.
            first = max(1, len(tokens) - TOKENS_AFTER_ANSWER - 1)
            prefixes = (tokenizer.decode(tokens[:n], control=True) for n in range(first, len(tokens) + 1))
            tail_start = next((len(prefix) for prefix in prefixes if tags.ANSWER_CLOSE in prefix), None)
        action = self.dialect.parse(text, tail_start, ended)
        known = action.queries, (), action.answer, len(sampled)
        return Turn(text, action.kind, action.well_formed, *known, tools=action.tools)

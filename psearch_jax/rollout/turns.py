"""From the tokens of a stopped row to its turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from psearch_jax.rollout.sampler_state import Status
from psearch_jax.text import tags
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question, Turn


@dataclass
class Rollout:
    """The rollout in a live slot."""

    order: int  # index among all rollouts that were added
    question: Question
    sample: int
    prompt_length: int
    turn_start: int  # position of the first token of the current turn
    turns: list[Turn] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # as Trajectory.versions

    @property
    def model_calls(self) -> int:
        return sum(t.n_sampled > 0 for t in self.turns)

    def sampled_from(self, position: int, version: int) -> None:
        """Records that tokens from this position on are sampled with the weights of a version."""
        if self.versions and self.versions[-1][0] == position:  # the version before sampled nothing
            self.versions.pop()
        self.versions.append((position, version))


ParseTurn = Callable[[Rollout, np.ndarray, Status], Turn]  # of the sampled tokens [n] and how they ended


@dataclass(frozen=True)
class TurnParser:
    """A `ParseTurn` by the tag grammar (text/tags.py).

    Args:
      max_sub_queries: of one search; further ones are ignored.
      max_tokens_after_answer: as the sampler's.
    """

    tokenizer: Tokenizer
    max_sub_queries: int
    max_tokens_after_answer: int

    def __call__(self, rollout: Rollout, sampled: np.ndarray, status: Status) -> Turn:
        tokenizer, tokens = self.tokenizer, sampled
        if status == Status.NOT_FINITE:  # cut off at an arbitrary token: no search or answer counts
            return Turn(tokenizer.decode(tokens, control=True), "none", False, n_sampled=len(sampled))
        if len(tokens) and int(tokens[-1]) in tokenizer.stop_ids:
            tokens = tokens[:-1]
        # Write control tokens out: one inside a tag must break the tag for the parser, as it did for the automaton.
        text, tail_start = tokenizer.decode(tokens, control=True), None
        if status == Status.ANSWER:
            # The token that completes the tag is among the last few; its characters after the tag are not the tail.
            first = max(1, len(tokens) - self.max_tokens_after_answer - 1)
            prefixes = (tokenizer.decode(tokens[:n], control=True) for n in range(first, len(tokens) + 1))
            tail_start = next((len(prefix) for prefix in prefixes if tags.ANSWER_CLOSE in prefix), None)
        action = tags.parse_turn(text, self.max_sub_queries, tail_start)
        kind = action.kind
        return Turn(text, kind, action.well_formed, action.queries, (), action.answer, len(sampled))

"""How a policy writes its actions and what the host writes after them: with the published tags, or as tool calls.

A dialect is one class here and one module with its grammar. Everything else is common: the sampler stops a row at the
strings that the dialect names, the host parses the turn, runs its calls, and appends what the dialect renders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from psearch_jax.text import tags, tool_calls
from psearch_jax.text.tags import Action, Observation
from psearch_jax.types import Call
from retrieval.protocol import Passage

if TYPE_CHECKING:
    from psearch_jax.text.tokenizer import Tokenizer

Rankings = Sequence[Sequence[Passage]]


@dataclass(frozen=True)
class Dialect(ABC):
    """What both dialects share, and the interface of a dialect.

    Args:
      obs_tokens: the budget of an observation.
      max_calls: of one turn.
      encode: text to token ids, never a control token; default: the tokenizer's `encode_foreign`.
      schemas: of the tools, as chat templates take them.

    Attributes:
      stops: the strings at which a row stops, as at a stop token, each with the action that it completes.
      corrective: what the host replies to a turn without an action.
      ends_calls: whether a turn with calls ends with a stop token.
    """

    stops: ClassVar[Mapping[str, str]]
    corrective: ClassVar[str]
    ends_calls: ClassVar[bool]

    tokenizer: Tokenizer
    obs_tokens: int
    max_calls: int = tags.MAX_SUB_QUERIES
    encode: Callable[[str], list[int]] | None = None
    schemas: Sequence[Mapping[str, Any]] = ()

    def encode_foreign(self, text: str) -> list[int]:
        """Token ids of untrusted text."""
        return self.encode(text) if self.encode else self.tokenizer.encode_foreign(text)

    def encode_reply(self, text: str, calls: bool) -> list[int]:
        """Token ids of a complete turn, as a rollout would have sampled them; `calls`: whether it has calls."""
        ids = self.encode(text) if self.encode else self.tokenizer.encode_reply(text)
        return ids if calls and not self.ends_calls else [*ids, self.tokenizer.reply_stop]

    @abstractmethod
    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a prompt."""

    @abstractmethod
    def parse(self, text: str, tail_start: int | None = None, ended: bool = True) -> Action:
        """The action of a turn.

        Args:
          tail_start: as in `tags.parse_turn`.
          ended: whether a stop token follows the text.
        """

    @abstractmethod
    def write_calls(self, calls: Sequence[Call]) -> str:
        """The text of calls, without the thought before them."""

    @abstractmethod
    def observe(
        self, calls: Sequence[Call], results: Rankings, budget: int | None = None, ended: bool = True
    ) -> Observation:
        """What follows a turn with calls.

        Args:
          results: of each call: passages, best first, or the text of another tool as one passage without a title.
          budget: the most tokens, at least `min_budget`; default: `obs_tokens`.
          ended: whether the turn ends with a stop token.
        """

    @abstractmethod
    def correct(self, ended: bool) -> list[int]:
        """What follows a turn without an action, at most the budget of an observation."""

    @cached_property
    @abstractmethod
    def min_budget(self) -> int:
        """The smallest budget that holds the frame of every observation and correction."""


@dataclass(frozen=True)
class Tags(Dialect):
    """The published dialect (text/tags.py)."""

    stops: ClassVar[Mapping[str, str]] = {tags.SEARCH_CLOSE: "search", tags.ANSWER_CLOSE: "answer"}
    corrective: ClassVar[str] = tags.CORRECTIVE_MESSAGE.strip()
    ends_calls: ClassVar[bool] = False

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.tokenizer.chat(messages)

    def parse(self, text: str, tail_start: int | None = None, ended: bool = True) -> Action:
        return tags.parse_turn(text, self.max_calls, tail_start)

    def write_calls(self, calls: Sequence[Call]) -> str:
        return tags.write_calls(calls)

    def observe(
        self, calls: Sequence[Call], results: Rankings, budget: int | None = None, ended: bool = True
    ) -> Observation:
        queries = [call.text for call in calls]
        return tags.render_observation(queries, results, self.encode_foreign, budget or self.obs_tokens)

    def correct(self, ended: bool) -> list[int]:
        return list(self._corrections[ended])

    @cached_property
    def _corrections(self) -> dict[bool, list[int]]:
        # If the model ended its reply, the correction is the next user message; otherwise it continues the reply.
        continued = self.tokenizer.encode_foreign(tags.CORRECTIVE_MESSAGE)[: self.obs_tokens]
        return {False: continued, True: self.tokenizer.next_user_message(self.corrective, self.obs_tokens)}

    @cached_property
    def min_budget(self) -> int:
        return max(tags.MIN_OBSERVATION_TOKENS, len(self.tokenizer.next_user_message("", 0)))


@dataclass(frozen=True)
class ToolCalls(Dialect):
    """Native tool calls (text/tool_calls.py): a turn ends with a stop token, and results are messages of tools."""

    # A model that begins a result itself is stopped there.
    stops: ClassVar[Mapping[str, str]] = {tool_calls.RESPONSE_OPEN: "search", tags.ANSWER_CLOSE: "answer"}
    corrective: ClassVar[str] = tool_calls.CORRECTIVE_MESSAGE
    ends_calls: ClassVar[bool] = True

    _frames: dict[int, list[list[int]]] = field(default_factory=dict)  # by the number of results

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.tokenizer.chat(messages, tools=self.schemas)

    def parse(self, text: str, tail_start: int | None = None, ended: bool = True) -> Action:
        action = tool_calls.parse_turn(text, self.max_calls, tail_start)
        return replace(action, well_formed=action.well_formed and (ended or action.kind == "answer"))

    def write_calls(self, calls: Sequence[Call]) -> str:
        return tool_calls.write_calls(calls)

    def observe(
        self, calls: Sequence[Call], results: Rankings, budget: int | None = None, ended: bool = True
    ) -> Observation:
        frame, stop = self._frame(len(calls)), [] if ended else [self.tokenizer.reply_stop]
        left = (budget or self.obs_tokens) - len(stop) - sum(map(len, frame))
        blocks, shown = tags.render_blocks([None] * len(calls), results, self.encode_foreign, max(0, left))
        pieces = [*frame[:1], *(piece for pair in zip(blocks, frame[1:], strict=True) for piece in pair)]
        return Observation(stop + [i for piece in pieces for i in piece], shown)

    def _frame(self, results: int) -> list[list[int]]:
        """The template's tokens around the contents of that number of results."""
        if results not in self._frames:
            self._frames[results] = self.tokenizer.after_reply(*["tool"] * results)
        return self._frames[results]

    def correct(self, ended: bool) -> list[int]:
        stop = [] if ended else [self.tokenizer.reply_stop]
        return stop + self.tokenizer.next_user_message(self.corrective, self.obs_tokens - len(stop))

    @cached_property
    def min_budget(self) -> int:
        frames = [sum(map(len, self._frame(self.max_calls))), len(self.tokenizer.next_user_message("", 0))]
        return max(frames) + 1  # a stop token, if the model wrote none

"""Rollouts in and out of the sampler's slots, and what they cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.rollout.sampler import Sampler, SamplerShapes
from psearch_jax.rollout.sampler_programs import RowArrays, Status
from psearch_jax.rollout.tools import Tool, Toolbox
from psearch_jax.text.dialects import Dialect
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Call, Question, Turn
from retrieval.protocol import Retriever


@dataclass(frozen=True)
class Row:
    """The row of a rollout on the host, of n tokens; with the rollout's key, everything that continues it."""

    ids: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool
    logprobs: np.ndarray  # [n] float32
    turn_left: int = 0
    automaton: int = 0


@dataclass(frozen=True)
class RolloutLimits:
    """Of one rollout, in addition to those of the settings, or instead of them."""

    search_turns: int | None = None
    max_tokens: int | None = None  # sampled ones, in all turns; only where there is one process


NO_LIMITS = RolloutLimits()


@dataclass
class Rollout:
    """A rollout in progress: waiting for a slot, in one, or suspended."""

    order: int  # index among all rollouts that were added; the question's index is order // samples
    question: Question
    sample: int
    prompt: list[int]
    key: np.ndarray  # [2] uint32, the data of its random key
    limits: RolloutLimits = NO_LIMITS
    turn_start: int = 0  # position of the first token of the current turn
    turns: list[Turn] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # as Trajectory.versions
    row: Row | None = None  # from a stop until the next turn begins, and while suspended

    @property
    def model_calls(self) -> int:
        return sum(t.n_sampled > 0 for t in self.turns)

    @property
    def tokens_left(self) -> float:
        """Tokens that may still be sampled in turns to come."""
        most = self.limits.max_tokens
        return math.inf if most is None else most - sum(t.n_sampled for t in self.turns)

    def number_calls(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """The calls of the last turn with their numbers in the rollout."""
        made = Counter(call.tool for turn in self.turns[:-1] for call in turn.calls)
        numbered = []
        for call in calls:
            numbered.append(call._replace(number=made[call.tool]))
            made[call.tool] += 1
        return tuple(numbered)

    def read_row(self) -> Row:
        """The row of a stopped or suspended rollout."""
        assert self.row is not None
        return self.row

    def from_prompt(self) -> Rollout:
        """The same rollout from its beginning."""
        fixed = self.order, self.question, self.sample, self.prompt, self.key, self.limits
        return Rollout(*fixed, len(self.prompt))

    def sample_from(self, position: int, version: int) -> None:
        """Records that tokens from this position on are sampled with the weights of a version."""
        if self.versions and self.versions[-1][0] == position:  # the version before sampled nothing
            self.versions.pop()
        self.versions.append((position, version))


ParseTurn = Callable[[Rollout, np.ndarray, Status], Turn]  # of the sampled tokens [n] and how they ended
Progress = Callable[[int, int], None]  # (trajectories done, trajectories in total), of this process


@dataclass(frozen=True, eq=False)
class Parts:
    """The components, settings and sizes that rollouts use."""

    sampler: Sampler
    tokenizer: Tokenizer
    retriever: Retriever | None  # None if the budgets allow no search
    render: Callable[[Question], list[int]]  # from a question to the token ids of its prompt
    rollout: RolloutSection
    retrieval: RetrievalSection
    dialect: Dialect
    parse_turn: ParseTurn
    shapes: SamplerShapes
    tools: tuple[Tool, ...] = ()  # besides the search

    def toolbox(self) -> Toolbox:
        """Runs calls of the search and of the other tools."""
        budget, timeout_s = self.rollout.tool_budget, self.rollout.tool_timeout_s
        return Toolbox(self.retriever, self.retrieval.topk, self.tools, budget, timeout_s)


@dataclass
class Usage:
    """The cost of rollouts, as the host counts it."""

    slots: int = 0  # of this process
    decode_steps: int = 0  # each for all slots
    row_steps: int = 0  # sum over this process's slots of the steps in which the row was running
    yields: int = 0
    prefilled: int = 0  # positions computed by `prefill`, pads included, for all processes
    extended: int = 0  # positions computed by `extend`, likewise
    refreshed: int = 0  # positions computed again with newer weights, likewise
    forced: int = 0  # of the extended ones, appended tokens
    tool_errors: int = 0  # failed calls, of this process
    tool_timeouts: int = 0  # calls of a tool that did not respond, of this process
    search_s: float = 0.0  # time in which this process waited for passages, and all rows with it
    host_s: float = 0.0  # time in which this process parsed turns and prepared what follows them

    def __add__(self, other: Usage) -> Usage:
        """The sum of both costs, over the same slots."""
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Usage(**total | {"slots": max(self.slots, other.slots)})

    @property
    def row_use(self) -> float:
        """The share of decoded rows that were running."""
        return self.row_steps / max(self.decode_steps * self.slots, 1)

    @property
    def extend_use(self) -> float:
        """The share of extended positions that hold an appended token."""
        return self.forced / max(self.extended, 1)

    def metrics(self) -> dict[str, float]:
        """Values for metrics.jsonl: those in `cost/` depend on slots, mesh and processes; `_s` marks seconds."""
        shares = {"row_use": self.row_use, "extend_use": self.extend_use}
        counts = {name: getattr(self, name) for name in ("decode_steps", "yields", "prefilled", "extended")}
        counts |= {name: n for name in ("refreshed", "tool_errors", "tool_timeouts") if (n := getattr(self, name))}
        costs = {f"cost/{name}": float(value) for name, value in (shares | counts).items()}
        return costs | {"search_s": self.search_s, "host_s": self.host_s}


def stack_rows(rollouts: Mapping[int, Rollout], rows: int, positions: int) -> tuple[RowArrays, np.ndarray, np.ndarray]:
    """Suspended rollouts by slot as the rows of all slots, with keys [B, 2] and lengths [B]; the rest are empty."""
    known = (np.zeros((rows, positions), dtype) for dtype in (np.int32, bool, np.float32))
    arrays = RowArrays(*known, np.zeros(rows, np.int32), np.zeros(rows, np.int32))
    keys, length = np.zeros((rows, 2), np.uint32), np.zeros(rows, np.int32)
    for slot, rollout in rollouts.items():
        row = rollout.read_row()
        n = length[slot] = len(row.ids)
        arrays.ids[slot, :n], arrays.mask[slot, :n], arrays.logprobs[slot, :n] = row.ids, row.mask, row.logprobs
        arrays.turn_left[slot], arrays.automaton[slot], keys[slot] = row.turn_left, row.automaton, rollout.key
    return arrays, keys, length

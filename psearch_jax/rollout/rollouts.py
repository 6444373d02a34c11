"""Rollouts in and out of the sampler's slots, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from psearch_jax.config import RetrievalSection, RolloutSection
from psearch_jax.rollout.sampler import Sampler, SamplerShapes
from psearch_jax.rollout.sampler_programs import RowArrays, Status
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question, Turn
from retrieval.protocol import Retriever


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
    stopped: RowArrays | None = None  # its row, from a stop until the next turn begins

    @property
    def model_calls(self) -> int:
        return sum(t.n_sampled > 0 for t in self.turns)

    @property
    def stopped_length(self) -> int:
        """The number of tokens of a stopped rollout."""
        assert self.stopped is not None
        return len(self.stopped.ids)

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
    rollout: RolloutSection
    retrieval: RetrievalSection
    parse_turn: ParseTurn
    shapes: SamplerShapes


@dataclass(frozen=True)
class Waiting:
    """A rollout that waits for a slot."""

    order: int  # the question's index is order // samples
    question: Question
    sample: int
    prompt: list[int]
    key: np.ndarray  # [2] uint32


@dataclass(frozen=True)
class Suspended:
    """A rollout that was taken out of its slot in the middle of a turn, with everything that continues it."""

    rollout: Rollout
    ids: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool
    logprobs: np.ndarray  # [n] float32
    key: np.ndarray  # [2] uint32
    turn_left: int
    automaton: int

    def from_prompt(self) -> Waiting:
        """The same rollout from its beginning."""
        r = self.rollout
        return Waiting(r.order, r.question, r.sample, self.ids[: r.prompt_length].tolist(), self.key)


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
        counts |= {"refreshed": self.refreshed} if self.refreshed else {}
        costs = {f"cost/{name}": float(value) for name, value in (shares | counts).items()}
        return costs | {"search_s": self.search_s, "host_s": self.host_s}


def stack_rows(suspended: Mapping[int, Suspended], rows: int, positions: int) -> tuple[RowArrays, np.ndarray]:
    """Suspended rollouts by slot as the rows of all slots, and their lengths [B]; the other slots are empty."""
    known = (np.zeros((rows, positions), dtype) for dtype in (np.int32, bool, np.float32))
    turn_left, automaton, length = (np.zeros(rows, np.int32) for _ in range(3))
    arrays = RowArrays(*known, turn_left, automaton, np.zeros((rows, 2), np.uint32))
    for slot, one in suspended.items():
        n = length[slot] = len(one.ids)
        arrays.ids[slot, :n], arrays.mask[slot, :n], arrays.logprobs[slot, :n] = one.ids, one.mask, one.logprobs
        turn_left[slot], automaton[slot], arrays.key[slot] = one.turn_left, one.automaton, one.key
    return arrays, length

"""The records that travel through the system, with the shape beside each field.

S is the number of ids of one trajectory, B rows of a batch (see docs/architecture.md for all letters).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from retrieval.protocol import Passage

Kind = Literal["parallel", "sequential", "single", "mixed"]
KINDS: tuple[Kind, ...] = ("parallel", "sequential", "single", "mixed")

# How a trajectory ended. `truncated`: the context was full; `out_of_turns`: no answer by the last turn;
# `eos`: with rollout.after_eos=end, the reply ended without a search or an answer; `not_finite`: a logit was a NaN or
# an infinity.
EndStatus = Literal["answered", "truncated", "out_of_turns", "eos", "not_finite"]
END_STATUSES: tuple[EndStatus, ...] = get_args(EndStatus)


class UserError(ValueError):
    """Bad input from the user: one line that names the file, field or flag, what was found and what is accepted.

    The programs in launch/ print it without a traceback and exit with code 2. Of several things at once (`listed`)
    each stands in a line of its own.
    """


def first_line(error: BaseException) -> str:
    """What a library's error says in its first line; its name where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


ITEM = "\n  - "  # begins each line of a list in the message of a UserError


def listed(headline: str, items: Iterable[str]) -> str:
    """The message of a `UserError` that names several things: a headline, and a line for each."""
    return ITEM.join([headline, *items])


@dataclass(frozen=True)
class Question:
    """One question; (source, id) identifies it everywhere: groups, keys, metrics."""

    source: str
    id: str
    text: str
    answers: tuple[str, ...]
    kind: Kind
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> bytes:
        """Which question it is, whatever it says: by this a share of questions is drawn."""
        return json.dumps([self.source, self.id]).encode()

    @property
    def query(self) -> str:
        """The text as a search query, on one line."""
        return " ".join(self.text.split())

    @property
    def contents(self) -> bytes:
        """All that a run or an evaluation takes of the question: what it adds to the fingerprint of a list."""
        told = [self.source, self.id, self.text, self.answers, self.kind, self.metadata.get("prompt")]
        return json.dumps(told).encode()


def digest(questions: Iterable[Question]) -> str:
    """SHA-256 of all that the questions say, in order."""
    sha256 = hashlib.sha256()
    for question in questions:
        sha256.update(question.contents)
    return sha256.hexdigest()


@dataclass(frozen=True)
class Turn:
    """One model call and what the host did with it."""

    text: str  # the sampled text, up to and with the token that ended the turn
    action: Literal["search", "answer", "none"]  # what the parser found
    well_formed: bool  # think, then one search or answer, nothing else
    queries: tuple[str, ...] = ()  # sub-queries that were run (empty: no search was executed)
    passages: tuple[tuple[Passage, ...], ...] = ()  # one tuple of passages per sub-query, best first
    answer: str | None = None  # content of the answer tag
    n_sampled: int = 0  # sampled ids in this turn


@dataclass(frozen=True)
class Trajectory:
    """One rollout: ids, loss mask and log-probs in lockstep, and the actions they stand for."""

    question: Question
    sample: int  # index within the question's group, 0 .. R-1
    status: EndStatus
    turns: tuple[Turn, ...]
    ids: np.ndarray  # [S] int32, prompt + sampled + observations
    mask: np.ndarray  # [S] bool, True where the id was sampled
    logprobs: np.ndarray  # [S] float32, of the sampled ids; 0 elsewhere
    prompt_length: int  # ids of the prompt

    @property
    def answer(self) -> str | None:
        """The final answer, or None when the trajectory has none."""
        return self.turns[-1].answer if self.turns else None

    @property
    def executed(self) -> tuple[Turn, ...]:
        """The searches that the model asked for and that were run, in order (an initial search is not the model's)."""
        return tuple(t for t in self.turns if t.queries and t.n_sampled > 0)

    @property
    def model_calls(self) -> int:
        """How often the model was called: one search and an answer are 2 (the paper's turns)."""
        return sum(t.n_sampled > 0 for t in self.turns)

    @property
    def decomposed(self) -> bool:
        """Whether the first executed search held two or more sub-queries (the d of the reward)."""
        return bool(self.executed) and len(self.executed[0].queries) >= 2

    @property
    def well_formed(self) -> bool:
        """Valid grammar: every turn well-formed, and the last one an answer."""
        return self.status == "answered" and all(t.well_formed for t in self.turns)


@dataclass(frozen=True)
class RewardParts:
    """The reward of one trajectory, by named part. `format` may be negative (a penalty on a right answer)."""

    outcome: float
    format: float
    decomposition: float
    search_count: float

    @property
    def total(self) -> float:
        """The scalar reward used for advantages."""
        return self.outcome + self.format + self.decomposition + self.search_count


@dataclass(frozen=True)
class TrainBatch:
    """What `update` sees. Position t of every [B, S] array speaks about ids[:, t] (predicted from ids[:, :t])."""

    ids: np.ndarray  # [B, S] int32, right-padded
    length: np.ndarray  # [B] int32, real ids per row (0: a padding row)
    mask: np.ndarray  # [B, S] float32, 1 where the id was sampled and is trained on
    advantage: np.ndarray  # [B, S] float32, of the sampled ids
    old_logprobs: np.ndarray  # [B, S] float32, by the trainer's weights before the first update of the batch
    ref_logprobs: np.ndarray  # [B, S] float32, by the frozen reference (zeros when the KL term is off)
    sampler_logprobs: np.ndarray  # [B, S] float32, as recorded while sampling
    values: np.ndarray  # [B, S] float32, by the critic before its first update of the batch (zeros without one)
    returns: np.ndarray  # [B, S] float32, what the critic is to learn


@dataclass(frozen=True)
class Packed:
    """A micro-batch: rows of one width that hold one or more trajectories, one behind the other.

    Fields of the same name are those of `TrainBatch`, moved to where a trajectory lies.
    """

    ids: np.ndarray  # [B, W] int32
    segments: np.ndarray  # [B, W] int32, which trajectory of its row an id belongs to: 1, 2, ..; 0: no real id
    positions: np.ndarray  # [B, W] int32, the id's place in its trajectory
    mask: np.ndarray  # [B, W] float32
    advantage: np.ndarray  # [B, W] float32
    old_logprobs: np.ndarray  # [B, W] float32
    ref_logprobs: np.ndarray  # [B, W] float32
    sampler_logprobs: np.ndarray  # [B, W] float32
    values: np.ndarray  # [B, W] float32
    returns: np.ndarray  # [B, W] float32

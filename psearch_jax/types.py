"""The shared data types, with the shape of each array field.

S is the number of tokens of a trajectory, B the number of rows of a batch (docs/architecture.md lists all letters).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from retrieval.protocol import Passage

Kind = Literal["parallel", "sequential", "single", "mixed"]
KINDS: tuple[Kind, ...] = ("parallel", "sequential", "single", "mixed")

# How a trajectory ended. `truncated`: the context was full; `out_of_turns`: no answer by the last turn;
# `not_finite`: a logit was NaN or infinite.
EndStatus = Literal["answered", "truncated", "out_of_turns", "not_finite"]
END_STATUSES: tuple[EndStatus, ...] = get_args(EndStatus)


class UserError(ValueError):
    """Bad input from the user: one line that names the file, field or flag, what was found and what is accepted.

    The programs in launch/ print it without a traceback and exit with code 2. A message about several items has one
    line for each (`format_items`).
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message; without a message, the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


ITEM = "\n  - "  # begins each line of a list in the message of a UserError


def format_items(headline: str, items: Iterable[str]) -> str:
    """The message of a `UserError` about several items: a headline and one line per item."""
    return ITEM.join([headline, *items])


@dataclass(frozen=True)
class Question:
    """One question; (source, id) identifies it in groups, random keys and metrics."""

    source: str
    id: str
    text: str
    answers: tuple[str, ...]
    kind: Kind
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> bytes:
        """(source, id) as bytes, without the content; validation questions are chosen by a hash of it."""
        return json.dumps([self.source, self.id]).encode()

    @property
    def query(self) -> str:
        """The text as a search query, on one line."""
        return " ".join(self.text.split())

    @property
    def contents(self) -> bytes:
        """Everything that a run or an evaluation uses of the question, for the fingerprint of a list of questions."""
        used = [self.source, self.id, self.text, self.answers, self.kind, self.metadata.get("prompt")]
        used += [self.metadata[name] for name in ("rounds", "evidences") if name in self.metadata]
        return json.dumps(used).encode()


def digest(questions: Iterable[Question]) -> str:
    """SHA-256 of the contents of the questions, in order."""
    sha256 = hashlib.sha256()
    for question in questions:
        sha256.update(question.contents)
    return sha256.hexdigest()


SEARCH = "search"  # the name of the tool that searches
# The ids of passages that report a failed call.
TOOL_ERROR, TOOL_TIMEOUT = "tool error", "tool timeout"


class Call(NamedTuple):
    """A call of a tool, by its name: a query of the search, or a JSON object with the arguments of another tool."""

    tool: str
    text: str
    number: int = 0  # of this tool's calls in the rollout, when it runs


def pair_calls(tools: Sequence[str], queries: Sequence[str]) -> tuple[Call, ...]:
    """The calls whose tools and texts are given; without tools, all are searches."""
    return tuple(map(Call, tools or (SEARCH,) * len(queries), queries))


@dataclass(frozen=True)
class Turn:
    """One model call and what the host did with it."""

    text: str  # the sampled text, including the token that ended the turn
    action: Literal["search", "answer", "none"]  # as parsed from the text
    well_formed: bool  # think, then one search or answer, nothing else
    queries: tuple[str, ...] = ()  # the executed sub-queries, or texts of calls (`calls`); empty without any
    passages: tuple[tuple[Passage, ...], ...] = ()  # one tuple of passages or results per sub-query, best first
    answer: str | None = None  # content of the answer tag
    n_sampled: int = 0  # tokens sampled in this turn
    # What the model was shown of `passages`: the last ones of a ranking may be cut or missing, and all of them are if
    # the context was full.
    shown: tuple[tuple[str, ...], ...] = ()
    tools: tuple[str, ...] = ()  # the tool of each of `queries`; empty if all are searches

    @property
    def calls(self) -> tuple[Call, ...]:
        """The executed calls: those of the search have its sub-queries."""
        return pair_calls(self.tools, self.queries)

    @property
    def executed(self) -> tuple[str, ...]:
        """Those of `queries` whose calls did not fail (no such tool, wrong arguments, an error of the tool).

        A call without a response in time counts as executed. Only executed calls can earn a bonus.
        """
        failed = {i for i, ranking in enumerate(self.passages) for p in ranking if p.id == TOOL_ERROR}
        return tuple(query for i, query in enumerate(self.queries) if i not in failed)

    @property
    def seen(self) -> tuple[tuple[Passage, str], ...]:
        """The passages that the model was shown, and what it was shown of each: its title and text, up to a cut."""
        rankings = zip(self.passages, self.shown, strict=False)
        return tuple(pair for ranking, texts in rankings for pair in zip(ranking, texts, strict=False))


@dataclass(frozen=True)
class Trajectory:
    """One rollout: aligned token ids, loss mask and log-probs, and the turns parsed from them."""

    question: Question
    sample: int  # index within the question's group, 0 .. R-1
    status: EndStatus
    turns: tuple[Turn, ...]
    ids: np.ndarray  # [S] int32, prompt + sampled + observations
    mask: np.ndarray  # [S] bool, True where the token was sampled
    logprobs: np.ndarray  # [S] float32, of the sampled tokens; 0 elsewhere
    prompt_length: int  # tokens of the prompt
    # (position, version), ascending: from each position on, tokens were sampled by the weights after `version` steps.
    versions: tuple[tuple[int, int], ...] = ()
    scripted: bool = False  # a transcript in the place of a rollout; its log-probs are 0, because no policy sampled it

    @property
    def answer(self) -> str | None:
        """The final answer, or None if the trajectory has none."""
        return self.turns[-1].answer if self.turns else None

    @property
    def executed(self) -> tuple[Turn, ...]:
        """The turns whose searches were executed, in order; an initial search is not the model's and not included."""
        return tuple(t for t in self.turns if t.executed and t.n_sampled > 0)

    @property
    def model_calls(self) -> int:
        """Number of turns that the model sampled, as the paper counts turns: a search and an answer are 2."""
        return sum(t.n_sampled > 0 for t in self.turns)

    @property
    def decomposed(self) -> bool:
        """Whether the first executed search had two or more sub-queries (d in the paper's reward)."""
        return bool(self.executed) and len(self.executed[0].executed) >= 2

    @property
    def well_formed(self) -> bool:
        """Valid format: every turn is well-formed, and the last one is an answer."""
        return self.status == "answered" and all(t.well_formed for t in self.turns)


@dataclass(frozen=True)
class RewardParts:
    """The terms of one trajectory's reward by name, in the order in which they are written, and their sum."""

    terms: Mapping[str, float]
    total: float  # the reward, from which advantages are computed


@dataclass(frozen=True)
class TrainBatch:
    """The input of `update`. Position t of every [B, S] array refers to ids[:, t], predicted from ids[:, :t]."""

    ids: np.ndarray  # [B, S] int32, right-padded
    length: np.ndarray  # [B] int32, tokens per row without padding (0: a padding row)
    mask: np.ndarray  # [B, S] float32, 1 where the token was sampled and is trained on
    advantage: np.ndarray  # [B, S] float32, of the sampled tokens
    # Under the trainer's weights before the first update on the batch; zeros if the loss needs none (`needs_score`).
    old_logprobs: np.ndarray  # [B, S] float32
    # Under the frozen reference; zeros when the KL term is off, rl.losses.NO_KL in rows that it leaves out (kl_to).
    ref_logprobs: np.ndarray  # [B, S] float32
    # As recorded while sampling; of a scripted trajectory those of the trainer, as in `old_logprobs`.
    sampler_logprobs: np.ndarray  # [B, S] float32
    values: np.ndarray  # [B, S] float32, from the critic before its first update on the batch (zeros without a critic)
    returns: np.ndarray  # [B, S] float32, the critic's targets


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: rows of one width, each with one or more consecutive trajectories.

    Fields with the names of `TrainBatch` fields have the same meaning, at the packed positions.
    """

    ids: np.ndarray  # [B, W] int32
    segments: np.ndarray  # [B, W] int32, number of the token's trajectory in its row: 1, 2, ..; 0: padding
    positions: np.ndarray  # [B, W] int32, position of the token in its trajectory
    mask: np.ndarray  # [B, W] float32
    advantage: np.ndarray  # [B, W] float32
    old_logprobs: np.ndarray  # [B, W] float32
    ref_logprobs: np.ndarray  # [B, W] float32
    sampler_logprobs: np.ndarray  # [B, W] float32
    values: np.ndarray  # [B, W] float32
    returns: np.ndarray  # [B, W] float32

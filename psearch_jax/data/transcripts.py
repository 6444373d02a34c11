"""Token rows for supervised fine-tuning: from a run's rollouts, or from transcripts. Transcripts as rollouts.

One JSON object per line, of either form:

rollout      a row of a run's `trajectories/*.jsonl` or of launch/sample.py: `ids` and `mask` are used as they are,
             without tokenizing again.
transcript   {"question": "...", "turns": [{"text": "<think> .. </think> <search> a ## b </search>",
             "passages": [[{"title": "..", "text": ".."}, ..], [..]]}, .., {"text": "<think> .. </think> <answer> ..
             </answer>"}]}. `passages` has one list per sub-query, best first. `"train": false` in a turn leaves it out
             of the loss. `prompt`, a list of chat messages, replaces the template if data.template=row. To take the
             place of a rollout (train.scripted), it needs the `source` and the `id` of its question.

The loss covers the model's own tokens: never a prompt, a passage or a corrective message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from psearch_jax.config import RolloutSection
from psearch_jax.runtime.paths import locate
from psearch_jax.text.dialects import Dialect
from psearch_jax.text.prompts import render_messages, render_prompt
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Call, Question, Trajectory, Turn, UserError, pair_calls
from retrieval.protocol import Passage

Row = tuple[np.ndarray, np.ndarray]  # token ids [S] int32, loss mask [S] bool
_ACCEPTED = "a rollout (ids, mask, turns) or a transcript (question, turns)"


@dataclass(frozen=True)
class TranscriptTurn:
    """One reply of the model, and the passages that its search returned."""

    text: str
    queries: tuple[str, ...] = ()  # sub-queries of its search, or texts of calls; empty: none
    passages: tuple[tuple[Passage, ...], ...] = ()  # one ranking per sub-query
    trained: bool = True  # whether the loss covers it
    tools: tuple[str, ...] = ()  # as in `Turn`

    @property
    def calls(self) -> tuple[Call, ...]:
        return pair_calls(self.tools, self.queries)


def encode_transcript(dialect: Dialect, prompt: Sequence[int], turns: Sequence[TranscriptTurn]) -> Row:
    """The token ids of a trajectory and its loss mask, in the layout of a rollout.

    Calls are followed by their observation, an answer by the stop token. Any other reply ends with the stop token and
    is followed by the corrective message. No observation or message follows the last turn.

    Args:
      prompt: token ids.
    """
    ids, mask = list(prompt), [False] * len(prompt)
    for i, turn in enumerate(turns):
        reply, last = dialect.encode_reply(turn.text, bool(turn.calls)), i == len(turns) - 1
        observed: list[int] = []
        if not last:
            observed = dialect.observe(turn.calls, turn.passages).ids if turn.calls else dialect.correct(True)
        ids += reply + observed
        mask += [turn.trained] * len(reply) + [False] * len(observed)
    return np.asarray(ids, np.int32), np.asarray(mask, bool)


def read_rows(path: str | Path, dialect: Dialect, template: str | None, rollout: RolloutSection) -> list[Row]:
    """The rows of a jsonl file, in order.

    Args:
      path: rollouts and transcripts, in any order.
      dialect: of the run.
      template: the prompt template of transcripts; None: each has its own `prompt` (data.template=row).
      rollout: the context length that a row must fit into.

    Raises:
      UserError: a file that is missing, empty or unreadable; or a row, named by its line, that is neither form, was
        written with another tokenizer, has nothing to learn from, or is longer than `rollout.context_tokens`.
    """
    rows = []
    for where, value in _read_lines(path):
        if isinstance(value, _Rollout):
            row = _rollout_row(value, dialect.tokenizer, where)
        else:
            row = encode_transcript(dialect, _prompt(value, dialect, template, where), _turns(value, dialect, where))
        rows.append(_check_row(row, rollout, where))
    if not rows:
        raise UserError(f"{path}: no rows found, accepted: jsonl, each line {_ACCEPTED}")
    return rows


def read_trajectories(
    path: str | Path,
    questions: Iterable[Question],
    render: Callable[[Question], list[int]],
    dialect: Dialect,
    rollout: RolloutSection,
) -> dict[bytes, Trajectory]:
    """The transcripts of a jsonl file, each as the last rollout of its question's group, by `Question.identity`.

    Their tokens are those of `encode_transcript`. Transcripts of other questions are left out.

    Args:
      questions: of the run.
      render: from a question to the token ids of its prompt.
      rollout: the budgets, and the size of a group.

    Raises:
      UserError: as `read_rows`; no transcript is of one of the questions; or a line is not the only transcript of its
        question, has another text of it, does not end with an answer, or has too many turns.
    """
    transcripts: dict[tuple[str, str], tuple[str, _Transcript]] = {}
    for where, value in _read_lines(path):
        if isinstance(value, _Rollout) or not (isinstance(value.source, str) and isinstance(value.id, str)):
            raise UserError(f"{where}: no source and id found, accepted: a transcript of launch/write_transcripts.py")
        before, _ = transcripts.setdefault((value.source, value.id), (where, value))
        if before != where:
            raise UserError(f"{where}: the question of {before} found again, accepted: one transcript per question")
    out: dict[bytes, Trajectory] = {}

    def parse(turn: TranscriptTurn) -> Turn:
        action, n_sampled = dialect.parse(turn.text), len(dialect.encode_reply(turn.text, bool(turn.calls)))
        shown = dialect.observe(turn.calls, turn.passages).shown if turn.calls else ()
        fields = turn.text, action.kind, action.well_formed, turn.queries, turn.passages, action.answer, n_sampled
        return Turn(*fields, shown, turn.tools)

    for question in questions:
        if len(out) == len(transcripts):
            break
        if (question.source, question.id) not in transcripts:
            continue
        where, transcript = transcripts[question.source, question.id]
        if transcript.question != question.text:
            raise UserError(f"{where}: field question: {transcript.question!r} found, accepted: {question.text!r}")
        prompt, turns = render(question), _turns(transcript, dialect, where)
        parsed = tuple(map(parse, turns))
        if parsed[-1].action != "answer" or len(parsed) > rollout.search_turns + 1:
            raise UserError(
                f"{where}: {len(parsed)} turns found, the last with action {parsed[-1].action}, accepted: an answer "
                f"after at most config.rollout.search_turns={rollout.search_turns} turns"
            )
        row = encode_transcript(dialect, prompt, turns)
        ids, mask = _check_row(row, rollout, where)
        known = ids, mask, np.zeros(len(ids), np.float32), len(prompt)
        out[question.identity] = Trajectory(question, rollout.samples - 1, "answered", parsed, *known, scripted=True)
    if not out:
        raise UserError(f"{path}: no transcript of a training question found, accepted: with the source and id of one")
    return out


def _read_lines(path: str | Path) -> Iterator[tuple[str, _Rollout | _Transcript]]:
    """The lines of a file that are not blank, each with its place for messages."""
    path = locate(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}), accepted: a jsonl file") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}: line {number}"
            yield where, _parse(line, where)


def _check_row(row: Row, rollout: RolloutSection, where: str) -> Row:
    ids, mask = row
    if not mask.any():
        raise UserError(f"{where}: no token to learn from, accepted: at least one turn that is trained on")
    if len(ids) > rollout.context_tokens:
        raise UserError(
            f"{where}: {len(ids)} tokens, accepted: at most config.rollout.context_tokens={rollout.context_tokens}"
        )
    return row


# ---- the fields of a line ----


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Passage(_Strict):
    id: str = ""
    title: str = ""
    text: str  # may be empty: a corpus may have passages of a title alone


class _Turn(_Strict):
    text: str = Field(pattern=r"\S")  # not blank
    passages: list[list[_Passage]] = []
    train: bool = True


class _Transcript(_Strict):
    source: Any = None  # these two, and the text of the question, for `read_trajectories`
    id: Any = None
    question: str = ""  # needed with a template
    prompt: Any = None  # needed without
    turns: list[_Turn] = Field(min_length=1)


class _SampledTurn(_Strict):
    text: str
    n_sampled: int


class _Rollout(_Strict):
    ids: list[int]
    mask: list[Annotated[bool, Field(strict=False)]]  # 0 or 1
    turns: list[_SampledTurn]


def _form(value: Any) -> str:
    return "rollout" if isinstance(value, dict) and "ids" in value else "transcript"


_LINE = TypeAdapter(
    Annotated[Annotated[_Rollout, Tag("rollout")] | Annotated[_Transcript, Tag("transcript")], Discriminator(_form)]
)


def _parse(line: bytes, where: str) -> _Rollout | _Transcript:
    try:
        return _LINE.validate_json(line)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        if error["type"] == "json_invalid":
            raise UserError(f"{where}: not JSON ({error['msg']}); accepted: {_ACCEPTED}") from None
        field, found = ".".join(map(str, error["loc"])) or "JSON", str(error["input"])[:60]
        raise UserError(f"{where}: {field}: {found!r} found: {error['msg']}; accepted: {_ACCEPTED}") from None


def _prompt(transcript: _Transcript, dialect: Dialect, template: str | None, where: str) -> list[int]:
    if template is None:
        try:
            return render_messages(dialect, transcript.prompt)
        except UserError as error:
            raise UserError(f"{where}: field {error}") from None
    if not transcript.question.strip():
        raise UserError(f"{where}: field question: {transcript.question!r} found, accepted: a text")
    return render_prompt(dialect, template, transcript.question)


def _turns(transcript: _Transcript, dialect: Dialect, where: str) -> list[TranscriptTurn]:
    turns = []
    for number, turn in enumerate(transcript.turns, 1):
        place, action = f"{where}: turn {number}", dialect.parse(turn.text)
        if action.kind == "answer" and number < len(transcript.turns):
            raise UserError(f"{place}: an answer found, accepted: an answer in the last turn only")
        close = next((stop for stop, kind in dialect.stops.items() if kind == action.kind), "")
        if close and (tail := turn.text.partition(close)[2].strip()):  # a rollout ends its turn there
            raise UserError(f"{place}: {tail[:40]!r} after {close} found, accepted: no text after it")
        if len(turn.passages) != len(action.queries):
            raise UserError(
                f"{place}: field passages: {len(turn.passages)} found, accepted: one list of passages for each of the "
                f"{len(action.queries)} sub-queries"
            )
        passages = tuple(tuple(Passage(p.id, p.title, p.text) for p in ranking) for ranking in turn.passages)
        turns.append(TranscriptTurn(turn.text, action.queries, passages, turn.train, action.tools))
    return turns


def _rollout_row(rollout: _Rollout, tokenizer: Tokenizer, where: str) -> Row:
    if len(rollout.ids) != len(rollout.mask):
        raise UserError(f"{where}: {len(rollout.ids)} ids and {len(rollout.mask)} mask values, accepted: equally many")
    if unknown := [i for i in rollout.ids if not 0 <= i < tokenizer.size]:  # perhaps too large for an array
        raise UserError(f"{where}: token id {unknown[0]} found, accepted: 0 to {tokenizer.size - 1}")
    ids, mask = np.asarray(rollout.ids, np.int32), np.asarray(rollout.mask, bool)
    if [turn.text for turn in rollout.turns if turn.n_sampled] != _sampled_texts(ids, mask, tokenizer):
        raise UserError(
            f"{where}: ids that do not spell the turns' texts found, accepted: rollouts of a model with the tokenizer "
            f"{tokenizer.name}"
        )
    return ids, mask


def _sampled_texts(ids: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The text of every run of consecutive sampled tokens, without its stop token."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    texts = []
    for start, end in edges.reshape(-1, 2):
        run = ids[start : end - 1] if int(ids[end - 1]) in tokenizer.stop_ids else ids[start:end]
        texts.append(tokenizer.decode(run, control=True))
    return texts

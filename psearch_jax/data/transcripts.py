"""Token rows for supervised fine-tuning: from a run's rollouts, or from transcripts written by hand.

One JSON object per line, of either form:

rollout      a row of a run's `trajectories/*.jsonl` or of launch/sample.py: `ids` and `mask` are used as they are,
             without tokenizing again.
transcript   {"question": "...", "turns": [{"text": "<think> .. </think> <search> a ## b </search>",
             "passages": [[{"title": "..", "text": ".."}, ..], [..]]}, .., {"text": "<think> .. </think> <answer> ..
             </answer>"}]}. `passages` has one list per sub-query, best first. `"train": false` in a turn leaves it out
             of the loss. `prompt`, a list of chat messages, replaces the template if data.template=row.

The loss covers the model's own tokens: never a prompt, a passage or a corrective message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.config import RolloutSection
from psearch_jax.runtime.paths import locate
from psearch_jax.text.prompts import render_messages, render_prompt
from psearch_jax.text.tags import (
    ANSWER_CLOSE,
    CORRECTIVE_MESSAGE,
    MAX_SUB_QUERIES,
    SEARCH_CLOSE,
    parse_turn,
    render_observation,
)
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import UserError
from retrieval.protocol import Passage

Row = tuple[np.ndarray, np.ndarray]  # token ids [S] int32, loss mask [S] bool
_ACCEPTED = "a rollout (ids, mask, turns) or a transcript (question, turns)"


@dataclass(frozen=True)
class TranscriptTurn:
    """One reply of the model, and the passages that its search returned."""

    text: str
    queries: tuple[str, ...] = ()  # sub-queries of its search; empty: no search
    passages: tuple[tuple[Passage, ...], ...] = ()  # one ranking per sub-query
    trained: bool = True  # whether the loss covers it


@dataclass(frozen=True)
class Observations:
    """How passages are rendered, from config section `rollout`."""

    tokens: int  # budget of one observation

    @classmethod
    def of(cls, rollout: RolloutSection) -> Observations:
        return cls(rollout.obs_tokens)

    def render(
        self, queries: Sequence[str], passages: Sequence[Sequence[Passage]], encode: Callable[[str], list[int]]
    ) -> list[int]:
        """The token ids that `render_observation` makes of the passages of one search."""
        return render_observation(queries, passages, encode, self.tokens)


def encode_transcript(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    turns: Sequence[TranscriptTurn],
    observations: Observations,
    encode: Callable[[str], list[int]] | None = None,
) -> Row:
    """The token ids of a trajectory and its loss mask, in the layout of a rollout.

    A search is followed by its observation, an answer by the stop token. Any other reply ends with the stop token and
    is followed by the corrective message. No observation or message follows the last turn.

    Args:
      prompt: token ids.
      encode: text to token ids, never a control token; default: the tokenizer's `encode_reply` for replies, and its
        `encode_foreign` for observations.
    """
    encode_reply, encode = encode or tokenizer.encode_reply, encode or tokenizer.encode_foreign
    stop = tokenizer.encode_trusted("<|im_end|>")
    ids, mask = list(prompt), [False] * len(prompt)
    for i, turn in enumerate(turns):
        reply, last = encode_reply(turn.text), i == len(turns) - 1
        observed: list[int] = []
        if not turn.queries:
            reply = reply + stop
            if not last:
                observed = tokenizer.next_user_message(CORRECTIVE_MESSAGE.strip(), observations.tokens)
        elif not last:
            observed = observations.render(turn.queries, turn.passages, encode)
        ids += reply + observed
        mask += [turn.trained] * len(reply) + [False] * len(observed)
    return np.asarray(ids, np.int32), np.asarray(mask, bool)


def read_rows(
    path: str | Path,
    tokenizer: Tokenizer,
    template: str | None,
    rollout: RolloutSection,
    max_sub_queries: int = MAX_SUB_QUERIES,
) -> list[Row]:
    """The rows of a jsonl file, in order.

    Args:
      path: rollouts and transcripts, in any order.
      template: the prompt template of transcripts; None: each has its own `prompt` (data.template=row).
      rollout: the observation budget, and the context length that a row must fit into.

    Raises:
      UserError: a file that is missing, empty or unreadable; or a row, named by its line, that is neither form, was
        written with another tokenizer, has nothing to learn from, or is longer than `rollout.context_tokens`.
    """
    path = locate(path)
    rows = []
    for where, value in _objects(path):
        if "ids" in value:
            row = _rollout_row(value, tokenizer, where)
        else:
            prompt = _prompt(value, tokenizer, template, where)
            turns = [
                _turn(turn, max_sub_queries, f"{where}: turn {n}") for n, turn in enumerate(_turns(value, where), 1)
            ]
            _check_order(turns, where)
            row = encode_transcript(tokenizer, prompt, turns, Observations.of(rollout))
        if not row[1].any():
            raise UserError(f"{where}: no token to learn from, accepted: at least one turn that is trained on")
        if len(row[0]) > rollout.context_tokens:
            raise UserError(
                f"{where}: {len(row[0])} tokens, accepted: at most config.rollout.context_tokens="
                f"{rollout.context_tokens}"
            )
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: no rows found, accepted: jsonl, each line {_ACCEPTED}")
    return rows


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line that is not blank."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}), accepted: a jsonl file") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
            raise UserError(f"{where}: not JSON ({error}), accepted: {_ACCEPTED}") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}: {type(value).__name__} found, accepted: {_ACCEPTED}")
        yield where, value


def _turns(value: Mapping[str, Any], where: str) -> list[Any]:
    turns = value.get("turns")
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: field turns: {str(turns)[:60]!r} found, accepted: a list of at least one turn")
    return turns


def _prompt(value: Mapping[str, Any], tokenizer: Tokenizer, template: str | None, where: str) -> list[int]:
    if template is None:
        try:
            return render_messages(tokenizer, value.get("prompt"))
        except UserError as error:
            raise UserError(f"{where}: field {error}") from None
    question = value.get("question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{where}: field question: {question!r} found, accepted: a text")
    return render_prompt(tokenizer, template, question)


def _turn(value: Any, max_sub_queries: int, where: str) -> TranscriptTurn:
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {str(value)[:60]!r} found, accepted: an object with a text")
    trained = value.get("train", True)
    if not isinstance(trained, bool):
        raise UserError(f"{where}: field train: {trained!r} found, accepted: true or false")
    action = parse_turn(text, max_sub_queries)
    queries, close = action.queries, {"search": SEARCH_CLOSE, "answer": ANSWER_CLOSE}.get(action.kind, "")
    if close and (tail := text.partition(close)[2].strip()):  # a rollout ends its turn there
        raise UserError(f"{where}: {tail[:40]!r} after {close} found, accepted: no text after it")
    rankings = value.get("passages", [])
    if not isinstance(rankings, list) or len(rankings) != len(queries):
        count = len(rankings) if isinstance(rankings, list) else str(rankings)[:60]
        raise UserError(
            f"{where}: field passages: {count!r} found, accepted: one list of passages for each of the "
            f"{len(queries)} sub-queries"
        )
    passages = tuple(tuple(_passage(p, where) for p in _list(ranking, where)) for ranking in rankings)
    return TranscriptTurn(text, queries, passages, trained)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where}: field passages: {str(value)[:60]!r} found, accepted: a list for each sub-query")
    return value


def _passage(value: Any, where: str) -> Passage:
    fields = [value.get(name, "") for name in ("id", "title", "text")] if isinstance(value, dict) else []
    texts = [field for field in fields if isinstance(field, str)]
    if len(texts) != 3 or not (texts[1] or texts[2]):  # a corpus may have passages of a title alone
        raise UserError(f"{where}: field passages: {str(value)[:60]!r} found, accepted: objects with title or text")
    return Passage(id=texts[0], title=texts[1], text=texts[2])


def _check_order(turns: Sequence[TranscriptTurn], where: str) -> None:
    for number, turn in enumerate(turns[:-1], 1):
        if parse_turn(turn.text).kind == "answer":
            raise UserError(f"{where}: turn {number}: an answer found, accepted: an answer in the last turn only")


def _rollout_row(value: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Row:
    ids, mask = (_integers(value, name, where) for name in ("ids", "mask"))
    if len(ids) != len(mask):
        raise UserError(f"{where}: {len(ids)} ids and {len(mask)} values of mask found, accepted: equally many")
    if unknown := [i for i in ids if not 0 <= i < tokenizer.size]:  # perhaps too large for an array
        raise UserError(f"{where}: token id {unknown[0]} found, accepted: 0 to {tokenizer.size - 1}")
    row = np.asarray(ids, np.int64), np.asarray(mask, bool)
    texts = [turn.get("text") for turn in _turns(value, where) if isinstance(turn, dict) and turn.get("n_sampled")]
    if texts != _sampled_texts(*row, tokenizer):
        raise UserError(
            f"{where}: ids that do not spell the turns' texts found, accepted: rollouts of a model with the tokenizer "
            f"{tokenizer.name}"
        )
    return row[0].astype(np.int32), row[1]


def _integers(value: Mapping[str, Any], name: str, where: str) -> list[int]:
    numbers = value.get(name)
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers):
        raise UserError(f"{where}: field {name}: {str(numbers)[:60]!r} found, accepted: a list of whole numbers")
    return numbers


def _sampled_texts(ids: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The text of every run of consecutive sampled tokens, without its stop token."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    texts = []
    for start, end in edges.reshape(-1, 2):
        run = ids[start : end - 1] if int(ids[end - 1]) in tokenizer.stop_ids else ids[start:end]
        texts.append(tokenizer.decode(run, control=True))
    return texts

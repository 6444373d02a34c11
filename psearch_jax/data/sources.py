"""Question files: FlashRAG's jsonl, and the parquet files of Search-R1 and ParallelSearch.

A jsonl row is `{"id", "question", "golden_answers": [..], "metadata": {"type": ..}}`. A parquet row has the columns
`data_source`, `prompt` (chat messages), `reward_model.ground_truth.target` and `extra_info` with `index` and `type`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psearch_jax.types import KINDS, Kind, Question, UserError

# The label a set gives its questions -> our kind. HotpotQA: comparison, bridge. 2WikiMultiHopQA: also inference,
# compositional, bridge_comparison. MultihopRAG: *_query. ParallelSearch writes `na` where a set has no labels.
KIND_OF_LABEL: dict[str, Kind] = {
    "comparison": "parallel",
    "comparison_query": "parallel",
    "bridge": "sequential",
    "inference": "sequential",
    "compositional": "sequential",
    "inference_query": "sequential",
    "bridge_comparison": "mixed",
    "na": "single",
    **{kind: kind for kind in KINDS},
}
UNLABELLED: Kind = "single"

# Where a prompt made by Search-R1's scripts puts the question.
_QUESTION_MARK = "Question:"
_PARQUET_COLUMNS = ("id", "question", "data_source", "prompt", "reward_model", "extra_info", "metadata")


def read_questions(path: str | Path, source: str | None = None) -> list[Question]:
    """All questions of a file, in its order.

    Args:
      path: `.parquet`, or jsonl under any other name.
      source: what the questions are named after, by default the file's stem; a parquet row's own `data_source` goes
        first, because the indices of a merged file start anew with each set.

    Returns:
      Questions whose metadata holds the row's own (numbers, strings and lists of strings; nested records such as
      whole paragraphs are left out), and under `prompt` the row's chat messages when it has them.

    Raises:
      UserError: one line with the file, the line and the field: a file that is missing, empty or unreadable, a row
        without question or answers, an unknown label, an id that came before.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file, accepted: FlashRAG jsonl or Search-R1 parquet")
    read, convert = (_parquet_rows, _from_parquet) if path.suffix == ".parquet" else (_jsonl_rows, _from_jsonl)
    questions: list[Question] = []
    seen: dict[tuple[str, str], str] = {}
    for where, row in read(path):
        question = convert(row, source, path.stem, where)
        key = (question.source, question.id)
        if key in seen:
            raise UserError(f"{where}: field id: {question.id!r} was already used in {seen[key]}")
        seen[key] = where
        questions.append(question)
    if not questions:
        raise UserError(f"{path}: no questions found, at least one row is needed")
    return questions


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
                if b"\\ud" in line.lower():  # an escaped half of a pair is text that nobody can write again
                    row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
            except ValueError as error:  # bad JSON or bad UTF-8
                raise UserError(f"{where}: not JSON ({error}), accepted: one object per line") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: {type(row).__name__} found, accepted: one object per line")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row, numbered from 1; only the columns that are read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow (pip install pyarrow)") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = [name for name in _PARQUET_COLUMNS if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(1024, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _from_jsonl(row: dict[str, Any], source: str | None, stem: str, where: str) -> Question:
    metadata = _record(row, "metadata", where)
    return Question(
        source=source or stem,
        id=_identifier(row.get("id"), "id", where),
        text=_text(row.get("question"), "question", where),
        answers=_answers(row.get("golden_answers"), "golden_answers", where),
        kind=_kind(metadata.get("type"), "metadata.type", where),
        metadata=_metadata(metadata, row.get("prompt"), where),
    )


def _from_parquet(row: dict[str, Any], source: str | None, stem: str, where: str) -> Question:
    extra, metadata = _record(row, "extra_info", where), _record(row, "metadata", where)
    label_field = "extra_info.type" if extra.get("type") else "metadata.type"
    label = extra.get("type") or metadata.get("type")
    truth = _record(_record(row, "reward_model", where), "ground_truth", where, "reward_model.")
    index_field, index = ("id", row.get("id")) if extra.get("index") is None else ("extra_info.index", extra["index"])
    return Question(
        source=row.get("data_source") or source or stem,
        id=_identifier(index, index_field, where),
        text=_text(row.get("question") or _question_in(row.get("prompt")), "question", where),
        answers=_answers(truth.get("target"), "reward_model.ground_truth.target", where),
        kind=_kind(label, label_field, where),
        metadata=_metadata(metadata, row.get("prompt"), where),
    )


def _record(row: dict[str, Any], field: str, where: str, prefix: str = "") -> dict[str, Any]:
    """The object under `field`; an absent one is empty."""
    value = row.get(field)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{where}: field {prefix}{field}: {_shown(value)} found, accepted: an object")
    return value or {}


def _identifier(value: Any, field: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise UserError(f"{where}: field {field}: {_shown(value)} found, accepted: a string or a whole number")
    return str(value)


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: field {field}: {_shown(value)} found, accepted: the question as a string")
    return value.strip()


def _answers(value: Any, field: str, where: str) -> tuple[str, ...]:
    answers = [value] if isinstance(value, str) else value
    usable = isinstance(answers, list) and answers and all(isinstance(a, str) and a.strip() for a in answers)
    if not usable:
        raise UserError(
            f"{where}: field {field}: {_shown(value)} found, accepted: one or more strings that are not empty"
        )
    return tuple(answers)


def _kind(label: Any, field: str, where: str) -> Kind:
    if label is None or label == "":
        return UNLABELLED
    if not isinstance(label, str) or label not in KIND_OF_LABEL:
        accepted = ", ".join(KIND_OF_LABEL)
        raise UserError(f"{where}: field {field}: {_shown(label)} found, accepted: {accepted}, or none")
    return KIND_OF_LABEL[label]


def _metadata(metadata: dict[str, Any], prompt: Any, where: str) -> dict[str, Any]:
    kept = {key: value for key, value in metadata.items() if _is_plain(value)}
    if prompt is None:
        return kept
    if not _is_chat(prompt):
        raise UserError(
            f"{where}: field prompt: {_shown(prompt)} found, accepted: chat messages with role and content"
        )
    return kept | {"prompt": [{"role": m["role"], "content": m["content"]} for m in prompt]}


def _is_plain(value: Any) -> bool:
    scalars = (str, int, float, bool)
    return isinstance(value, scalars) or (isinstance(value, list) and all(isinstance(v, scalars) for v in value))


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in prompt)
    )


def _question_in(prompt: Any) -> str | None:
    """The question inside the last message of a prompt: what follows the last `Question:`, or the whole message."""
    return prompt[-1]["content"].rsplit(_QUESTION_MARK, 1)[-1] if _is_chat(prompt) else None


def _shown(value: Any) -> str:
    """A found value, short enough for one line."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

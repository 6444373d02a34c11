"""Question files: FlashRAG's jsonl, the sets' own JSON, and the parquet files of Search-R1 and ParallelSearch.

jsonl        {"id", "question", "golden_answers": [..], "metadata": {"type": ..}}, or MuSiQue's own rows with `answer`
             and `answer_aliases`
JSON array   HotpotQA's and 2WikiMultiHopQA's own {"_id", "question", "answer", "type"}; MultiHop-RAG's
             {"query", "answer", "question_type"}, which has no ids: a question's index in the array is its id
jsonl        BrowseComp-Plus's decrypted {"query_id", "query", "answer"}
parquet      columns `data_source`, `prompt` (chat messages), `reward_model.ground_truth.target` and `extra_info` with
             `index` and `type`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from psearch_jax.data.kinds import KIND_OF_LABEL, MUSIQUE_GRAPHS, UNLABELLED, musique_graph
from psearch_jax.runtime.paths import locate
from psearch_jax.types import Kind, Question, UserError, first_line
from retrieval.protocol import as_utf8

# Precedes the question in a prompt made by Search-R1's scripts.
_QUESTION_MARK = "Question:"
_PARQUET_COLUMNS = ("id", "question", "data_source", "prompt", "reward_model", "extra_info", "metadata")
_ACCEPTED = "FlashRAG jsonl, a JSON array of questions, or Search-R1 parquet"

Seen = dict[tuple[str, str], str]  # (source, id) -> where it was read
Converter = Callable[[Any, str | None, str, str], Question]  # (row, source, file's stem, where)


def read_questions(path: str | Path, source: str | None = None, skipped: list[str] | None = None) -> list[Question]:
    """All questions of a file, in order; see `iter_questions`.

    Raises:
      UserError: as `iter_questions`, and if there are no questions.
    """
    questions = list(iter_questions(path, source, skipped))
    if not questions:
        raise UserError(f"{path}: no questions found, at least one row is needed")
    return questions


def iter_questions(
    path: str | Path, source: str | None = None, skipped: list[str] | None = None, seen: Seen | None = None
) -> Iterator[Question]:
    """Yields the questions of a file one by one, so that a large file is never in memory (except a JSON array).

    Args:
      path: `.parquet`, else a JSON array or jsonl, distinguished by the first character.
      source: the questions' source name, by default the file's stem. A parquet row's own `data_source` takes
        precedence, because the indices of a merged file restart with each set.
      skipped: receives one line per bad row; without it the first bad row is an error.
      seen: the ids read so far, for several files that are read as one.

    Yields:
      Questions with the row's own metadata (numbers, strings and lists of them; nested records such as full
      paragraphs are left out), plus `prompt`, the row's chat messages if it has them, and `graph`, the name of a
      MuSiQue question's graph.

    Raises:
      UserError: one line with the file, the line and the field: a file that is missing or unreadable, a row without
        question or answers, an unknown label, a duplicate id.
    """
    path = locate(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file, accepted: {_ACCEPTED}")
    rows: Iterator[tuple[str, Any]]
    convert: Converter
    if path.suffix == ".parquet":
        rows, convert = _parquet_rows(path), _from_parquet
    elif _is_array(path):
        rows, convert = _array_rows(path), from_json
    else:
        rows, convert = _lines(path), _from_line
    yield from collect_questions(rows, convert, source, path.stem, skipped, {} if seen is None else seen)


def collect_questions(
    rows: Iterator[tuple[str, Any]],
    convert: Converter,
    source: str | None,
    stem: str,
    skipped: list[str] | None,
    seen: Seen,
) -> Iterator[Question]:
    """Converts (where, row) pairs; bad rows and duplicate ids raise or are skipped."""
    for where, row in rows:
        try:
            question = convert(row, source, stem, where)
            key = (question.source, question.id)
            if key in seen:
                raise UserError(f"{where}: field id: {question.id!r} was already used in {seen[key]}")
        except UserError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
            continue
        seen[key] = where
        yield question


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(where, line) of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield f"{path}:{number}", line


def _from_line(line: bytes, source: str | None, stem: str, where: str) -> Question:
    try:
        row = loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 text (byte 0x{line[error.start]:02x} at {error.start}), accepted: UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}), accepted: one object per line") from None
    return from_json(row, source, stem, where)


def loads(text: str) -> Any:
    """Like `json.loads`, but replaces escaped lone surrogates, which cannot be encoded, by question marks."""
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        value = json.loads(as_utf8(json.dumps(value, ensure_ascii=False)))
    return value


def _array_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, element) of a JSON array, numbered from 1. A `query` element without an id gets its index, from 0."""
    try:
        elements = loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (at byte {error.start}), accepted: UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON array ({error}), accepted: {_ACCEPTED}") from None
    for number, element in enumerate(elements, 1):
        if isinstance(element, dict) and "query" in element and not {"id", "_id", "query_id"} & set(element):
            element = {**element, "id": number - 1}
        yield f"{path}: element {number}", element


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every row, numbered from 1, with the needed columns only."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow (pip install pyarrow)") from None
    try:
        with path.open("rb") as opened:
            file = pyarrow.parquet.ParquetFile(opened)
            columns = [name for name in _PARQUET_COLUMNS if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)})") from None


def from_json(row: Any, source: str | None, stem: str, where: str) -> Question:
    """The question in a row of jsonl or of an array, with FlashRAG's field names or the set's own."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: {type(row).__name__} found, accepted: an object")
    metadata = _record(row, "metadata", where)
    label_field = next((name for name in ("type", "question_type") if row.get(name)), "metadata.type")
    label = metadata.get("type") if label_field == "metadata.type" else row[label_field]
    text_field = "query" if "query" in row and "question" not in row else "question"
    answer_field = "answer" if "answer" in row and "golden_answers" not in row else "golden_answers"
    answers = _answers(row.get(answer_field), answer_field, where)
    if answer_field == "answer" and row.get("answer_aliases"):
        answers += _answers(row["answer_aliases"], "answer_aliases", where, needed=False)
    id_field = next((name for name in ("id", "_id", "query_id") if name in row), "id")
    graph = next(filter(None, map(musique_graph, (row.get("id"), metadata.get("id")))), None)
    # The original files of 2WikiMultiHopQA and HotpotQA have these outside of `metadata`.
    original = {
        "evidences": row.get("evidences"),
        "supporting_titles": _supporting_titles(row.get("supporting_facts")),
    }
    kept = _metadata({**original, **metadata}, row.get("prompt"), where)
    if label_field != "metadata.type":
        kept["type"] = label
    if graph:
        kept["graph"] = graph
    return Question(
        source=source or stem,
        id=_identifier(row.get(id_field), id_field, where),
        text=_text(row.get(text_field), text_field, where),
        answers=answers,
        kind=MUSIQUE_GRAPHS[graph].kind if graph and not label else _kind(label, label_field, where),
        metadata=kept,
    )


def _supporting_titles(facts: Any) -> list[str]:
    """The distinct titles of `supporting_facts`, a list of [title, sentence]."""
    pairs = facts if isinstance(facts, list) else []
    titles = [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]
    return list(dict.fromkeys(titles))


def _from_parquet(row: dict[str, Any], source: str | None, stem: str, where: str) -> Question:
    extra, metadata = _record(row, "extra_info", where), _record(row, "metadata", where)
    label_field = "extra_info.type" if extra.get("type") else "metadata.type"
    label = extra.get("type") or metadata.get("type")
    truth = _record(_record(row, "reward_model", where), "ground_truth", where, "reward_model.")
    index_field, index = ("id", row.get("id")) if extra.get("index") is None else ("extra_info.index", extra["index"])
    return Question(
        source=str(row.get("data_source") or source or stem),
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


def _answers(value: Any, field: str, where: str, needed: bool = True) -> tuple[str, ...]:
    """The answers that are not blank; some sets have blank aliases among good ones."""
    answers = [value] if isinstance(value, str) else value
    if isinstance(answers, list) and all(a is None or isinstance(a, str) for a in answers):
        kept = tuple(a for a in answers if a and a.strip())
        if kept or not needed:
            return kept
    raise UserError(f"{where}: field {field}: {_shown(value)} found, accepted: one or more strings, not all blank")


def _kind(label: Any, field: str, where: str) -> Kind:
    if label is None or label == "":
        return UNLABELLED
    if not isinstance(label, str) or label not in KIND_OF_LABEL:
        accepted = ", ".join(KIND_OF_LABEL)
        raise UserError(f"{where}: field {field}: {_shown(label)} found, accepted: {accepted}, or none")
    return KIND_OF_LABEL[label]


def _metadata(metadata: dict[str, Any], prompt: Any, where: str) -> dict[str, Any]:
    kept = {key: value for key, value in metadata.items() if _RESERVED.get(key, _is_plain)(value)}
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


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(text, str) for text in value)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _is_evidence(value: Any) -> bool:
    """Whether a value is a list of [entity, relation, value] triples, as in 2WikiMultiHopQA."""
    triples = value if isinstance(value, list) else [None]
    return all(isinstance(t, list) and len(t) == 3 and all(isinstance(part, str) for part in t) for t in triples)


# What the evaluation reads, and of which form; in another form the name means something else in that data set.
_RESERVED: dict[str, Callable[[Any], bool]] = {
    "chance": _is_share,
    "dependency": lambda value: isinstance(value, str),
    "evidences": _is_evidence,
    "graph": lambda value: isinstance(value, str),
    "rounds": lambda value: False,  # of questions that this project made; never read from a file
    "supporting_titles": _is_texts,
}


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in prompt)
    )


def _question_in(prompt: Any) -> str | None:
    """The question inside the last message of a prompt: what follows the last `Question:`, or the full message."""
    return prompt[-1]["content"].rsplit(_QUESTION_MARK, 1)[-1] if _is_chat(prompt) else None


def _shown(value: Any) -> str:
    """A value for an error message, short enough for one line."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

"""Question files: FlashRAG's jsonl, the sets' own JSON, and the parquet files of Search-R1 and ParallelSearch.

jsonl        {"id", "question", "golden_answers": [..], "metadata": {"type": ..}}, or MuSiQue's own rows with `answer`
             and `answer_aliases`
JSON array   HotpotQA's and 2WikiMultiHopQA's own {"_id", "question", "answer", "type"}; MultiHop-RAG's
             {"query", "answer", "question_type"}, which has no ids: a question's index in the array is its id
jsonl        BrowseComp-Plus's decrypted {"query_id", "query", "answer"}
parquet      the columns of these rows, or Search-R1's `data_source`, `prompt` (chat messages),
             `reward_model.ground_truth.target` and `extra_info` with `index` and `type`
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from psearch_jax.data.kinds import KIND_OF_LABEL, UNLABELLED, musique_kind
from psearch_jax.runtime.paths import locate
from psearch_jax.types import Kind, Question, UserError, first_line
from retrieval.protocol import Passage, as_utf8

# The fields that may contain a part of a question, in order of precedence; a dot leads into an object.
_IDS = ("extra_info.index", "id", "_id", "query_id")
_TEXTS = ("question", "query")
_ANSWERS = ("golden_answers", "answer", "reward_model.ground_truth.target")
_LABELS = ("type", "question_type", "extra_info.type", "metadata.type")
# Precedes the question in a prompt made by Search-R1's scripts.
_QUESTION_MARK = "Question:"
_OTHER_COLUMNS = ("data_source", "prompt", "metadata", "answer_aliases", "evidences", "supporting_facts")
_PARQUET_COLUMNS = {field.partition(".")[0] for field in (*_IDS, *_TEXTS, *_ANSWERS, *_LABELS, *_OTHER_COLUMNS)}
_ACCEPTED = "FlashRAG jsonl, a JSON array of questions, or parquet"
_BOM = b"\xef\xbb\xbf"
# What precedes an element of a JSON array, or, as a group, the end of the array.
_BEFORE_FIRST, _BEFORE_NEXT = re.compile(r"\s*\[\s*(\]\s*)?"), re.compile(r"\s*(?:,\s*|(\]\s*))")
# Bytes of an array that are read at a time, and characters that an element may have.
_CHUNK, _LONGEST_ELEMENT = 1 << 20, 1 << 26

Seen = dict[tuple[str, str], str]  # (source, id) -> where it was read


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
    """Yields the questions of a file one by one, so that a large file is never in memory.

    Args:
      path: `.parquet`, else a JSON array or jsonl, distinguished by the first character.
      source: the questions' source name, by default the file's stem. A row's own `data_source` takes precedence,
        because the indices of a merged file restart with each set.
      skipped: receives one line per bad row; without it the first bad row is an error.
      seen: the ids read so far, for several files that are read as one.

    Yields:
      Questions with the row's own metadata (numbers, strings and lists of them; nested records such as full
      paragraphs are left out), plus `prompt`, the row's chat messages if it has them.

    Raises:
      UserError: one line with the file, the line and the field: a file that is missing or unreadable, a row without
        question or answers, an unknown label, a duplicate id.
    """
    yield from convert_rows(_rows(path), source or locate(path).stem, skipped, {} if seen is None else seen)


def iter_contexts(paths: Iterable[str | Path]) -> Iterator[Passage]:
    """The distinct paragraphs in the `context` of HotpotQA's and 2WikiMultiHopQA's own rows, as a corpus.

    Yields:
      Passages by the first occurrence of their title and text; ids count from 0. Titles are as in `supporting_facts`.

    Raises:
      UserError: as `iter_questions`, a row without `context`, or no paragraph in any file.
    """
    digests: set[bytes] = set()  # of title and text, which take less memory
    for where, row in (pair for path in paths for pair in _rows(path)):
        for title, text in _paragraphs(_parse_row(row, where), where):
            digest = hashlib.sha256(f"{title}\n{text}".encode()).digest()[:16]
            if text and digest not in digests:
                digests.add(digest)
                yield Passage(str(len(digests) - 1), title, text)
    if not digests:
        raise UserError("no paragraphs found in any source, at least one is needed")


def convert_rows(
    rows: Iterator[tuple[str, Any]], source: str, skipped: list[str] | None, seen: Seen
) -> Iterator[Question]:
    """The questions of (where, row) pairs; bad rows and duplicate ids raise or are skipped.

    A row is an object, or a line of jsonl as bytes.
    """
    for where, row in rows:
        try:
            question = _convert(_parse_row(row, where), source, where)
            add_to_seen(question, where, seen)
        except UserError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
            continue
        yield question


def add_to_seen(question: Question, where: str, seen: Seen) -> None:
    """Raises `UserError` if the source and id of a question have been read before."""
    key = (question.source, question.id)
    if key in seen:
        raise UserError(f"{where}: field id: {question.id!r} was already used in {seen[key]}")
    seen[key] = where


# ---- rows ----


def _rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of every row of a file of any format; a line of jsonl is not parsed yet."""
    path = locate(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file, accepted: {_ACCEPTED}")
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _array_rows(path) if _is_array(path) else _lines(path)


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(_BOM).lstrip()[:1] == b"["


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(where, line) of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.removeprefix(_BOM).strip():
                yield f"{path}:{number}", line


def _array_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, element) of a JSON array, numbered from 1. A `query` element without an id gets its index, from 0."""
    number = 0
    try:
        for number, element in enumerate(_elements(path), 1):
            if isinstance(element, dict) and "query" in element and not {"id", "_id", "query_id"} & set(element):
                element = {**element, "id": number - 1}
            yield f"{path}: element {number}", element
    except (ValueError, RecursionError) as error:
        raise _not_json(f"{path}: element {number + 1}", error, _ACCEPTED) from None


def _elements(path: Path) -> Iterator[Any]:
    """The elements of a JSON array, one by one; only a part of the file is in memory."""
    decode, parse = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder().raw_decode
    text, start, at_end, separator = "", 0, False, _BEFORE_FIRST
    with path.open("rb") as file:
        while True:
            try:
                before = separator.match(text, start)
                if before and before[1] and at_end and before.end() == len(text):
                    return
                if not before or before[1]:
                    raise json.JSONDecodeError("Expecting ',' or the end of the array", text, start)
                element, end = parse(text, before.end())
            except json.JSONDecodeError:
                if at_end or len(text) - start > _LONGEST_ELEMENT:
                    raise
                # The element may continue after `text`. Reading as much again keeps the repeated parsing linear.
                chunk = file.read(max(_CHUNK, len(text) - start))
                text, start, at_end = text[start:] + decode(chunk, not chunk), 0, not chunk
                continue
            yield _without_surrogates(element, text[start:end])
            start, separator = end, _BEFORE_NEXT


def _parse_row(row: Any, where: str) -> Any:
    """A row, or the JSON value in a line of jsonl."""
    if not isinstance(row, bytes):
        return row
    try:
        text = row.decode("utf-8-sig")
        return _without_surrogates(json.loads(text), text)
    except (ValueError, RecursionError) as error:
        raise _not_json(where, error, "one object per line") from None


def _without_surrogates(value: Any, text: str) -> Any:
    """The JSON value of `text`; escaped lone surrogates, which cannot be encoded, become question marks."""
    if "\\ud" in text or "\\uD" in text:
        return json.loads(as_utf8(json.dumps(value, ensure_ascii=False)))
    return value


def _not_json(where: str, error: Exception, accepted: str) -> UserError:
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{where}: not UTF-8 text (byte 0x{error.object[error.start]:02x}), accepted: UTF-8")
    return UserError(f"{where}: not JSON ({error}), accepted: {accepted}")


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every row, numbered from 1, with the needed columns only."""
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as opened:
            file = pyarrow.parquet.ParquetFile(opened)
            columns = [name for name in file.schema_arrow.names if name in _PARQUET_COLUMNS]
            batches = file.iter_batches(1024, columns=columns)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)})") from None


# ---- one row ----


def _paragraphs(row: Any, where: str) -> Iterator[tuple[str, str]]:
    """(title, text) of the paragraphs in a row's `context`. Some sets start sentences with a space, others do not."""
    context = row.get("context") if isinstance(row, dict) else None
    for paragraph in context if isinstance(context, list) else [context]:
        match paragraph:
            case [str(title), [*sentences]] if all(isinstance(sentence, str) for sentence in sentences):
                yield " ".join(title.split()), " ".join(" ".join(sentences).split())
            case _:
                raise _refused(where, "context", paragraph, "[[title, [sentence, ..]], ..], as HotpotQA has")


def _convert(row: Any, source: str, where: str) -> Question:
    """The question in a row of any format."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: {type(row).__name__} found, accepted: an object")
    metadata, prompt = row.get("metadata") or {}, row.get("prompt")
    if not isinstance(metadata, dict):
        raise _refused(where, "metadata", metadata, "an object")
    if prompt is not None and not _is_chat(prompt):
        raise _refused(where, "prompt", prompt, "chat messages with role and content")
    answers_field, answers = _look_up(row, _ANSWERS, "golden_answers", where)
    answers = _answers(answers, answers_field, where)
    if answers_field == "answer" and row.get("answer_aliases"):
        answers += _answers(row["answer_aliases"], "answer_aliases", where, needed=False)
    label_field, label = _look_up(row, _LABELS, "metadata.type", where)
    # The original files of 2WikiMultiHopQA and HotpotQA have these outside of `metadata`.
    original = {"evidences": row.get("evidences"), "supporting_titles": _supporting_titles(row)}
    kept = {name: v for name, v in {**original, **metadata}.items() if _RESERVED.get(name, _is_plain)(v)}
    if label is not None:
        kept["type"] = label
    if prompt is not None:
        kept["prompt"] = [{"role": m["role"], "content": m["content"]} for m in prompt]
    text_field, text = _look_up(row, _TEXTS, "question", where)
    if text is None and prompt is not None:
        text = prompt[-1]["content"].rsplit(_QUESTION_MARK, 1)[-1]
    if not isinstance(text, str) or not text.strip():
        raise _refused(where, text_field, text, "the question as a string")
    id_field, identifier = _look_up(row, _IDS, "id", where)
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        raise _refused(where, id_field, identifier, "a string or a whole number")
    return Question(
        source=str(row.get("data_source") or source),
        id=str(identifier),
        text=text.strip(),
        answers=answers,
        kind=_kind(label, label_field, (row.get("id"), metadata.get("id")), where),
        metadata=kept,
    )


def _look_up(row: dict[str, Any], fields: tuple[str, ...], default: str, where: str) -> tuple[str, Any]:
    """(field, value) of the first of the fields that is neither absent, null nor ""; else (`default`, None)."""
    for field in fields:
        value: Any = row
        *outer, last = field.split(".")
        for depth, name in enumerate(outer, 1):
            value = {} if value.get(name) is None else value[name]
            if not isinstance(value, dict):
                raise _refused(where, ".".join(outer[:depth]), value, "an object")
        if value.get(last) not in (None, ""):
            return field, value[last]
    return default, None


def _answers(value: Any, field: str, where: str, needed: bool = True) -> tuple[str, ...]:
    """The answers that are not blank; some sets have blank aliases among good ones."""
    answers = [value] if isinstance(value, str) else value
    if isinstance(answers, list) and all(a is None or isinstance(a, str) for a in answers):
        kept = tuple(a for a in answers if a and a.strip())
        if kept or not needed:
            return kept
    raise _refused(where, field, value, "one or more strings, not all blank")


def _kind(label: Any, field: str, identifiers: tuple[Any, ...], where: str) -> Kind:
    """The kind by the label, or else by an id of MuSiQue."""
    if label is None:
        return next(filter(None, map(musique_kind, identifiers)), UNLABELLED)
    if not isinstance(label, str) or label not in KIND_OF_LABEL:
        raise _refused(where, field, label, f"{', '.join(KIND_OF_LABEL)}, or none")
    return KIND_OF_LABEL[label]


def _supporting_titles(row: dict[str, Any]) -> list[str]:
    """The distinct titles of `supporting_facts`, a list of [title, sentence]."""
    facts = row.get("supporting_facts")
    pairs = facts if isinstance(facts, list) else []
    titles = [pair[0] for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str)]
    return list(dict.fromkeys(titles))


def _is_plain(value: Any) -> bool:
    scalars = (str, int, float, bool)
    return isinstance(value, scalars) or (isinstance(value, list) and all(isinstance(v, scalars) for v in value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(text, str) for text in value)


# What the evaluation reads, and of which form; in another form the name means something else in that data set.
_RESERVED: dict[str, Callable[[Any], bool]] = {
    "chance": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1,
    # [entity, relation, value] triples, as in 2WikiMultiHopQA
    "evidences": lambda value: isinstance(value, list) and all(_is_texts(t) and len(t) == 3 for t in value),
    "rounds": lambda value: False,  # of questions that this project made; never read from a file
    "supporting_titles": _is_texts,
}


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in prompt)
    )


def _refused(where: str, field: str, value: Any, accepted: str) -> UserError:
    """The error about a field's value, short enough for one line."""
    found = "nothing" if value is None else repr(value)
    found = found if len(found) <= 60 else f"{found[:60]}..."
    return UserError(f"{where}: field {field}: {found} found, accepted: {accepted}")

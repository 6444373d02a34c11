"""Passages on disk, read through a memory map: an open corpus keeps one offset per row in memory, not the texts.

A corpus is a jsonl file of rows `{"id": "7", "contents": "\"Title\"\nText"}` or
`{"id": "7", "title": "Title", "text": "Text"}`.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from retrieval.protocol import CorpusError, Passage, on_disk


class MemoryMappedCorpus(Sequence[Passage]):
    """Random access to the passages of a jsonl file.

    The first pass checks every row; a bad one raises `CorpusError` with the file, the line number and the field.
    """

    def __init__(self, path: str | os.PathLike[str], offsets: np.ndarray | None = None):
        """Open `path`; `offsets` [N] int64 (the byte where each row starts) skips the first pass over the file."""
        self.path = on_disk(path)
        if self.path.is_dir():
            raise CorpusError(
                f"{self.path}: is a directory, accepted: a jsonl file; examples/custom_questions.py makes one of texts"
            )
        if not self.path.is_file():
            raise CorpusError(f"{self.path}: no such corpus file")
        if self.path.suffix == ".gz":
            raise CorpusError(f"{self.path}: is compressed, accepted: the file that `gunzip {self.path.name}` writes")
        self.offsets = _scan(self.path) if offsets is None else offsets
        with open(self.path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, row: int) -> Passage:
        # Negative rows are refused: a search returns -1 for "no result", which is never the last passage.
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} is outside 0..{len(self) - 1}")
        start = int(self.offsets[row])
        end = self._bytes.find(b"\n", start)
        return _parse(self._bytes[start : end if end >= 0 else None], f"{self.path}: row {row}")


def write_corpus(path: str | os.PathLike[str], passages: Iterable[Passage]) -> None:
    """Write passages as a jsonl corpus that `MemoryMappedCorpus` reads back unchanged, except for the scores."""
    path = on_disk(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(path)
    try:
        with open(partial, "w", encoding="utf-8") as file:
            for passage in passages:
                if "\n" in passage.title:
                    raise CorpusError(f"{path}: the title of passage {passage.id!r} contains a line break")
                file.write(jsonl_row(passage))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def jsonl_row(passage: Passage) -> str:
    """The line of a corpus that `MemoryMappedCorpus` reads back as `passage` (without its score)."""
    return json.dumps({"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}) + "\n"


def _parse(line: bytes, where: str) -> Passage:
    """One jsonl row -> Passage. `where` is the start of the `CorpusError`'s message."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise CorpusError(f"{where}: not a JSON object in UTF-8") from None
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: a {type(row).__name__}, expected an object with id and contents")
    id_, contents = row.get("id"), row.get("contents")
    if contents is None and isinstance(row.get("text"), str) and row["text"].strip():
        title = row.get("title") or ""
        if not isinstance(title, str):
            raise CorpusError(f"{where}: field title is {_show_value(row, 'title')}, expected text")
        contents = f'"{" ".join(title.split())}"\n{row["text"]}'
    if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
        raise CorpusError(f"{where}: field id is {_show_value(row, 'id')}, expected a string or an integer")
    if contents is None and ("title" in row or "text" in row):
        raise CorpusError(f"{where}: field text is {_show_value(row, 'text')}, expected the text of the passage")
    if not isinstance(contents, str) or not contents.strip():
        raise CorpusError(f"{where}: field contents is {_show_value(row, 'contents')}, expected '\"Title\"\\ntext'")
    return read_contents(str(id_), contents)


def read_contents(id_: str, contents: str, score: float = 0.0) -> Passage:
    """Parse a row's `contents`: a title on the first line, in quotes or not, then the text."""
    title, line_break, text = contents.partition("\n")
    if not line_break:
        title, text = "", contents
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return Passage(id=id_, title=title, text=text, score=score)


def _show_value(row: dict, field: str) -> str:
    return json.dumps(row[field])[:40] if field in row else f"missing (found: {', '.join(row)[:60]})"


def _scan(path: Path) -> np.ndarray:
    """Check every row in one streaming pass and return the byte where each row starts, [N] int64."""
    starts, lines, id_hashes, position = array("q"), array("q"), array("q"), 0
    with open(path, "rb") as file:
        for number, line in enumerate(tqdm(file, "reading the corpus", unit=" rows", delay=2, disable=None), 1):
            if line.strip():
                passage = _parse(line, f"{path}: line {number}")
                starts.append(position)
                lines.append(number)
                id_hashes.append(hash(passage.id))
            position += len(line)
    if not starts:
        raise CorpusError(f"{path}: no rows, expected jsonl rows with id and contents")
    # Two of 21 million different ids have the same hash of 64 bits with a probability of 1e-5.
    _, rows, counts = np.unique(np.frombuffer(id_hashes, np.int64), return_index=True, return_counts=True)
    if (repeated := rows[counts > 1]).size:
        first = int(repeated.min())
        second = id_hashes.index(id_hashes[first], first + 1)
        raise CorpusError(f"{path}: line {lines[second]}: field id repeats that of line {lines[first]}")
    return np.frombuffer(starts, np.int64)


def _partial_path(path: Path) -> Path:
    """A temporary name in the same folder, from which the finished file is renamed atomically."""
    # Processes in different containers may have the same number.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")

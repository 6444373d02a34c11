"""Passages on disk, read through a memory map: an open corpus keeps one offset per row in memory, not the texts.

A corpus is a jsonl file (plain or .gz) of rows `{"id": "7", "contents": "\"Title\"\nText"}` or
`{"id": "7", "title": "Title", "text": "Text"}`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import mmap
import os
import shutil
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from retrieval.protocol import CorpusError, Passage, on_disk

# Smaller files are read again at every start: that takes about a second and writes nothing next to the user's data.
CACHE_OFFSETS_ABOVE_BYTES = 64 * 2**20


class MemoryMappedCorpus(Sequence[Passage]):
    """Random access to the passages of a jsonl file.

    The first pass checks every row; a bad one raises `CorpusError` with the file, the line number and the field.
    """

    def __init__(self, path: str | os.PathLike[str], offsets: np.ndarray | None = None):
        """Open `path`; `offsets` [N] int64 (the byte where each row starts) skips the first pass over the file."""
        self.path = _plain_file(on_disk(path))
        self.offsets = _offsets(self.path) if offsets is None else offsets
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

    def passages(self, start: int = 0, stop: int | None = None) -> Iterator[Passage]:
        """Yield the passages of rows start .. stop-1 in order."""
        for row in range(start, min(len(self) if stop is None else stop, len(self))):
            yield self[row]

    def digest(self, start: int, stop: int) -> str:
        """The sha256 of the bytes of rows start .. stop-1, in hexadecimal."""
        end = int(self.offsets[stop]) if stop < len(self) else len(self._bytes)
        with memoryview(self._bytes) as content, content[int(self.offsets[start]) : end] as rows:
            return hashlib.sha256(rows).hexdigest()

    def write_slice(self, path: Path, start: int, stop: int) -> None:
        """Write rows start .. stop-1 to `path` unchanged."""
        begin, end = int(self.offsets[start]), int(self.offsets[stop]) if stop < len(self) else None
        partial = _partial_path(path)
        with open(self.path, "rb") as source, open(partial, "wb") as target:
            source.seek(begin)
            left = (self.path.stat().st_size if end is None else end) - begin
            while left:
                block = source.read(min(left, 2**20))
                target.write(block)
                left -= len(block)
        os.replace(partial, path)


class ConcatenatedCorpus(Sequence[Passage]):
    """The passages of several corpora in one sequence of rows."""

    def __init__(self, parts: Sequence[Sequence[Passage]]):
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside 0..{len(self) - 1}")
        part = int(np.searchsorted(self._ends, row, side="right"))
        return self._parts[part][row - (int(self._ends[part - 1]) if part else 0)]


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
            raise CorpusError(f"{where}: field title is {_found(row, 'title')}, expected text")
        contents = f'"{" ".join(title.split())}"\n{row["text"]}'
    if isinstance(id_, bool) or not isinstance(id_, str | int) or id_ == "":
        raise CorpusError(f"{where}: field id is {_found(row, 'id')}, expected a string or an integer")
    if not isinstance(contents, str) or not contents.strip():
        raise CorpusError(f"{where}: field contents is {_found(row, 'contents')}, expected '\"Title\"\\ntext'")
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


def _found(row: dict, field: str) -> str:
    return f"{json.dumps(row[field])[:40]}" if field in row else "missing"


def _plain_file(path: Path) -> Path:
    """The uncompressed file to map: `path` itself, or a .gz decompressed once into a new file in the same folder."""
    if not path.is_file():
        raise CorpusError(f"{path}: no such corpus file")
    if path.suffix != ".gz":
        return path
    plain = path.with_name(path.name + ".unpacked")  # not `path` without .gz: that may be the user's file

    def unpack(target: Path) -> None:
        with gzip.open(path, "rb") as packed, open(target, "wb") as file:
            shutil.copyfileobj(packed, file, 2**20)

    try:
        make_from(path, plain, unpack)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}: cannot be decompressed to {plain} ({error})") from None
    return plain


def make_from(source: Path, target: Path, make: Callable[[Path], None]) -> None:
    """Make `target` from `source`, unless it was already made from this version of `source`.

    `target` gets the modification time of `source`, as with gunzip, so that any replaced source is noticed, even by an
    older file.

    Args:
      make: writes the file at its argument, which is then renamed to `target`.
    """
    written_ns = source.stat().st_mtime_ns
    if target.is_file() and target.stat().st_mtime_ns == written_ns:
        return
    partial = _partial_path(target)
    try:
        make(partial)
        os.utime(partial, ns=(written_ns, written_ns))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _offsets(path: Path) -> np.ndarray:
    """The byte where each row of `path` starts, [N] int64; cached next to large files until they change."""
    stat = path.stat()
    if stat.st_size < CACHE_OFFSETS_ABOVE_BYTES or not os.access(path.parent, os.W_OK):
        return _scan(path)
    # The first two entries are the key: an edited corpus is read again.
    cache, key = path.with_name(path.name + ".offsets.npy"), [stat.st_size, stat.st_mtime_ns]
    if cache.is_file():
        try:
            stored = np.load(cache, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            stored = np.zeros(0, np.int64)  # a damaged cache is rebuilt
        if stored.ndim == 1 and stored.dtype == np.int64 and stored[:2].tolist() == key:
            return stored[2:]
    offsets = _scan(path)
    partial = _partial_path(cache)
    with open(partial, "wb") as file:
        np.save(file, np.concatenate([np.array(key, np.int64), offsets]))
    os.replace(partial, cache)
    return offsets


def _scan(path: Path) -> np.ndarray:
    """Check every row in one streaming pass and return the byte where each row starts, [N] int64."""
    starts, id_hashes, position = array("q"), array("q"), 0
    with open(path, "rb") as file:
        for number, line in enumerate(tqdm(file, "reading the corpus", unit=" rows", delay=2, disable=None), 1):
            if line.strip():
                passage = _parse(line, f"{path}: line {number}")
                starts.append(position)
                id_hashes.append(hash(passage.id))
            position += len(line)
    if not starts:
        raise CorpusError(f"{path}: no rows, expected jsonl rows with id and contents")
    offsets = np.frombuffer(starts, np.int64)
    _refuse_duplicate_ids(path, offsets, np.frombuffer(id_hashes, np.int64))
    return offsets


def _refuse_duplicate_ids(path: Path, offsets: np.ndarray, id_hashes: np.ndarray) -> None:
    """Raise `CorpusError` on the first repeated id. Only ids with equal hashes are compared, so few are in memory."""
    ordered = np.sort(id_hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    suspects = np.flatnonzero(np.isin(id_hashes, repeated)) if repeated.size else ()
    seen: dict[str, int] = {}
    with open(path, "rb") as file:
        for row in suspects:
            file.seek(int(offsets[row]))
            id_ = _parse(file.readline(), f"{path}: row {row}").id
            if id_ in seen:
                first, second = (_line_number(path, int(offsets[r])) for r in (seen[id_], row))
                raise CorpusError(f"{path}: line {second}: field id repeats {id_!r} of line {first}")
            seen[id_] = int(row)


def _line_number(path: Path, offset: int) -> int:
    lines, left = 1, offset
    with open(path, "rb") as file:
        while left:
            block = file.read(min(left, 2**20))
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _partial_path(path: Path) -> Path:
    """A temporary name in the same folder, from which the finished file is renamed atomically."""
    # Processes in different containers may have the same number.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")

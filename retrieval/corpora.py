"""Opens corpora in common formats: the jsonl of Search-R1 and FlashRAG, the JSON array of articles of MultiHop-RAG.

jsonl is read as is. Articles are split into passages, which are written to `FILE.passages.jsonl` in the same folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.protocol import CorpusError, Passage, on_disk

PASSAGE_WORDS = 100  # the length of wiki-18's passages
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]])|(?<=[.!?][\"')\]]{2}))\s+")


def open_corpus(path: str | os.PathLike[str]) -> MemoryMappedCorpus:
    """Open a corpus of any known format.

    Raises:
      CorpusError: the corpus is missing or invalid; names the file, the line or element, and the field.
    """
    path = on_disk(path)
    if not path.is_file() or not _is_json_array(path):
        return MemoryMappedCorpus(path)
    passages = path.with_name(path.name + ".passages.jsonl")
    try:
        write_corpus(passages, _read_articles(path))
    except OSError as error:
        raise CorpusError(f"{passages}: cannot be written ({error}); copy {path.name} to a folder of yours") from None
    return MemoryMappedCorpus(passages)


def split_text(text: str, words: int = PASSAGE_WORDS) -> list[str]:
    """Split `text` into pieces of at most `words` words, at the end of a sentence in a piece's second half."""
    pieces: list[list[str]] = [[]]
    for sentence in _SENTENCE_END.split(text.strip()):
        rest = sentence.split()
        while rest:
            room = words - len(pieces[-1])
            if not room or (min(len(rest), words) > room and len(pieces[-1]) >= words // 2):
                pieces.append([])
                room = words
            pieces[-1] += rest[:room]
            rest = rest[room:]
    return [" ".join(piece) for piece in pieces if piece]


def _is_json_array(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_articles(path: Path) -> Iterator[Passage]:
    """The passages of MultiHop-RAG's articles, `{"title", "body", "source", "published_at", ...}`.

    Source and date precede the text of every passage: that set's questions ask for them.
    """
    for number, article in enumerate(_read_elements(path), 1):
        where = f"{path}: element {number}"
        if not isinstance(article, dict):
            raise CorpusError(f"{where}: a {type(article).__name__}, expected an object with title and body")
        for field in ("title", "body"):
            if not isinstance(article.get(field), str) or not article[field].strip():
                value = json.dumps(article[field])[:40] if field in article else "missing"
                raise CorpusError(f"{where}: field {field} is {value}, expected text")
        origin = [str(article[field]) for field in ("source", "published_at") if article.get(field)]
        title = " ".join(article["title"].split())
        for part, text in enumerate(split_text(article["body"])):
            yield Passage(f"{number - 1}-{part}", title, f"({', '.join(origin)}) {text}" if origin else text)


def _read_elements(path: Path) -> list[Any]:
    """The elements of a JSON array, all in memory: the news corpus is a few megabytes."""
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise CorpusError(f"{path}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: not a JSON array ({error})") from None

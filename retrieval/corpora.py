"""Opens corpora in common formats: the jsonl of Search-R1 and FlashRAG, the JSON array of articles of MultiHop-RAG.

jsonl is read as is. Articles are split into passages once, into `FILE.passages.jsonl` in the same folder.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from retrieval.corpus import MemoryMappedCorpus, make_from, write_corpus
from retrieval.protocol import CorpusError, Passage, on_disk

PASSAGE_WORDS = 100  # the length of wiki-18's passages
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]])|(?<=[.!?][\"')\]]{2}))\s+")


def open_corpus(path: str | os.PathLike[str]) -> MemoryMappedCorpus:
    """Open a corpus of any known format, plain or .gz.

    Raises:
      CorpusError: the corpus is missing or invalid; names the file, the line or element, and the field.
    """
    path = on_disk(path)
    if not path.is_file():
        raise CorpusError(f"{path}: no such corpus file")
    if not _is_array(path):
        return MemoryMappedCorpus(path)
    passages = path.with_name(path.name + ".passages.jsonl")
    try:
        make_from(path, passages, lambda target: write_corpus(target, _articles(path)))
    except OSError as error:
        raise CorpusError(f"{passages}: cannot be written ({error}); copy {path.name} to a folder of yours") from None
    return MemoryMappedCorpus(passages)


def cut(text: str, words: int = PASSAGE_WORDS) -> list[str]:
    """Split `text` into pieces of at most `words` words, at the end of a sentence in a piece's second half."""
    pieces: list[list[str]] = [[]]
    for sentence in _SENTENCE_END.split(text.strip()):
        for word_list in _blocks(sentence.split(), words):
            if len(pieces[-1]) + len(word_list) > words and len(pieces[-1]) >= words // 2:
                pieces.append([])
            while word_list:
                room = words - len(pieces[-1])
                pieces[-1] += word_list[:room]
                word_list = word_list[room:]
                if word_list:
                    pieces.append([])
    return [" ".join(piece) for piece in pieces if piece]


def _blocks(items: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _is_array(path: Path) -> bool:
    with _open(path) as file:
        try:
            head = file.read(4096)
        except (OSError, EOFError, zlib.error) as error:
            raise CorpusError(f"{path}: cannot be decompressed ({error})") from None
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _articles(path: Path) -> Iterator[Passage]:
    """The passages of MultiHop-RAG's articles, `{"title", "body", "source", "published_at", ...}`.

    Source and date precede the text of every passage: that set's questions ask for them.
    """
    for number, article in enumerate(_elements(path), 1):
        where = f"{path}: element {number}"
        if not isinstance(article, dict):
            raise CorpusError(f"{where}: a {type(article).__name__}, expected an object with title and body")
        for field in ("title", "body"):
            if not isinstance(article.get(field), str) or not article[field].strip():
                value = json.dumps(article[field])[:40] if field in article else "missing"
                raise CorpusError(f"{where}: field {field} is {value}, expected text")
        named = [str(article[field]) for field in ("source", "published_at") if article.get(field)]
        title = " ".join(article["title"].split())
        for part, text in enumerate(cut(article["body"])):
            yield Passage(f"{number - 1}-{part}", title, f"({', '.join(named)}) {text}" if named else text)


def _elements(path: Path) -> list[Any]:
    """The elements of a JSON array, all in memory: the news corpus is a few megabytes."""
    try:
        with _open(path) as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise CorpusError(f"{path}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: not a JSON array ({error})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}: cannot be read ({error})") from None

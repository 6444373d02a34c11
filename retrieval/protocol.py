"""The retriever interfaces. Only psearch_jax/assembly/build.py imports implementations of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class RetrievalError(RuntimeError):
    """A search failed; the message is one line that names the server or library and the reason."""


class CorpusError(ValueError):
    """A corpus or an index is missing, damaged or does not match; the message is one line with the file and field."""


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_remote(location: str | os.PathLike[str]) -> bool:
    """Whether a location is an address such as gs://BUCKET/DIR rather than a path of this machine.

    pathlib turns `gs://` into `gs:/`, which therefore also counts as an address, never as a directory named `gs:`.
    """
    return _ADDRESS.match(os.fspath(location)) is not None


def on_disk(location: str | os.PathLike[str]) -> Path:
    """The path of a file that must be on a disk to be memory-mapped. Raises `CorpusError` for an address."""
    if is_remote(location):
        raise CorpusError(
            f"{location}: is not a path of this machine, accepted: a copy on a disk, whose files can be memory-mapped "
            f"(`gcloud storage cp -r {location} DIR`)"
        )
    return Path(location)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `CorpusError` when it cannot be read or is something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # also too deep, or a number of thousands of digits
        raise CorpusError(f"{path}: cannot be read as JSON ({error}), accepted: an object") from None
    if not isinstance(content, dict):
        raise CorpusError(f"{path}: a {type(content).__name__}, accepted: an object")
    return content


def as_utf8(text: str) -> str:
    """The text with lone surrogates, which a model can write but UTF-8 cannot encode, replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def text_sha256(text: str) -> str:
    """The digest of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(as_utf8(text).encode()).hexdigest()


@dataclass(frozen=True)
class Passage:
    """One retrieved passage; `score` is its relevance to the query, rounded so that replays agree."""

    id: str
    title: str
    text: str
    score: float = 0.0


def in_utf8(passage: Passage) -> Passage:
    """The passage in valid UTF-8: the JSON of a corpus may contain half a surrogate pair."""
    return Passage(as_utf8(passage.id), as_utf8(passage.title), as_utf8(passage.text), passage.score)


def in_background(f: Callable[[], Any]) -> Future:
    """Runs `f` in a daemon thread: the program can exit without waiting for it."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(f())
        except BaseException as error:  # re-raised by `future.result()`
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class Retriever(Protocol):
    """Anything that answers a batch of queries."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return at most `k` passages per query, best first, in the order of `queries`.

        An empty query gives an empty list. Raises `RetrievalError` when the search fails.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Describe what is searched, as JSON values; None if a server does not report it.

            corpus          the name of the index directory or corpus file
            corpus_sha256   the digest of its jsonl file, the same in process and from a server
            ranking_sha256  a digest of what ranks its passages: encoder and search tree
            rows            its number of passages

        Raises `RetrievalError` when no server can be reached.
        """
        ...


class Ranker(Protocol):
    """Ranks the rows of one corpus for a query: vectors with ScaNN, or BM25."""

    @property
    def rows(self) -> int:
        """N, the number of passages."""
        ...

    @property
    def identity(self) -> Any:
        """JSON values that determine how it ranks: of two rankers with other identities, results may differ."""
        ...

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best rows per query, best first: row ids [Q, k] int64 and scores [Q, k] float32.

        Scores are rounded, and at ties the lower row comes first. Missing results (no known word, k > N) have id -1
        and score -inf. Results of a query do not depend on the rest of its batch.
        Raises `RetrievalError` when the search fails.
        """
        ...


class Encoder(Protocol):
    """Turns texts into vectors whose inner product is their relevance.

    A row must depend only on its own text, not on the rest of the batch, so that replayed searches agree.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that determine the vectors: equal identities give equal vectors. `name` is that of the class."""
        ...

    @property
    def dimensions(self) -> int:
        """D, the width of a vector."""
        ...

    @property
    def block_rows(self) -> int:
        """The best number of passages per call of `encode_passages`."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return [Q, D] float32 of unit length; a zero row for a query without content, which gets no results."""
        ...

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Return [N, D] float32 of unit length; a zero row for a passage without words."""
        ...

    def save(self, directory: Path) -> None:
        """Write into an index directory what the encoder needs in addition to its identity."""
        ...

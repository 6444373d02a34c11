"""What a retriever is: the only file of this package that psearch_jax imports."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class RetrievalError(RuntimeError):
    """A search could not be carried out; the message says by whom and why, in one line."""


class CorpusError(ValueError):
    """A corpus or an index is missing, damaged or does not match; one line that names the file and the field."""


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_remote(location: str | os.PathLike[str]) -> bool:
    """Whether a location is an address such as gs://BUCKET/DIR, and no path of this machine.

    pathlib writes `gs:/` for `gs://`: that is taken for an address as well, never for a directory called `gs:`.
    """
    return _ADDRESS.match(os.fspath(location)) is not None


def on_disk(location: str | os.PathLike[str]) -> Path:
    """The path of what has to lie on a disk, since it is memory-mapped. Raises `CorpusError` for an address."""
    if is_remote(location):
        raise CorpusError(
            f"{location}: is no path of this machine, accepted: a copy on a disk, whose files can be memory-mapped "
            f"(`gcloud storage cp -r {location} DIR`)"
        )
    return Path(location)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `CorpusError` when it cannot be read or holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # too deep, or a number of thousands of digits
        raise CorpusError(f"{path}: cannot be read as JSON ({error}), accepted: an object") from None
    if not isinstance(found, dict):
        raise CorpusError(f"{path}: a {type(found).__name__}, accepted: an object")
    return found


def as_utf8(text: str) -> str:
    """The text with what UTF-8 cannot say (half a surrogate pair, which a model can write) as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class Passage:
    """One retrieved passage; `score` is its inner product with the query, rounded so that replays agree."""

    id: str
    title: str
    text: str
    score: float = 0.0


class Retriever(Protocol):
    """Anything that answers a batch of queries."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return at most `k` passages per query, best first, in the order of `queries`.

        An empty query gives an empty list. Raises `RetrievalError` when the search fails.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Say what is searched, in JSON values; None stands for what a server does not tell.

            corpus          its name: of an index directory or a corpus file
            corpus_sha256   the digest of its jsonl file, the same in process and behind an address
            rows            its passages

        Raises `RetrievalError` when nobody can be asked.
        """
        ...


class Ranker(Protocol):
    """Finds the rows of one corpus that answer a text: vectors with ScaNN, BM25, or several of them fused."""

    @property
    def rows(self) -> int:
        """N, the number of passages."""
        ...

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best rows per query, best first: ids [Q, k] int64 and scores [Q, k] float32.

        Scores are rounded to four decimals and ties go to the lower row; where there is nothing to return (no known
        word, k > N) the id is -1 and the score -inf. Equal queries get equal results, whatever else is in the batch.
        Raises `RetrievalError` when the search fails.
        """
        ...


class Encoder(Protocol):
    """Turns texts into vectors whose inner product is their relevance.

    A row depends on its own text only, never on the batch around it: a replayed search must agree with the first.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that pin the encoder: equal identities make equal vectors. `name` says which class it is."""
        ...

    @property
    def dimensions(self) -> int:
        """D, the width of a vector."""
        ...

    @property
    def block_rows(self) -> int:
        """How many passages `encode_passages` is best given at a time."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return [Q, D] float32 of unit length; a zero row where the text says nothing (it then finds nothing)."""
        ...

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Return [N, D] float32 of unit length; a zero row for a passage without words."""
        ...

    def save(self, directory: Path) -> None:
        """Write into an index directory whatever the encoder needs besides its identity."""
        ...

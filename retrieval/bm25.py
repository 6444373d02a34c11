"""BM25 over words, with the bm25s library: no weights, no training, hard to beat on names and rare words.

Robertson and Zaragoza 2009; Lucene's form of the weights, computed when the corpus is indexed (Lu 2024, BM25S).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from retrieval.protocol import CorpusError, Passage

VERSION = 1  # raise it with any change that makes other scores: older indexes are then refused
SCORE_DECIMALS = 4
K1, B = 1.2, 0.75
# A title counts as if it stood three times in its text: among 994 HotpotQA passages a question then finds each
# supporting passage in the top 3 in 0.72 of cases (0.68 with the title counted once).
TITLE_COUNT = 3
_WORD = re.compile(r"\w+")


class Bm25Ranker:
    """Implements `Ranker`. Words are lower-cased and lose their accents; English stop words are left out."""

    name = "bm25"

    def __init__(self, index: Any, rows: int):
        """`index`: a bm25s.BM25 over `rows` passages."""
        self.rows = rows
        self._index = index

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for scores to be equal, as JSON values."""
        return {"name": self.name, "version": VERSION, "k1": K1, "b": B, "title_count": TITLE_COUNT}

    @classmethod
    def build(cls, passages: Sequence[Passage]) -> Bm25Ranker:
        """Index the titles and texts of `passages`. Raises `CorpusError` when they hold no word at all."""
        bm25s = _bm25s()
        tokenizer = bm25s.tokenization.Tokenizer(lower=False, splitter=words, stopwords="en")
        ids = list(tokenizer.streaming_tokenize(_texts(passages), allow_empty=False))
        vocabulary = tokenizer.get_vocab_dict()
        if not vocabulary:
            raise CorpusError("the corpus holds no words, which BM25 could look for")
        index = bm25s.BM25(k1=K1, b=B, method="lucene")
        index.index((ids, vocabulary), show_progress=False, create_empty_token=False)
        return cls(index, len(passages))

    def save(self, directory: Path) -> None:
        """Write NumPy arrays and JSON into `directory`."""
        self._index.save(directory, show_progress=False)

    @classmethod
    def load(cls, directory: Path, identity: dict[str, Any], rows: int) -> Bm25Ranker:
        """Map the index that `save` wrote. Raises `CorpusError` when it is not the one of `identity` and `rows`."""
        params = directory / "params.index.json"
        try:
            found = json.loads(params.read_bytes())["num_docs"]
            index = _bm25s().BM25.load(directory, mmap=True, allow_pickle=False, show_progress=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{params}: the BM25 index cannot be read ({error})") from None
        ranker = cls(index, rows)
        if found != rows or ranker.identity != identity:
            raise CorpusError(
                f"{params}: {found} passages for {ranker.identity}, the manifest says {rows} for {identity}; "
                "build the index again"
            )
        return ranker

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ranker.rank`; a score is the sum of the weights of a query's words, and only scores above 0 count."""
        ids = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        for position, query in enumerate(queries):
            known = [word for word in words(query) if word in self._index.vocab_dict]
            if known:
                found, values = _best(self._index.get_scores(known), k)
                ids[position, : len(found)], scores[position, : len(found)] = found, values
        return ids, scores


def words(text: str) -> list[str]:
    """Lower-case words of letters, digits and underscores, accents taken off."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return _WORD.findall("".join(c for c in plain if not unicodedata.combining(c)))


def _best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows [<= k] with the largest scores above 0, and these: rounded, best first, ties to the lower row."""
    rounded = np.round(scores.astype(np.float64), SCORE_DECIMALS)
    least = np.partition(rounded, -k)[-k] if k < len(rounded) else -np.inf
    rows = np.flatnonzero((rounded >= least) & (rounded > 0))
    rows = rows[np.lexsort((rows, -rounded[rows]))][:k]
    return rows, rounded[rows].astype(np.float32)


def _texts(passages: Sequence[Passage]) -> Iterator[str]:
    for row in tqdm(range(len(passages)), "reading words", unit=" rows", delay=2, disable=None):
        passage = passages[row]
        yield " ".join([passage.title] * TITLE_COUNT + [passage.text])


def _bm25s() -> Any:
    import bm25s  # imported late: other retrievers need none

    return bm25s

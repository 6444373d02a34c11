"""The in-process retriever: it ranks all uncached queries of a batch in one call."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cachetools import LRUCache

from retrieval.corpora import open_corpus
from retrieval.corpus import MemoryMappedCorpus, jsonl_row
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import open_index
from retrieval.indexing.encoding import encode_corpus
from retrieval.manifest import sha256
from retrieval.protocol import CorpusError, Encoder, Passage, Ranker, as_utf8, on_disk, text_sha256
from retrieval.ranking.index import DenseRanker, ScannIndex

CACHE_BYTES = 2**30
ENTRY_BYTES = 600  # the size of a cached answer without its query's characters, rows and scores


@dataclass(frozen=True)
class Ranking:
    """The rows of the corpus that answer a query, best first, with their scores."""

    query: str
    rows: array  # of int64
    scores: array  # of float64


class RetrievalService:
    """Strip, deduplicate, look up in the cache, rank the rest in one call. Cached and new answers are equal."""

    def __init__(self, ranker: Ranker, corpus: Sequence[Passage], cache_bytes: int = CACHE_BYTES):
        """Combine a ranker and its corpus.

        Args:
          cache_bytes: the maximum size of the LRU cache of (query, k) answers; 0: no cache. It contains rows and
            scores; the passages stay in the corpus.
        """
        if len(corpus) != ranker.rows:
            raise CorpusError(f"the index holds {ranker.rows} rows, the corpus {len(corpus)}")
        self._ranker, self._corpus = ranker, corpus
        self._name = self._fingerprint = ""
        self._cache: LRUCache[tuple[str, int], Ranking] = LRUCache(cache_bytes, getsizeof=_count_bytes)
        self._lock = threading.Lock()  # a server calls from several threads

    @classmethod
    def open(cls, directory: str | os.PathLike[str], cache_bytes: int = CACHE_BYTES) -> RetrievalService:
        """Serve an index directory. Raises `CorpusError` when it is damaged or its encoder does not match."""
        manifest, ranker, corpus = open_index(directory)
        service = cls(ranker, corpus, cache_bytes)
        service._name, service._fingerprint = on_disk(directory).name, manifest["corpus_sha256"]
        return service

    @classmethod
    def from_corpus(
        cls,
        corpus: str | os.PathLike[str] | Sequence[Passage],
        encoder: Encoder | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> RetrievalService:
        """Index a small corpus (file or passages) in memory; by default with a hashing encoder fitted to it."""
        corpus = open_corpus(corpus) if isinstance(corpus, str | os.PathLike) else list(corpus)
        if not len(corpus):
            raise CorpusError("the corpus holds no passages, expected at least one")
        encoder = encoder or HashingEncoder().fit(corpus)
        index = ScannIndex.from_vectors(encode_corpus(corpus, encoder))
        service = cls(DenseRanker(index, encoder), corpus, cache_bytes)
        if isinstance(corpus, MemoryMappedCorpus):
            service._name, service._fingerprint = corpus.path.name, sha256(corpus.path)
        return service

    @property
    def rows(self) -> int:
        """N, the number of passages."""
        return len(self._corpus)

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`; `corpus` is the name of the index directory or corpus file."""
        if not self._fingerprint:  # passages in memory: the digest of their jsonl file, if it were written
            digest = hashlib.sha256()
            for passage in self._corpus:
                digest.update(jsonl_row(passage).encode())
            self._fingerprint = digest.hexdigest()
        return {
            "corpus": self._name or None,
            "corpus_sha256": self._fingerprint,
            "ranking_sha256": text_sha256(json.dumps(self._ranker.identity, sort_keys=True)),
            "rows": self.rows,
        }

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return at most `k` passages per query, best first, in the order of `queries`.

        White space is collapsed first, and lone surrogates become question marks. An empty query, or one without a
        word of the corpus, gives an empty list. Raises `RetrievalError` if the search fails, `ValueError` if k < 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        cleaned = [as_utf8(" ".join(query.split())) for query in queries]
        unique = list(dict.fromkeys(filter(None, cleaned)))
        answers = self._look_up(unique, k)
        misses = [query for query in unique if query not in answers]
        if misses:
            answers |= self._search(misses, k)
            self._store(answers, k)
        return [self._passages(answers.get(query)) for query in cleaned]

    def _passages(self, ranking: Ranking | None) -> list[Passage]:
        if ranking is None:
            return []
        return [
            replace(self._corpus[row], score=score) for row, score in zip(ranking.rows, ranking.scores, strict=True)
        ]

    def _search(self, queries: list[str], k: int) -> dict[str, Ranking]:
        ids, scores = self._ranker.rank(queries, k)
        return {
            query: Ranking(
                query,
                array("q", rows[rows >= 0].tolist()),
                array("d", (round(score, 6) for score in values[rows >= 0].tolist())),  # the precision of float32
            )
            for query, rows, values in zip(queries, ids, scores, strict=True)
        }

    def _look_up(self, queries: list[str], k: int) -> dict[str, Ranking]:
        with self._lock:
            return {query: self._cache[query, k] for query in queries if (query, k) in self._cache}

    def _store(self, answers: dict[str, Ranking], k: int) -> None:
        with self._lock:
            for query, ranking in answers.items():
                if _count_bytes(ranking) <= self._cache.maxsize:  # the cache raises on an answer that is too large
                    self._cache[query, k] = ranking


def _count_bytes(ranking: Ranking) -> int:
    """The approximate size of a cached answer."""
    values = len(ranking.rows) * ranking.rows.itemsize + len(ranking.scores) * ranking.scores.itemsize
    return ENTRY_BYTES + sys.getsizeof(ranking.query) + values

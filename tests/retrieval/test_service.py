"""The in-process retriever: deduplication, cache and results."""

import tracemalloc

import pytest
from helpers import people

from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.encoding import encode_corpus
from retrieval.ranking.index import DenseRanker, ScannIndex
from retrieval.service import RetrievalService


class Counting:
    """A ranker that records the queries of every call."""

    def __init__(self, corpus):
        encoder = HashingEncoder().fit(corpus)
        self.ranker = DenseRanker(ScannIndex.from_vectors(encode_corpus(corpus, encoder)), encoder)
        self.rows, self.calls = len(corpus), []

    def rank(self, queries, k):
        self.calls.append(list(queries))
        return self.ranker.rank(queries, k)


def test_service_searches_once_per_batch():
    """A batch is one search of its distinct, uncached, non-empty queries."""
    ranker = Counting(people())
    service = RetrievalService(ranker, people())
    batch = ["Baro Quill born", " Baro  Quill\tborn ", "", "  ", "Lena Wend", "Baro Quill born"]
    rankings = service.search(batch, 2)
    assert [len(row) for row in rankings] == [2, 2, 0, 0, 2, 2]
    assert rankings[0] == rankings[1] == rankings[5] and rankings[4][0].title == "Lena Wend"
    assert service.search(batch, 2) == rankings
    assert service.search(["", " "], 2) == [[], []] and service.search([], 2) == []
    assert ranker.calls == [["Baro Quill born", "Lena Wend"]]


def test_cache_hit_equals_miss():
    """Cached answers equal searched ones, for every k; without a cache, every query is searched."""
    ranker = Counting(people())
    cached, uncached = RetrievalService(ranker, people()), RetrievalService(ranker, people(), cache_bytes=0)
    queries = [f"{p.title} born" for p in people()[:50]]
    cached.search(queries[::2], 3)
    mixed = cached.search(queries, 3)
    assert [len(call) for call in ranker.calls] == [25, 25]
    assert cached.search(queries, 2) == [row[:2] for row in mixed]
    assert mixed == [uncached.search([query], 3)[0] for query in queries] == uncached.search(queries, 3)
    assert len(ranker.calls) == 3 + 50 + 1


def test_the_cache_is_bounded_in_bytes():
    """The cache is bounded in bytes."""
    service = RetrievalService.from_corpus(people(), cache_bytes=2**20)
    service.search(["Baro Quill"], 3)
    tracemalloc.start()
    for n in range(5):
        service.search([f"Baro Quill {n} {m} {'x' * 8000}" for m in range(50)], 100)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2**19 < taken < 1.3 * 2**20
    assert service.search(["Baro Quill " + "x" * 2**21], 1)[0][0].id == "p0"  # larger than the cache itself


def test_queries_of_any_kind():
    """No query raises: control characters, half surrogates, huge texts, unknown words."""
    ranker = Counting(people())
    service = RetrievalService(ranker, people())
    rankings = service.search(["\x00", "\ud800 Baro Quill", "word " * 20_000, "## ##", "zzyzx", "東京"], 3)
    assert [bool(row) for row in rankings] == [False, True, False, False, False, False]
    assert rankings[1][0].id == "p0" and "? Baro Quill" in ranker.calls[0], "tokenizers in Rust raise on surrogates"
    with pytest.raises(ValueError, match="k is 0"):
        service.search(["Baro Quill"], 0)

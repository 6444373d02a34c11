"""BM25 over words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers import people

from retrieval.protocol import CorpusError, Passage
from retrieval.ranking import bm25
from retrieval.ranking.bm25 import K1, STOP_WORDS, TITLE_COUNT, B, Bm25Ranker, words


def random_passages(count: int, vocabulary: int = 60) -> tuple[list[Passage], list[str]]:
    """Passages of few words, so that many scores are equal, and queries, some of which repeat a word."""
    rng = np.random.default_rng(0)
    known = np.array([*sorted(STOP_WORDS)[:5], *(f"w{n}" for n in range(vocabulary))])

    def text(least: int, most: int) -> str:
        return " ".join(known[np.minimum(rng.zipf(1.4, rng.integers(least, most)), len(known)) - 1])

    passages = [Passage(str(n), text(0, 3), text(0, 30)) for n in range(count)]
    return passages, [text(1, 9) for _ in range(70)]


@pytest.fixture(scope="module")
def small() -> tuple[Bm25Ranker, list[str]]:
    passages, queries = random_passages(150)
    return Bm25Ranker.build(passages), queries


def test_scores_and_first_passages_are_those_of_bm25s(small):
    """The scores are those of the library bm25s, and at equal rounded scores the lower row comes first."""
    library = pytest.importorskip("bm25s")
    passages, queries = random_passages(150)
    texts = [words(f"{f'{p.title} ' * TITLE_COUNT}{p.text}") for p in passages]
    peer = library.BM25(k1=K1, b=B, method="lucene")
    peer.index([[w for w in text if w not in STOP_WORDS] for text in texts], show_progress=False)
    for k in (1, 3, 40, 200):
        ids, scores = small[0].rank(queries, k)
        for query, row, row_scores in zip(queries, ids, scores, strict=True):
            known = [word for word in words(query) if word in peer.vocab_dict]
            expected = peer.get_scores(known) if known else np.zeros(len(passages))
            count = min(k, int((expected > 0).sum()))
            assert (row[:count] >= 0).all() and (row[count:] == -1).all() and np.isneginf(row_scores[count:]).all()
            assert len(set(row[:count])) == count
            assert np.allclose(row_scores[:count], -np.sort(-expected)[:count], atol=2e-4)
            assert np.allclose(row_scores[:count], expected[row[:count]], atol=2e-4)
            assert np.lexsort((row[:count], -row_scores[:count])).tolist() == list(range(count))


def test_results_depend_on_neither_blocks_nor_batch_nor_word_order(small, monkeypatch):
    """A ranking can be replayed: it is bit for bit the same in another batch, block size or order of words."""
    ranker, queries = small
    ids, scores = ranker.rank(queries, 5)
    for number, query in enumerate(queries[:20]):
        single = ranker.rank([" ".join(query.split()[::-1])], 5)
        assert np.array_equal(single[0][0], ids[number]) and np.array_equal(single[1][0], scores[number])
    monkeypatch.setattr(bm25, "BLOCK_ROWS", 7)
    for values, expected in zip(ranker.rank(queries, 5), (ids, scores), strict=True):
        assert np.array_equal(values, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sony™ №5 ℝ Straße ÉCOLE", ["sonytm", "no5", "r", "strasse", "ecole"]),
        ("हिन्दी की भाषा, தமிழ் กิน़", ["हिनदी", "की", "भाषा", "தமிழ", "กิน"]),
        ("naïve_x (É) ½-№", ["naive_x", "e", "1", "2", "no"]),
        ("I\u2764\ufe0f1\ufe0f\u20e3 co\u00adop \ufeffa\u200bb", ["i", "1", "coop", "a", "b"]),
    ],
)
def test_words_keep_vowel_signs_and_lose_case_and_accents(text, expected):
    """Words of Hindi, Tamil and Thai are not cut at vowel signs; case, accents and joiners do not matter."""
    assert words(text) == expected


def test_queries_without_an_answer():
    """Unknown and empty queries return nothing, and k may exceed the size of the corpus."""
    ranker = Bm25Ranker.build(people()[:2])
    ids, scores = ranker.rank(["", "zzyzx", "the of", "\x00\ud800", "Baro", "Baro " * 5000], 5)
    assert (ids[:4] == -1).all() and np.isneginf(scores[:4]).all()
    assert sorted(ids[4][:2].tolist()) == [0, 1] and (ids[4][2:] == -1).all()
    assert ranker.rank([], 3)[0].shape == (0, 3)
    with pytest.raises(CorpusError, match="no words"):
        Bm25Ranker.build([Passage("1", "", "?!")])


def test_an_index_on_disk_is_mapped_without_pickles_and_checked(tmp_path):
    """The index on disk ranks like the one in memory; one of other settings or another corpus is refused."""
    ranker = Bm25Ranker.build(people())
    Bm25Ranker.build(people(), tmp_path / "bm25")
    assert {p.suffix for p in (tmp_path / "bm25").iterdir()} == {".npy", ".json"}
    identity = json.loads(json.dumps(ranker.identity))
    loaded = Bm25Ranker.load(tmp_path / "bm25", identity, 320)
    assert isinstance(loaded._postings.weights, np.memmap)
    queries = [f"{p.title} born" for p in people()]
    for values, expected in zip(loaded.rank(queries, 3), ranker.rank(queries, 3), strict=True):
        assert np.array_equal(values, expected)
    for other in (identity | {"k1": 9.0}, identity | {"version": 1}):
        with pytest.raises(CorpusError, match="bm25: made as .*build it again"):
            Bm25Ranker.load(tmp_path / "bm25", other, 320)
    with pytest.raises(CorpusError, match="one index of 319 passages"):  # a row outside the corpus
        Bm25Ranker.load(tmp_path / "bm25", identity, 319)

"""BM25 and the fusion of rankings."""

import json
import math

import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN
from helpers import people

from retrieval.bm25 import K1, TITLE_COUNT, B, Bm25Ranker, words
from retrieval.hybrid import DEPTH, RANK_OFFSET, HybridRanker
from retrieval.protocol import CorpusError, Passage, Ranker


def by_hand(passages: list[Passage], query: str) -> list[float]:
    """The formula of Robertson and Zaragoza with Lucene's idf, over the words themselves."""
    texts = [[w for w in words(f"{f'{p.title} ' * TITLE_COUNT}{p.text}") if w not in STOPWORDS_EN] for p in passages]
    mean = np.mean([len(text) for text in texts])
    scores = []
    for text in texts:
        total = 0.0
        for word in words(query):
            holding = sum(word in other for other in texts)
            idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            count = text.count(word)
            total += idf * count / (count + K1 * (1 - B + B * len(text) / mean))
        scores.append(total)
    return scores


def test_scores_are_those_of_the_formula():
    """A library's other variant, a title counted otherwise, or stop words in the length of a passage."""
    passages = people()[:40] + [Passage("x", "Moss", "Baro of the moss, moss and more moss in the moss.")]
    ids, scores = Bm25Ranker.build(passages).rank(["Baro Quill", "moss"], 5)
    for query, row, found in zip(["Baro Quill", "moss"], ids, scores, strict=True):
        expected = np.round(by_hand(passages, query), 4)
        order = [i for i in np.argsort(-expected, kind="stable")[:5] if expected[i] > 0]
        assert row[row >= 0].tolist() == order
        assert np.allclose(found[row >= 0], expected[order], atol=2e-4)


def test_every_passage_by_its_name():
    """Names are cut into pieces, lower case differs from upper case, or accents keep a word from being found."""
    ranker = Bm25Ranker.build([*people(), Passage("e", "José Čapek", "Wrote plays.")])
    ids, _ = ranker.rank([f"When was {p.title.upper()} born?" for p in people()] + ["jose capek"], 1)
    assert ids[:, 0].tolist() == list(range(321))


def test_ties_go_to_the_lower_row():
    """Which of many equal passages comes back is left to chance, so that a replay differs."""
    passages = [Passage(str(i), "Same", "words") for i in range(50)] + [Passage("z", "Other", "thing")]
    ids, _ = Bm25Ranker.build(passages).rank(["same words"], 3)
    assert ids.tolist() == [[0, 1, 2]]


def test_company_makes_no_difference():
    """A ranking that depends on the batch cannot be replayed."""
    ranker = Bm25Ranker.build(people())
    queries = [f"{p.title} born" for p in people()[:60]]
    ids, scores = ranker.rank(queries, 4)
    for i, query in enumerate(queries):
        alone = ranker.rank([query], 4)
        assert np.array_equal(alone[0][0], ids[i]) and np.array_equal(alone[1][0], scores[i])


def test_queries_without_an_answer():
    """bm25s answers unknown and empty queries with rows 0, 1, 2, and raises when k is larger than the corpus."""
    ranker = Bm25Ranker.build(people()[:2])
    ids, scores = ranker.rank(["", "zzyzx", "the of", "\x00\ud800", "Baro", "Baro " * 5000], 5)
    assert (ids[:4] == -1).all() and np.isneginf(scores[:4]).all()
    assert sorted(ids[4][:2].tolist()) == [0, 1] and (ids[4][2:] == -1).all()
    assert ranker.rank([], 3)[0].shape == (0, 3)
    single = Bm25Ranker.build(people()[:1])
    assert single.rank(["Baro Quill"], 2)[0].tolist() == [[0, -1]]
    with pytest.raises(CorpusError, match="no words"):
        Bm25Ranker.build([Passage("1", "", "?!")])


def test_saved_and_loaded(tmp_path):
    """The index on disk answers otherwise than the one in memory, or holds a pickle that runs foreign code."""
    ranker = Bm25Ranker.build(people())
    ranker.save(tmp_path / "bm25")
    assert {p.suffix for p in (tmp_path / "bm25").iterdir()} == {".npy", ".json"}
    identity = json.loads(json.dumps(ranker.identity))
    loaded = Bm25Ranker.load(tmp_path / "bm25", identity, 320)
    queries = [f"{p.title} born" for p in people()]
    for one, other in zip(loaded.rank(queries, 3), ranker.rank(queries, 3), strict=True):
        assert np.array_equal(one, other)
    for other_identity, rows in ((identity | {"k1": 9.0}, 320), (identity, 319)):
        with pytest.raises(CorpusError, match="params.index.json"):
            Bm25Ranker.load(tmp_path / "bm25", other_identity, rows)
    (tmp_path / "bm25" / "indptr.csc.index.npy").unlink()
    with pytest.raises(CorpusError, match="params.index.json"):
        Bm25Ranker.load(tmp_path / "bm25", identity, 320)


class Fixed:
    """A ranking that is given."""

    def __init__(self, order: list[int], rows: int = 10):
        self.order, self.rows = order, rows

    def rank(self, queries, k):
        padded = (self.order + [-1] * k)[:k]
        return np.array([padded] * len(queries), int).reshape(-1, k), np.zeros((len(queries), k), np.float32)


def test_fusion_by_hand():
    """Ranks counted from another start, a row of -1 that scores, or equal sums in another order."""
    first: Ranker = Fixed([4, 7, 2])
    second: Ranker = Fixed([7, 9])
    ids, scores = HybridRanker([first, second]).rank(["q"], 5)
    one, two, three = (1 / (RANK_OFFSET + rank) for rank in (1, 2, 3))
    assert ids.tolist() == [[7, 4, 9, 2, -1]]
    assert np.allclose(scores[0][:4], [one + two, one, two, three], atol=1e-6) and np.isneginf(scores[0][4])
    assert HybridRanker([Fixed([3, 1]), Fixed([1, 3])]).rank(["q"], 2)[0].tolist() == [[1, 3]]
    assert HybridRanker([Fixed([]), Fixed([])]).rank(["q"], 2)[0].tolist() == [[-1, -1]]
    assert HybridRanker([first, second]).rank([], 2)[0].shape == (0, 2)


def test_fusion_reads_deep():
    """A row that all rankings hold a little below the cut is better than one that a single ranking puts first."""
    shared = list(range(20, 20 + DEPTH - 2))
    rankers = [Fixed([n, *shared], 200) for n in range(4)]
    assert HybridRanker(rankers).rank(["q"], 1)[0].tolist() == [[20]]


def test_fusion_of_two_corpora_is_refused():
    """Rows of different corpora are added up as if they were one passage."""
    with pytest.raises(CorpusError, match=r"\[10, 11\]"):
        HybridRanker([Fixed([1]), Fixed([1], rows=11)])

"""BM25 and the fusion of rankings."""

import json
import math
import shutil
import time

import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN
from helpers import people

from retrieval.protocol import CorpusError, Passage, Ranker
from retrieval.ranking import bm25
from retrieval.ranking.bm25 import K1, STOP_WORDS, TITLE_COUNT, B, Bm25Ranker, Postings, words
from retrieval.ranking.hybrid import DEPTH, RANK_OFFSET, HybridRanker


def by_hand(passages: list[Passage], query: str) -> list[float]:
    """The BM25 formula of Robertson and Zaragoza with Lucene's idf, computed from the words themselves."""
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
    """Scores would follow another BM25 variant, weigh titles otherwise, or count stop words in a passage's length."""
    passages = people()[:40] + [Passage("x", "Moss", "Baro of the moss, moss and more moss in the moss.")]
    ids, scores = Bm25Ranker.build(passages).rank(["Baro Quill", "moss"], 5)
    for query, row, row_scores in zip(["Baro Quill", "moss"], ids, scores, strict=True):
        expected = np.round(by_hand(passages, query), 4)
        order = [i for i in np.argsort(-expected, kind="stable")[:5] if expected[i] > 0]
        assert row[row >= 0].tolist() == order
        assert np.allclose(row_scores[row >= 0], expected[order], atol=2e-4)


def made_up(count: int, vocabulary: int = 60) -> tuple[list[Passage], list[str]]:
    """Passages of few words, so that many scores are equal, and queries, some of which repeat a word."""
    rng = np.random.default_rng(0)
    known = np.array([*sorted(STOP_WORDS)[:5], *(f"w{n}" for n in range(vocabulary))])

    def text(least: int, most: int) -> str:
        return " ".join(known[np.minimum(rng.zipf(1.4, rng.integers(least, most)), len(known)) - 1])

    passages = [Passage(str(n), text(0, 3), text(0, 30)) for n in range(count)]
    return passages, [text(1, 9) for _ in range(70)]


@pytest.fixture(scope="module")
def small() -> tuple[Bm25Ranker, list[str], np.ndarray]:
    passages, queries = made_up(150)
    return Bm25Ranker.build(passages), queries, np.array([by_hand(passages, query) for query in queries])


def test_the_best_are_those_of_the_formula(small):
    """A posting would be lost or counted twice between two blocks, a tie be cut wrongly, or a good row be pruned."""
    ranker, queries, expected = small
    for k in (1, 3, 40, 200):
        ids, scores = ranker.rank(queries, k)
        for row, row_scores, wanted in zip(ids, scores, expected, strict=True):
            count = min(k, int((wanted > 0).sum()))
            assert (row[:count] >= 0).all() and (row[count:] == -1).all() and np.isneginf(row_scores[count:]).all()
            assert len(set(row[:count])) == count
            assert np.allclose(row_scores[:count], -np.sort(-wanted)[:count], atol=2e-4)
            assert np.allclose(row_scores[:count], wanted[row[:count]], atol=2e-4)
            assert np.lexsort((row[:count], -row_scores[:count])).tolist() == list(range(count))


def test_cut_in_any_way(small, monkeypatch):
    """Scores would depend on where a part of the corpus, a block of rows or a piece of the batch ends."""
    ranker, queries, _ = small
    expected = ranker.rank(queries, 5)
    monkeypatch.setattr(bm25, "BLOCK_ROWS", 7)
    monkeypatch.setattr(bm25, "QUERIES_PER_TASK", 3)
    monkeypatch.setattr(bm25, "PART_WORDS", 100)
    again = Bm25Ranker.build(made_up(150)[0])
    for one, other in zip(again._postings, ranker._postings, strict=True):
        assert np.array_equal(one, other)
    for one, other in zip(again.rank(queries, 5), expected, strict=True):
        assert np.array_equal(one, other)


def test_scores_are_those_of_bm25s(small):
    """The formula above might repeat a mistake of the code."""
    library = pytest.importorskip("bm25s")
    passages, queries = made_up(150)
    texts = [words(f"{f'{p.title} ' * TITLE_COUNT}{p.text}") for p in passages]
    peer = library.BM25(k1=K1, b=B, method="lucene")
    peer.index([[w for w in text if w not in STOPWORDS_EN] for text in texts], show_progress=False)
    ids, scores = small[0].rank(queries, 3)
    for query, rows, row_scores in zip(queries, ids, scores, strict=True):
        known = [word for word in words(query) if word in peer.vocab_dict]
        theirs = peer.get_scores(known) if known else np.zeros(len(passages))
        assert np.allclose(row_scores[rows >= 0], theirs[rows[rows >= 0]], atol=2e-4)


def test_words_have_one_case():
    """Signs whose decomposition has capitals, and ß in one of two texts, match nothing."""
    assert words("Sony™ №5 ℝ Straße ÉCOLE") == ["sonytm", "no5", "r", "strasse", "ecole"]


def test_words_with_vowel_signs():
    """Words of Hindi, Tamil and Thai would be cut at every vowel sign, and match by single letters."""
    assert words("हिन्दी की भाषा, தமிழ் กิน़") == ["हिनदी", "की", "भाषा", "தமிழ", "กิน"]
    assert words("naïve_x (É) ½-№") == ["naive_x", "e", "1", "2", "no"]
    assert words("I\u2764\ufe0f1\ufe0f\u20e3 co\u00adop \ufeffa\u200bb") == ["i", "1", "coop", "a", "b"]


def test_words_of_any_script():
    """A word would match one that begins like it, or byte order would not match letter order."""
    names = ["bar", "baro", "baros", "zebra", "東京", "東", "ω", "ωμ", "_x", "9", "ß"]
    ranker = Bm25Ranker.build([Passage(name, name, "") for name in names])
    ids, _ = ranker.rank(["ba", "b", "東京都", "zz", "", *names], 2)
    assert (ids[:5] == -1).all()
    assert ids[5:].tolist() == [[n, -1] for n in range(len(names))]


def test_a_million_passages_are_searched_in_seconds():
    """Adding up and sorting the scores of all passages would take a tenth of a second per query: minutes per step."""
    rows, known, rng = 2**20, 2000, np.random.default_rng(0)
    sizes = np.maximum(rows // (4 * np.arange(1, known + 1)), 50)  # 2 M postings in all, the longest 260,000
    held = np.concatenate([np.sort(rng.choice(rows, size, replace=False)) for size in sizes]).astype(np.int32)
    text = "".join(f"{n:04d}" for n in range(known)).encode()
    arrays = Postings(
        np.frombuffer(text, np.uint8),
        np.arange(4, len(text) + 1, 4),
        np.concatenate([[0], np.cumsum(sizes)]),
        held,
        rng.random(len(held), np.float32),
    )
    ranker = Bm25Ranker(arrays, rows)
    queries = [" ".join(f"{n:04d}" for n in np.minimum(rng.zipf(1.2, 8), known) - 1) for _ in range(1279)]
    ranker.rank(queries[:2], 3)  # compiles
    start = time.perf_counter()
    ids, _ = ranker.rank(queries, 3)
    assert time.perf_counter() - start < 10
    assert (ids >= 0).all()


def test_every_passage_by_its_name():
    """Names would be cut into pieces, or upper case or accents would keep a word from matching."""
    ranker = Bm25Ranker.build([*people(), Passage("e", "José Čapek", "Wrote plays.")])
    ids, _ = ranker.rank([f"When was {p.title.upper()} born?" for p in people()] + ["jose capek"], 1)
    assert ids[:, 0].tolist() == list(range(321))


def test_ties_go_to_the_lower_row():
    """The order of equal passages would be arbitrary, so that a replay differs."""
    passages = [Passage(str(i), "Same", "words") for i in range(50)] + [Passage("z", "Other", "thing")]
    ids, _ = Bm25Ranker.build(passages).rank(["same words"], 3)
    assert ids.tolist() == [[0, 1, 2]]


def test_company_makes_no_difference():
    """A ranking that depends on the rest of its batch could not be replayed."""
    ranker = Bm25Ranker.build(people())
    queries = [f"{p.title} born" for p in people()[:60]]
    ids, scores = ranker.rank(queries, 4)
    for i, query in enumerate(queries):
        alone = ranker.rank([query], 4)
        assert np.array_equal(alone[0][0], ids[i]) and np.array_equal(alone[1][0], scores[i])


def test_queries_without_an_answer():
    """Unknown and empty queries would return the first rows, or k could not exceed the size of the corpus."""
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
    """The index on disk would rank differently from the one in memory, or contain a pickle that runs foreign code."""
    ranker = Bm25Ranker.build(people())
    Bm25Ranker.build(people(), tmp_path / "bm25")
    assert {p.suffix for p in (tmp_path / "bm25").iterdir()} == {".npy", ".json"}
    identity = json.loads(json.dumps(ranker.identity))
    loaded = Bm25Ranker.load(tmp_path / "bm25", identity, 320)
    queries = [f"{p.title} born" for p in people()]
    for one, other in zip(loaded.rank(queries, 3), ranker.rank(queries, 3), strict=True):
        assert np.array_equal(one, other)
    for other_identity in (identity | {"k1": 9.0}, identity | {"version": 1}):
        with pytest.raises(CorpusError, match="bm25: made as .*build it again"):
            Bm25Ranker.load(tmp_path / "bm25", other_identity, 320)
    with pytest.raises(CorpusError, match="settings.json: 320 passages, the manifest says 319"):
        Bm25Ranker.load(tmp_path / "bm25", identity, 319)
    damages = {
        "rows.npy": lambda path: np.save(path, np.load(path)[:-1]),
        "weights.npy": lambda path: np.save(path, np.load(path).astype(np.float64)),
        "posting_starts.npy": lambda path: np.save(path, np.zeros(0, np.int64)),
        "words.npy": lambda path: path.write_bytes(b""),
        "word_ends.npy": lambda path: np.save(path, np.array(["", None], object)),
        "settings.json": lambda path: path.write_text("[]"),
    }
    for name, damage in damages.items():
        copy = shutil.copytree(tmp_path / "bm25", tmp_path / "copy")
        damage(copy / name)
        with pytest.raises(CorpusError, match="settings.json") as error:
            Bm25Ranker.load(copy, identity, 320)
        assert "\n" not in str(error.value)
        shutil.rmtree(copy)
    (tmp_path / "bm25" / "rows.npy").unlink()
    with pytest.raises(CorpusError, match="settings.json"):
        Bm25Ranker.load(tmp_path / "bm25", identity, 320)


def test_damaged_postings_end_nothing(small):
    """Opening an index checks only a sample of its bytes: a row far outside the corpus would crash the server."""
    ranker, queries, _ = small
    rng, arrays = np.random.default_rng(0), ranker._postings
    size = len(arrays.rows)
    wild = rng.integers(-(2**31), 2**31, size).astype(np.int32)
    starts = rng.integers(-(2**62), 2**62, len(arrays.posting_starts))
    for damage in ({"rows": wild}, {"posting_starts": starts}, {"rows": wild, "posting_starts": starts}):
        ids, _ = Bm25Ranker(arrays._replace(**damage), ranker.rows).rank(queries, 5)
        assert ids.min() >= -1 and ids.max() < ranker.rows


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    """The arrays are files with holes: writing into one on a full disk would kill the process with SIGBUS."""
    taken = []

    def full(descriptor: int, offset: int, size: int) -> None:
        taken.append(size)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="words.npy takes"):
        Bm25Ranker.build(people(), tmp_path / "bm25")
    assert taken == [(tmp_path / "bm25" / "words.npy").stat().st_size]


class Fixed:
    """A ranker that always returns the same ranking."""

    def __init__(self, order: list[int], rows: int = 10):
        self.order, self.rows = order, rows

    def rank(self, queries, k):
        padded = (self.order + [-1] * k)[:k]
        return np.array([padded] * len(queries), int).reshape(-1, k), np.zeros((len(queries), k), np.float32)


def test_fusion_by_hand():
    """Ranks would start at another number, a row of -1 would score, or equal sums would be ordered otherwise."""
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
    """Rows below rank k would be lost, although one in all rankings can beat one that a single ranking puts first."""
    shared = list(range(20, 20 + DEPTH - 2))
    rankers = [Fixed([n, *shared], 200) for n in range(4)]
    assert HybridRanker(rankers).rank(["q"], 1)[0].tolist() == [[20]]


def test_fusion_of_two_corpora_is_refused():
    """Rows of different corpora would be added up as if they were the same passage."""
    with pytest.raises(CorpusError, match=r"\[10, 11\]"):
        HybridRanker([Fixed([1]), Fixed([1], rows=11)])

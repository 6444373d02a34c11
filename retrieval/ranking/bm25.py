"""BM25 over words: no weights, no training, hard to beat on names and rare words.

Robertson and Zaragoza 2009, with Lucene's form of the weights, computed at indexing time (Lu 2024, BM25S). A word's
postings are the passages that contain it, in corpus order. An index is a list of the V words in alphabetical order and
three memory-mapped arrays, a sparse matrix [passages, words] by columns:

    words.json
    starts.npy [V+1]            where each word's postings start
    rows.npy, weights.npy [P]   per posting the passage, and what the word adds to its score

The library bm25s stores the same arrays, but importing it runs a JAX computation, which takes the accelerator from
other processes, and its selection of the best passages cuts ties arbitrarily.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regex
from sklearn.feature_extraction.text import CountVectorizer
from tqdm import tqdm

from retrieval.protocol import CorpusError, Passage
from retrieval.ranking.index import empty_result

VERSION = 6  # raise it with any change to scores or files: older indexes are then refused
SCORE_DECIMALS = 4
K1, B = 1.2, 0.75
# A title counts as three occurrences in the text: with 994 HotpotQA passages, 0.72 of the supporting passages are then
# in the top 3 of their question (0.68 with the title counted once).
TITLE_COUNT = 3
# Lucene's English stop words.
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
WORDS = "words.json"
BLOCK_ROWS = 2**18  # passages scored at a time: their sums stay in a core's cache
_WORD = regex.compile(r"[\w\p{M}]+")
# Accents and other marks, soft hyphens, joiners and byte order marks; a space of no width separates words.
_ACCENTS = regex.compile(r"[\P{ccc=0}\p{Me}\p{VS}]|(?!\u200b)\p{Cf}")


class Postings(NamedTuple):
    """The arrays of an index; see the module docstring."""

    starts: np.ndarray  # [V+1] int64
    rows: np.ndarray  # [P] int32, ascending within a word
    weights: np.ndarray  # [P] float32, above 0


class Bm25Ranker:
    """Implements `Ranker`. Words are lower-cased and stripped of accents; English stop words are skipped."""

    name = "bm25"
    identity = {"name": name, "version": VERSION, "k1": K1, "b": B, "title_count": TITLE_COUNT}

    def __init__(self, vocabulary: Sequence[str], postings: Postings, rows: int):
        """`vocabulary` and `postings` of a corpus of `rows` passages."""
        self.rows = rows
        self._numbers = {word: number for number, word in enumerate(vocabulary)}
        self._postings = postings

    @classmethod
    def build(cls, passages: Sequence[Passage], directory: Path | None = None) -> Bm25Ranker:
        """Index the titles and texts of `passages` into the new `directory`, or in memory without one.

        Building holds about 26 bytes per posting in memory: some 30 GB for the 21 million passages of wiki-18.

        Raises:
          CorpusError: the passages contain no word.
        """
        rows = tqdm(range(len(passages)), "reading words", unit=" rows", delay=2, disable=None)
        texts = (" ".join([passages[row].title] * TITLE_COUNT + [passages[row].text]) for row in rows)
        vectorizer = CountVectorizer(
            analyzer=lambda text: [word for word in words(text) if word not in STOP_WORDS], dtype=np.float32
        )
        try:
            counts = vectorizer.fit_transform(texts)
        except ValueError:  # an empty vocabulary
            raise CorpusError("the corpus holds no words that BM25 could search for") from None
        lengths = np.asarray(counts.sum(axis=1)).ravel()
        postings = _weigh(counts.tocsc(), lengths)
        vocabulary = vectorizer.get_feature_names_out().tolist()
        if directory is not None:
            directory.mkdir()
            for name, values in postings._asdict().items():
                np.save(directory / f"{name}.npy", values)
            (directory / WORDS).write_text(json.dumps(vocabulary), encoding="utf-8")
        return cls(vocabulary, postings, len(passages))

    @classmethod
    def load(cls, directory: Path, identity: dict[str, Any], rows: int) -> Bm25Ranker:
        """Map the index that `build` wrote. Raises `CorpusError` when it is not the one of `identity` and `rows`."""
        if identity != cls.identity:
            raise CorpusError(f"{directory}: made as {identity}, this program reads {cls.identity}; build it again")
        try:
            vocabulary = json.loads((directory / WORDS).read_bytes())
            starts, rows_of, weights = (
                np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in Postings._fields
            )
            # A posting outside the corpus would end a search long after the start.
            valid = (
                (len(starts), len(rows_of), len(weights)) == (len(vocabulary) + 1, starts[-1], starts[-1])
                and (starts[0], np.diff(starts).min() > 0) == (0, True)
                and rows_of.dtype == np.int32
                and 0 <= rows_of.min() <= rows_of.max() < rows
            )
        except (OSError, EOFError, ValueError, TypeError, IndexError) as error:
            raise CorpusError(f"{directory}: the BM25 index cannot be read ({error}); build it again") from None
        if not valid:
            raise CorpusError(f"{directory}: the files are not of one index of {rows} passages; build it again")
        return cls(vocabulary, Postings(starts, rows_of, weights), rows)

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ranker.rank`; a score is the sum of the weights of a query's words, and only scores above 0 count."""
        ids, scores = empty_result(len(queries), k)

        def search(number: int) -> None:
            rows, units = self._search(queries[number], k)
            ids[number, : len(rows)], scores[number, : len(rows)] = rows, units / 10**SCORE_DECIMALS

        with ThreadPoolExecutor(min(max(1, len(queries)), os.cpu_count() or 1)) as pool:
            list(pool.map(search, range(len(queries))))
        return ids, scores

    def _search(self, query: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The at most k best rows of one query, best first, and their scores times 10**SCORE_DECIMALS."""
        counts = Counter(self._numbers[word] for word in words(query) if word in self._numbers)
        postings = []  # of each word: rows, weights
        for number in sorted(counts):  # so that the order of words does not change the last bits of a sum
            span = slice(self._postings.starts[number], self._postings.starts[number + 1])
            postings.append((self._postings.rows[span], self._postings.weights[span] * np.float64(counts[number])))
        best, best_units = np.zeros(0, np.int64), np.zeros(0)
        for first in range(0, self.rows if postings else 0, BLOCK_ROWS):
            sums = np.zeros(min(BLOCK_ROWS, self.rows - first))
            for rows, weights in postings:
                start, stop = np.searchsorted(rows, (first, first + len(sums)))
                sums[rows[start:stop] - first] += weights[start:stop]  # a word has each row once
            least = best_units[-1] if len(best) == k else 1
            candidates = np.flatnonzero(sums * 10**SCORE_DECIMALS >= least - 0.5)
            units = np.rint(sums[candidates] * 10**SCORE_DECIMALS)
            if len(units) > k:
                kept = units >= max(1, np.partition(units, -k)[-k])
                candidates, units = candidates[kept], units[kept]
            best, units = np.concatenate([best, candidates + first]), np.concatenate([best_units, units])
            order = np.lexsort((best, -units))[:k]
            best, best_units = best[order], units[order]
        return best[best_units > 0], best_units[best_units > 0]


def words(text: str) -> list[str]:
    """Lower-case words of letters, digits and underscores, with vowel signs and without accents.

    The vowel signs of Indic and Thai words are marks, but not accents.
    """
    # Decomposed first: the decomposition of some signs, such as ™, has capitals.
    return _WORD.findall(_ACCENTS.sub("", unicodedata.normalize("NFKD", text).casefold()))


def _weigh(counts: Any, lengths: np.ndarray) -> Postings:
    """The weight of each entry of `counts` [N, V], the occurrences of words in passages by columns.

    weight = ln(1 + (N - n + .5) / (n + .5)) f / (f + k1 (1 - b + b length / mean length)), for a word that occurs in n
    of the N passages and f times in this one (Robertson and Zaragoza 2009, equation 3.15, with Lucene's idf).
    """
    passages = np.diff(counts.indptr)
    idf = np.log1p((len(lengths) - passages + 0.5) / (passages + 0.5)).astype(np.float32)
    length_norm = (K1 * (1 - B + B * lengths / lengths.mean())).astype(np.float32)
    weights = counts.data / (counts.data + length_norm[counts.indices])
    weights *= np.repeat(idf, passages)
    return Postings(counts.indptr.astype(np.int64), counts.indices.astype(np.int32), weights)

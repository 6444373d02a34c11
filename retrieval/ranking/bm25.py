"""BM25 over words: no weights, no training, hard to beat on names and rare words.

Robertson and Zaragoza 2009, with Lucene's form of the weights, computed at indexing time (Lu 2024, BM25S). A word's
postings are the passages that contain it, in corpus order. An index is five memory-mapped arrays:

    words.npy, word_ends.npy            the V words as UTF-8, concatenated in byte order
    posting_starts.npy [V+1]            where each word's postings start
    rows.npy, weights.npy [P]           per posting the passage, and what the word adds to its score
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import unicodedata
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from retrieval.protocol import CorpusError, Passage
from retrieval.ranking.budget import reserve

VERSION = 4  # raise it with any change to scores or files: older indexes are then refused
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
SETTINGS = "settings.json"
PART_WORDS = 2**24  # words sorted at a time while building: about 1 GB
BLOCK_ROWS = 8192  # rows scored at a time: their sums stay in a core's cache
QUERIES_PER_TASK = 16
_WORD = re.compile(r"\w+")


class Postings(NamedTuple):
    """The arrays of an index; see the module docstring."""

    words: np.ndarray  # uint8
    word_ends: np.ndarray  # [V] int64
    posting_starts: np.ndarray  # [V+1] int64
    rows: np.ndarray  # [P] int32, ascending within a word
    weights: np.ndarray  # [P] float32, above 0


DTYPES = dict(zip(Postings._fields, map(np.dtype, ("u1", "i8", "i8", "i4", "f4")), strict=True))


class Bm25Ranker:
    """Implements `Ranker`. Words are lower-cased and stripped of accents; English stop words are skipped."""

    name = "bm25"

    def __init__(self, postings: Postings, rows: int):
        """`postings` of a corpus of `rows` passages."""
        self.rows = rows
        self._postings = Postings(*map(_plain, postings))
        # Reading one element is ten times as fast as from an array.
        self._words, self._word_ends = self._postings.words.data, self._postings.word_ends.data

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for scores to be equal, as JSON values."""
        return _identity()

    @classmethod
    def build(cls, passages: Sequence[Passage], directory: Path | None = None) -> Bm25Ranker:
        """Index the titles and texts of `passages` into the new `directory`, or in memory without one.

        With a directory, memory holds the vocabulary, 12 bytes per passage and one part of the postings.

        Raises:
          CorpusError: the passages contain no word.
          OSError: the disk is full or cannot be written.
        """
        if directory is not None:
            directory.mkdir()
        with tempfile.TemporaryFile(dir=directory) as parts:
            ids, lengths, passage_counts = _read_words(passages, parts)
            if not ids:
                raise CorpusError("the corpus holds no words that BM25 could search for")
            postings = _weigh(ids, lengths, passage_counts, parts, _places(directory))
        if directory is None:
            return cls(postings, len(passages))
        for values in postings:
            if isinstance(values, np.memmap):
                values.flush()
        (directory / SETTINGS).write_text(json.dumps({"rows": len(passages)}) + "\n", encoding="utf-8")
        return cls.load(directory, _identity(), len(passages))

    @classmethod
    def load(cls, directory: Path, identity: dict[str, Any], rows: int) -> Bm25Ranker:
        """Map the index that `build` wrote. Raises `CorpusError` when it is not the one of `identity` and `rows`."""
        if identity != _identity():
            raise CorpusError(f"{directory}: made as {identity}, this program reads {_identity()}; build it again")
        settings = directory / SETTINGS
        try:
            stored_rows = json.loads(settings.read_bytes())["rows"]
            postings = Postings(
                *(np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in Postings._fields)
            )
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{settings}: the BM25 index cannot be read ({error})") from None
        if stored_rows != rows:
            raise CorpusError(f"{settings}: {stored_rows} passages, the manifest says {rows}; build the index again")
        starts, sizes = postings.posting_starts, [len(array) for array in postings]
        valid = [array.dtype for array in postings] == list(DTYPES.values()) and len(starts) > 1
        if not valid or sizes[1:] != [sizes[1], sizes[1] + 1, starts[-1], starts[-1]]:
            raise CorpusError(f"{settings}: the arrays in this folder are not of one index; build it again")
        return cls(postings, rows)

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ranker.rank`; a score is the sum of the weights of a query's words, and only scores above 0 count."""
        ids = np.full((len(queries), k), -1, np.int64)
        units = np.full((len(queries), k), -np.inf)  # scores times 10**SCORE_DECIMALS
        if not queries or not k:
            return ids, units.astype(np.float32)
        search, p = _compiled(), self._postings

        def task(start: int) -> None:
            part = slice(start, start + QUERIES_PER_TASK)
            known = [self._known(query) for query in queries[part]]
            ends = np.cumsum([len(numbers) for numbers in known])
            words_ = np.array([word for numbers in known for word in numbers], np.int64)
            counts = np.array([count for numbers in known for count in numbers.values()], np.float64)
            search(
                p.posting_starts, p.rows, p.weights, self.rows, ends, words_, counts,
                BLOCK_ROWS, 10.0**SCORE_DECIMALS, ids[part], units[part],
            )  # fmt: skip

        starts = range(0, len(queries), QUERIES_PER_TASK)
        if len(starts) == 1:
            task(0)
        else:
            with ThreadPoolExecutor(min(len(starts), _cores())) as pool:
                list(pool.map(task, starts))
        return ids, (units / 10.0**SCORE_DECIMALS).astype(np.float32)

    def _known(self, query: str) -> dict[int, int]:
        """The word numbers of the query's words that occur in the corpus, ascending, each with its count."""
        counts = {self._number(word): count for word, count in Counter(words(query)).items()}
        return {number: counts[number] for number in sorted(counts) if number >= 0}

    def _number(self, word: str) -> int:
        """The position of `word` in the vocabulary, or -1."""
        text, ends, wanted = self._words, self._word_ends, word.encode()

        def stored(number: int) -> bytes:
            return bytes(text[ends[number - 1] if number else 0 : ends[number]])

        number = bisect_left(range(len(ends)), wanted, key=stored)
        return number if number < len(ends) and stored(number) == wanted else -1


def words(text: str) -> list[str]:
    """Lower-case words of letters, digits and underscores, with vowel signs and without accents."""
    lower = text.lower()
    if lower.isascii():
        return _WORD.findall(lower)
    # Decomposed first: the decomposition of some signs, such as ™, has capitals.
    return unicodedata.normalize("NFKD", text).casefold().translate(_LETTERS).split()


class _Letters(dict[int, str]):
    """A table for `str.translate`, filled as characters are met: "" for accents and other signs, " " between words.

    The vowel signs of Indic and Thai words are marks (category M), which `\\w` does not match, but not accents.
    """

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        category, name = unicodedata.category(letter), unicodedata.name(letter, "")
        if unicodedata.combining(letter) or category == "Me" or "VARIATION SELECTOR" in name:
            self[code] = ""
        elif category == "Cf" and name != "ZERO WIDTH SPACE":  # soft hyphens, joiners, byte order marks
            self[code] = ""
        else:
            self[code] = letter if letter.isalnum() or letter == "_" or category.startswith("M") else " "
        return self[code]


_LETTERS = _Letters()


def _identity() -> dict[str, Any]:
    return {"name": Bm25Ranker.name, "version": VERSION, "k1": K1, "b": B, "title_count": TITLE_COUNT}


def _read_words(passages: Sequence[Passage], parts: BinaryIO) -> tuple[dict[str, int], np.ndarray, np.ndarray]:
    """Write the words of all passages to `parts` (see `_write_part`).

    Returns a number for each word in order of appearance [V], the length of each passage in words [N] int32, and how
    many passages contain each word [V] int64.
    """
    ids: dict[str, int] = {}
    lengths, passage_counts = np.zeros(len(passages), np.int32), np.zeros(0, np.int64)
    word_ids, first = array("i"), 0  # the words of the passages from row `first` on
    for row in tqdm(range(len(passages)), "reading words", unit=" rows", delay=2, disable=None):
        passage = passages[row]
        text = " ".join([passage.title] * TITLE_COUNT + [passage.text])
        before = len(word_ids)
        word_ids.extend([ids.setdefault(word, len(ids)) for word in words(text) if word not in STOP_WORDS])
        lengths[row] = len(word_ids) - before
        if len(word_ids) >= PART_WORDS or row == len(passages) - 1:
            posted = _write_part(parts, np.frombuffer(word_ids, np.int32), lengths[first : row + 1], first)
            passage_counts = np.pad(passage_counts, (0, len(ids) - len(passage_counts))) + np.bincount(
                posted, minlength=len(ids)
            )
            word_ids, first = array("i"), row + 1
    return ids, lengths, passage_counts


def _write_part(parts: BinaryIO, said: np.ndarray, lengths: np.ndarray, first: int) -> np.ndarray:
    """Append P and three int32 arrays [P], sorted by (word, row): words, rows, and counts. Returns the words [P]."""
    rows = np.repeat(np.arange(first, first + len(lengths)), lengths)
    pairs, counts = np.unique(said.astype(np.int64) << 32 | rows, return_counts=True)
    posted = (pairs >> 32).astype(np.int32)
    parts.write(np.int64(len(pairs)).tobytes())
    for values in (posted, pairs & 0xFFFFFFFF, counts):
        parts.write(values.astype(np.int32).tobytes())
    return posted


def _weigh(
    ids: dict[str, int],
    lengths: np.ndarray,
    passage_counts: np.ndarray,
    parts: BinaryIO,
    place: Callable[..., np.ndarray],
) -> Postings:
    """Sort the parts by word into arrays created by `place(name, size)`, with the weight of each posting.

    weight = ln(1 + (N - n + .5) / (n + .5)) f / (f + k1 (1 - b + b length / mean length)), for a word that occurs in n
    of the N passages and f times in this one (Robertson and Zaragoza 2009, equation 3.15, with Lucene's idf).
    """
    in_order = sorted(ids, key=str.encode)
    order = np.fromiter((ids[word] for word in in_order), np.int64, len(ids))
    text = "".join(in_order).encode()
    sizes = (len(text), len(ids), len(ids) + 1, int(passage_counts.sum()), int(passage_counts.sum()))
    out = Postings(*(place(name, size) for name, size in zip(Postings._fields, sizes, strict=True)))
    out.words[:] = np.frombuffer(text, np.uint8)
    out.word_ends[:] = np.cumsum([len(word.encode()) for word in in_order])
    out.posting_starts[0], out.posting_starts[1:] = 0, np.cumsum(passage_counts[order])
    free = np.empty(len(ids), np.int64)  # where the next posting of a word goes
    free[order] = out.posting_starts[:-1]
    idf = np.log1p((len(lengths) - passage_counts + 0.5) / (passage_counts + 0.5))
    length_norm = K1 * (1 - B + B * lengths / lengths.mean())
    parts.seek(0)
    while head := parts.read(8):
        size = int(np.frombuffer(head, np.int64)[0])
        posted, rows, counts = np.frombuffer(parts.read(12 * size), np.int32).reshape(3, size)
        present, starts, sizes_ = np.unique(posted, return_index=True, return_counts=True)
        target = np.arange(size) + np.repeat(free[present] - starts, sizes_)
        out.rows[target] = rows
        out.weights[target] = idf[posted] * counts / (counts + length_norm[rows])
        free[present] += sizes_
    return out


def _places(directory: Path | None) -> Callable[[str, int], np.ndarray]:
    """A function that creates an array of an index: in memory, or as a file in `directory` with its disk reserved."""

    def place(name: str, size: int) -> np.ndarray:
        dtype = DTYPES[name]
        if directory is None:
            return np.empty(size, dtype)
        mapped = np.lib.format.open_memmap(directory / f"{name}.npy", "w+", dtype, (size,))
        reserve(directory / f"{name}.npy", (directory / f"{name}.npy").stat().st_size)
        return mapped

    return place


def _plain(values: np.ndarray) -> np.ndarray:
    """A read-only view of type ndarray, not memmap, so that numba compiles one program."""
    view = np.asarray(values).view(np.ndarray)
    view.flags.writeable = False
    return view


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _compiled() -> Callable[..., None]:
    from numba import njit  # imported late: other retrievers do not need it

    try:
        return njit(nogil=True, cache=True)(_search)
    except RuntimeError:  # no writable cache folder: every process compiles
        return njit(nogil=True)(_search)


def _search(
    posting_starts: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray,
    total_rows: int,
    query_ends: np.ndarray,
    query_words: np.ndarray,
    query_counts: np.ndarray,
    block_rows: int,
    unit: float,
    out_rows: np.ndarray,
    out_scores: np.ndarray,
) -> None:
    """Fill `out_rows` and `out_scores` [Q, K] with the best rows of each query; scores are rint(score * unit).

    Compiled, one thread. All postings of a query are processed one block of rows at a time. A block is scanned only if
    its best sum is above the K-th best score so far. Rows ascend, so at equal scores the earlier row ranks first.
    Damaged postings give wrong rows, but no access outside the arrays.
    """
    sums = np.zeros(block_rows)
    first = 0
    for query in range(len(query_ends)):
        numbers, counts = query_words[first : query_ends[query]], query_counts[first : query_ends[query]]
        first = query_ends[query]
        at = np.minimum(np.maximum(posting_starts[numbers], 0), len(rows))
        ends = np.minimum(posting_starts[numbers + 1], len(rows))
        best, best_rows = out_scores[query], out_rows[query]
        filled, last = 0, len(best) - 1
        for block in range(0, total_rows, block_rows):
            stop, top = min(block + block_rows, total_rows), 0.0
            for word in range(len(numbers)):
                place, end, count = at[word], ends[word], counts[word]
                while place < end and rows[place] < stop:
                    here = rows[place] - block
                    if here >= 0:
                        sums[here] += count * weights[place]
                        top = max(top, sums[here])
                    place += 1
                at[word] = place
            if np.rint(top * unit) > max(best[last], 0.0):
                for here in range(stop - block):
                    score = np.rint(sums[here] * unit)
                    if score > max(best[last], 0.0):
                        filled = min(filled + 1, last + 1)
                        spot = filled - 1  # every row after the new one moves down by one
                        while spot > 0 and best[spot - 1] < score:
                            best[spot], best_rows[spot] = best[spot - 1], best_rows[spot - 1]
                            spot -= 1
                        best[spot], best_rows[spot] = score, block + here
            if top > 0:
                sums[: stop - block] = 0

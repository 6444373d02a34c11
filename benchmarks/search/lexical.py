"""BM25 over synthetic passages, compared with bm25s and tantivy if they are installed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.protocol import Passage
from retrieval.ranking.bm25 import K1, STOP_WORDS, TITLE_COUNT, B, Bm25Ranker, words

K = 3
VOCABULARY = 500_000
TITLE_WORDS, TEXT_WORDS, QUERY_WORDS = 2, 100, 8
Search = Callable[[list[str], int], list[list[int]]]


class MadeUp(Sequence[Passage]):
    """Passages whose words follow Zipf's law with exponent 1; the 33 most frequent are stop words, as in English."""

    def __init__(self, count: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        known = np.array([*sorted(STOP_WORDS), *(f"w{n}" for n in range(VOCABULARY - len(STOP_WORDS)))], object)
        share = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
        self._texts: list[str] = []
        for start in range(0, count, 10_000):
            draws = rng.random((min(10_000, count - start), TITLE_WORDS + TEXT_WORDS)) * share[-1]
            self._texts += [" ".join(line) for line in known[np.searchsorted(share, draws)].tolist()]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: int) -> Passage:
        parts = self._texts[row].split(" ", TITLE_WORDS)
        return Passage(str(row), " ".join(parts[:TITLE_WORDS]), parts[TITLE_WORDS])

    def queries(self, count: int, seed: int = 1) -> list[str]:
        """Each query is words sampled from one passage, including stop words."""
        rng = np.random.default_rng(seed)
        rows = rng.integers(len(self), size=count)
        return [" ".join(rng.choice(self[int(row)].text.split(), QUERY_WORDS)) for row in rows]


def compare(rows: int, queries: int, peers: bool, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Seconds to index `rows` passages and answer `queries`, and how often a peer's best passage equals ours."""
    passages = MadeUp(rows)
    asked = passages.queries(queries)
    methods: dict[str, Callable[[Sequence[Passage], Path], Search]] = {"this project": ours}
    if peers and find_spec("bm25s"):
        methods["bm25s, numba"] = of_bm25s
    if peers and find_spec("tantivy"):
        methods["tantivy"] = of_tantivy
    lines, best = [], None
    for name, build in methods.items():
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            search = build(passages, Path(folder) / "index")
            built = time.perf_counter() - start
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            search(asked[: queries // 4], K)  # compiles, and loads the files into memory
            start = time.perf_counter()
            rankings = search(asked, K)
            seconds = time.perf_counter() - start
        best = best or rankings
        same = np.mean([one[:1] == other[:1] for one, other in zip(rankings, best, strict=True)])
        figures = {"seconds": round(seconds, 2), "ms_per_query": round(1000 * seconds / queries, 2)}
        lines.append(
            {"rows": rows, "queries": queries, "method": name, **figures, "build_s": round(built)}
            | {"GB_on_disk": round(size / 1e9, 2), "top1_agreement": round(float(same), 3)}
        )
        log(str(lines[-1]))
    return lines


def ours(passages: Sequence[Passage], folder: Path) -> Search:
    ranker = Bm25Ranker.build(passages, folder)
    return lambda asked, k: ranker.rank(asked, k)[0].tolist()


def of_bm25s(passages: Sequence[Passage], folder: Path) -> Search:
    import bm25s

    cores = len(os.sched_getaffinity(0))
    tokenizer = bm25s.tokenization.Tokenizer(lower=False, splitter=words, stopwords="en")
    ids = list(tokenizer.streaming_tokenize((_text(passage) for passage in passages), allow_empty=False))
    index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numba")
    index.index((ids, tokenizer.get_vocab_dict()), show_progress=False, create_empty_token=False)
    index.save(folder, show_progress=False)

    def search(asked: list[str], k: int) -> list[list[int]]:
        known = [[word for word in words(query) if word in index.vocab_dict] for query in asked]
        return index.retrieve(known, k=k, n_threads=cores, show_progress=False, return_as="documents").tolist()

    return search


def of_tantivy(passages: Sequence[Passage], folder: Path) -> Search:
    from concurrent.futures import ThreadPoolExecutor

    import tantivy

    schema = tantivy.SchemaBuilder()
    schema.add_integer_field("row", stored=True)
    schema.add_text_field("text", tokenizer_name="whitespace", index_option="freq")
    folder.mkdir()
    index = tantivy.Index(schema.build(), path=str(folder))
    writer = index.writer(heap_size=1_000_000_000)
    for row, passage in enumerate(passages):
        kept = [word for word in words(_text(passage)) if word not in STOP_WORDS]
        writer.add_document(tantivy.Document(row=row, text=" ".join(kept)))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    searcher = index.searcher()

    def one(query: str, k: int) -> list[int]:
        kept = [word for word in words(query) if word not in STOP_WORDS]
        hits = searcher.search(index.parse_query(" ".join(kept), ["text"]), k).hits if kept else []
        return [searcher.doc(address)["row"][0] for _, address in hits]

    def search(asked: list[str], k: int) -> list[list[int]]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda query: one(query, k), asked))

    return search


def _text(passage: Passage) -> str:
    return " ".join([passage.title] * TITLE_COUNT + [passage.text])

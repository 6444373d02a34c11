"""`launch/bench.py recall`: the share of supporting passages that each retriever returns for real questions.

Questions are FlashRAG jsonl rows whose metadata has `supporting_titles`; the corpus is as for launch/build_index.py.
`question@n` is the share of questions of which all supporting passages are among the n first results for the question
itself, `titles@n` for one search per supporting title (ideal sub-queries) that together return n passages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from retrieval.corpora import open_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.encoding import encode_corpus
from retrieval.protocol import Encoder, Passage, Ranker
from retrieval.ranking.bm25 import Bm25Ranker
from retrieval.ranking.index import DenseRanker, ScannIndex

PASSAGES = (3, 6)  # the total over all searches of a question


def main(argv: Sequence[str]) -> None:
    parser = timing.make_parser("recall", __doc__)
    parser.add_argument("--questions", required=True, help="FlashRAG jsonl with metadata.supporting_titles")
    parser.add_argument("--corpus", required=True, help="corpus as for launch/build_index.py")
    parser.add_argument("--encoder", help="directory of a BERT encoder, which adds a row")
    flags = parser.parse_args(argv)
    corpus = open_corpus(flags.corpus)
    rows = [json.loads(line) for line in Path(flags.questions).read_bytes().splitlines() if line.strip()]
    rankers: dict[str, Ranker] = {
        "hashing": exact_ranker(corpus, HashingEncoder().fit(corpus)),
        "BM25": Bm25Ranker.build(corpus),
    }
    if flags.encoder:
        from retrieval.encoders.encoder import BertEncoder

        rankers["encoder"] = exact_ranker(corpus, BertEncoder.from_model(flags.encoder))
    lines = []
    for kind in ("all", *sorted({row["metadata"]["type"] for row in rows})):
        asked = [row for row in rows if kind in ("all", row["metadata"]["type"])]
        for name, ranker in rankers.items():
            lines.append({"retriever": name, "type": kind, "questions": len(asked)} | measure(ranker, corpus, asked))
    timing.report(flags, "recall", lines)


def exact_ranker(corpus: Sequence[Passage], encoder: Encoder) -> DenseRanker:
    """Exact search over the vectors of a small corpus."""
    return DenseRanker(ScannIndex.from_vectors(encode_corpus(corpus, encoder)), encoder)


def measure(ranker: Ranker, corpus: Sequence[Passage], questions: list[dict[str, Any]]) -> dict[str, float]:
    """Mean share of supporting titles for the question, and the shares of questions with all of them."""
    figures = {}
    for total in PASSAGES:
        rankings, _ = ranker.rank([row["question"] for row in questions], total)
        shares = [share_of_titles(row, corpus, ids) for row, ids in zip(questions, rankings, strict=True)]
        if total == PASSAGES[0]:
            figures[f"titles in the top {total}"] = float(np.mean(shares))
        figures[f"question@{total}"] = float(np.mean(np.equal(shares, 1)))
        split = [share_of_titles(row, corpus, search_titles(ranker, row, total)) for row in questions]
        figures[f"titles@{total}"] = float(np.mean(np.equal(split, 1)))
    return {name: round(figure, 3) for name, figure in figures.items()}


def search_titles(ranker: Ranker, row: dict[str, Any], total: int) -> list[int]:
    """The results of one search per supporting title; the first titles get the remainder of `total` passages."""
    titles = row["metadata"]["supporting_titles"]
    shares = [total // len(titles) + (i < total % len(titles)) for i in range(len(titles))]
    rankings, _ = ranker.rank(titles, max(shares))
    return [i for ranking, share in zip(rankings, shares, strict=True) for i in ranking[:share]]


def share_of_titles(row: dict[str, Any], corpus: Sequence[Passage], ids: Sequence[int]) -> float:
    """The share of a question's supporting titles among the passages of these ids."""
    wanted = set(row["metadata"]["supporting_titles"])
    return len(wanted & {corpus[int(i)].title for i in ids if i >= 0}) / len(wanted)

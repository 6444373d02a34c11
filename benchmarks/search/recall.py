"""`launch/bench.py recall`: the share of supporting passages that each retriever returns for real questions.

Questions are FlashRAG jsonl rows whose metadata has `supporting_titles`; the corpus is as for launch/build_index.py. A
second table shows the gain of splitting: one search for the question compared with a search for every supporting title
(ideal sub-queries), with the same total number of passages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.corpora import open_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import sample_queries
from retrieval.indexing.encoding import encode_corpus
from retrieval.protocol import Encoder, Passage, Ranker
from retrieval.ranking.bm25 import Bm25Ranker
from retrieval.ranking.hybrid import HybridRanker
from retrieval.ranking.index import DenseRanker, ScannIndex

PASSAGES = (3, 6)  # the total over all searches of a question


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench recall", description=__doc__)
    parser.add_argument("--questions", required=True, help="FlashRAG jsonl with metadata.supporting_titles")
    parser.add_argument("--corpus", required=True, help="corpus as for launch/build_index.py")
    parser.add_argument("--model", help="directory of a BERT encoder, which adds two rows")
    parser.add_argument("--k", type=int, default=3, help="passages per search")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    lines = Path(flags.questions).read_bytes().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    corpus = open_corpus(flags.corpus)
    bm25, hashing = Bm25Ranker.build(corpus), dense(corpus, HashingEncoder().fit(corpus))
    rankers: dict[str, Ranker] = {"hashing": hashing, "BM25": bm25, "hashing + BM25": HybridRanker([hashing, bm25])}
    if flags.model:
        from retrieval.encoders.encoder import BertEncoder

        encoder = BertEncoder.from_model(flags.model)
        model = dense(corpus, encoder)
        name = encoder.identity["model"]
        rankers |= {name: model, f"{name} + BM25": HybridRanker([model, bm25])}
    table = {name: measure(ranker, corpus, rows, flags.k) for name, ranker in rankers.items()}
    columns = list(next(iter(table.values())))
    print(f"| retriever | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, figures in table.items():
        print(f"| {name} | {' | '.join(f'{figures[column]:.3f}' for column in columns)} |")
    splits = {name: split_gain(ranker, corpus, rows) for name, ranker in rankers.items()}
    print(f"\n{split_table(splits)}")
    if flags.json:
        temporary = Path(f"{flags.json}.tmp")
        report = {"k": flags.k, "retrievers": table, "splitting": splits}
        temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        temporary.replace(flags.json)


def dense(corpus: Sequence[Passage], encoder: Encoder) -> DenseRanker:
    """Exact search over the vectors of a small corpus."""
    return DenseRanker(ScannIndex.from_vectors(encode_corpus(corpus, encoder)), encoder)


def split_gain(
    ranker: Ranker, corpus: Sequence[Passage], questions: list[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """By type of question: the share with all supporting titles retrieved, for each total number of passages.

    `by titles` searches for each title and divides the passages evenly; the first titles get the remainder.
    """
    out: dict[str, dict[str, float]] = {}
    for kind in sorted({row["metadata"]["type"] for row in questions}):
        chosen = [row for row in questions if row["metadata"]["type"] == kind]
        figures: dict[str, float] = {"questions": len(chosen)}
        for total in PASSAGES:
            rankings, _ = ranker.rank([row["question"] for row in chosen], total)
            figures[f"question@{total}"] = float(
                np.mean([_found(row, corpus, ids) == 1 for row, ids in zip(chosen, rankings, strict=True)])
            )
            right = []
            for row in chosen:
                titles = row["metadata"]["supporting_titles"]
                shares = [total // len(titles) + (i < total % len(titles)) for i in range(len(titles))]
                ranked, _ = ranker.rank(titles, max(shares))
                ids = [i for line, share in zip(ranked, shares, strict=True) for i in line[:share]]
                right.append(_found(row, corpus, ids) == 1)
            figures[f"by titles@{total}"] = float(np.mean(right))
        out[kind] = figures
    return out


def _found(row: dict[str, Any], corpus: Sequence[Passage], ids: Sequence[int]) -> float:
    """The share of a question's supporting titles among the passages of these ids."""
    wanted = set(row["metadata"]["supporting_titles"])
    return len(wanted & {corpus[int(i)].title for i in ids if i >= 0}) / len(wanted)


def split_table(splits: dict[str, dict[str, dict[str, float]]]) -> str:
    columns = [f"{how}@{total}" for total in PASSAGES for how in ("question", "by titles")]
    lines = [f"| retriever | type | questions | {' | '.join(columns)} |", f"|---|---|---|{'---|' * len(columns)}"]
    for name, kinds in splits.items():
        for kind, figures in kinds.items():
            cells = " | ".join(f"{figures[column]:.2f}" for column in columns)
            lines.append(f"| {name} | {kind} | {figures['questions']} | {cells} |")
    return "\n".join(lines)


def measure(ranker: Ranker, corpus: Sequence[Passage], questions: list[dict[str, Any]], k: int) -> dict[str, float]:
    """Mean recall@k of supporting titles; share of questions with all of them; recall@k of passages by own title."""
    rankings, _ = ranker.rank([row["question"] for row in questions], k)
    shares = [_found(row, corpus, ids) for row, ids in zip(questions, rankings, strict=True)]
    rows, lookups = sample_queries(corpus, len(corpus))
    own, _ = ranker.rank(lookups, k)
    return {
        f"supporting titles in the top {k}": float(np.mean(shares)),
        "questions with all of them": float(np.mean(np.equal(shares, 1))),
        "passages found by title and first eight words": float((own == rows[:, None]).any(axis=1).mean()),
    }

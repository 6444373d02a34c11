"""`launch/bench.py recall`: how many supporting passages each way of retrieval finds for real questions.

Questions are FlashRAG jsonl rows whose metadata names `supporting_titles`; the corpus is that of `build_index`. A
second table asks what splitting buys: the whole question as one search beside a search for every supporting title, the
best sub-queries that anyone could write, at the same number of passages in all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.bm25 import Bm25Ranker
from retrieval.corpora import open_corpus
from retrieval.directory import sample_queries
from retrieval.encoding import encode_corpus
from retrieval.hashing import HashingEncoder
from retrieval.hybrid import HybridRanker
from retrieval.index import DenseRanker, ScannIndex
from retrieval.protocol import Encoder, Passage, Ranker

PASSAGES = (3, 6)  # in all, however they are searched for


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench recall", description=__doc__)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--model", help="directory of a BERT encoder, for two more rows")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--json", help="file to write the figures to")
    flags = parser.parse_args(argv)
    lines = Path(flags.questions).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    corpus = open_corpus(flags.corpus)
    bm25, hashing = Bm25Ranker.build(corpus), dense(corpus, HashingEncoder().fit(corpus))
    rankers: dict[str, Ranker] = {"hashing": hashing, "BM25": bm25, "hashing + BM25": HybridRanker([hashing, bm25])}
    if flags.model:
        from retrieval.encoder import BertEncoder

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
        beside = Path(f"{flags.json}.tmp")
        report = {"k": flags.k, "retrievers": table, "splitting": splits}
        beside.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        beside.replace(flags.json)


def dense(corpus: Sequence[Passage], encoder: Encoder) -> DenseRanker:
    """Exact search over the vectors of a small corpus."""
    return DenseRanker(ScannIndex.from_vectors(encode_corpus(corpus, encoder)), encoder)


def split_gain(
    ranker: Ranker, corpus: Sequence[Passage], questions: list[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """By type of question: the share all of whose supporting titles are found, in so many passages in all.

    `by titles` asks for each title and shares the passages evenly, the first ones getting what is left over.
    """
    out: dict[str, dict[str, float]] = {}
    for kind in sorted({row["metadata"]["type"] for row in questions}):
        chosen = [row for row in questions if row["metadata"]["type"] == kind]
        found: dict[str, float] = {"questions": len(chosen)}
        for total in PASSAGES:
            whole, _ = ranker.rank([row["question"] for row in chosen], total)
            found[f"question@{total}"] = float(
                np.mean([_found(row, corpus, ids) == 1 for row, ids in zip(chosen, whole, strict=True)])
            )
            right = []
            for row in chosen:
                titles = row["metadata"]["supporting_titles"]
                shares = [total // len(titles) + (i < total % len(titles)) for i in range(len(titles))]
                ranked, _ = ranker.rank(titles, max(shares))
                ids = [i for line, share in zip(ranked, shares, strict=True) for i in line[:share]]
                right.append(_found(row, corpus, ids) == 1)
            found[f"by titles@{total}"] = float(np.mean(right))
        out[kind] = found
    return out


def _found(row: dict[str, Any], corpus: Sequence[Passage], ids: Sequence[int]) -> float:
    """The share of a question's supporting titles among the passages of these ids."""
    wanted = set(row["metadata"]["supporting_titles"])
    return len(wanted & {corpus[int(i)].title for i in ids if i >= 0}) / len(wanted)


def split_table(splits: dict[str, dict[str, dict[str, float]]]) -> str:
    columns = [f"{how}@{total}" for total in PASSAGES for how in ("question", "by titles")]
    lines = [f"| retriever | type | questions | {' | '.join(columns)} |", f"|---|---|---|{'---|' * len(columns)}"]
    for name, kinds in splits.items():
        for kind, found in kinds.items():
            cells = " | ".join(f"{found[column]:.2f}" for column in columns)
            lines.append(f"| {name} | {kind} | {found['questions']} | {cells} |")
    return "\n".join(lines)


def measure(ranker: Ranker, corpus: Sequence[Passage], questions: list[dict[str, Any]], k: int) -> dict[str, float]:
    """Recall@k of supporting titles, in the mean over questions; share of questions with all; own-title lookups."""
    found, _ = ranker.rank([row["question"] for row in questions], k)
    shares = [_found(row, corpus, ids) for row, ids in zip(questions, found, strict=True)]
    rows, lookups = sample_queries(corpus, len(corpus))
    own, _ = ranker.rank(lookups, k)
    return {
        f"supporting titles in the top {k}": float(np.mean(shares)),
        "questions with all of them": float(np.mean(np.equal(shares, 1))),
        "passages found by title and first eight words": float((own == rows[:, None]).any(axis=1).mean()),
    }

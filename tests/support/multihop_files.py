"""Writes closed-world questions and passages in the two published file formats of MultiHop-RAG, both JSON arrays."""

from __future__ import annotations

import json
from pathlib import Path

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.runtime.paths import write_atomically

TYPES = {"parallel": "comparison_query", "sequential": "inference_query"}  # the two types in the paper's subsets


def write_multihop_rag(world: ClosedWorld, folder: Path, count: int) -> tuple[Path, Path]:
    """Writes `count` held-out questions of each type, and all articles; returns the two paths."""
    rows = [
        {"query": q.text, "answer": q.answers[0], "question_type": label, "evidence_list": []}
        for kind, label in TYPES.items()
        for q in questions(world, "eval", kind, count, seed=1)
    ]
    articles = [
        {
            "title": p.text.split(" is ")[0],  # every article has a title; here, the first words of its text
            "body": p.text,
            "author": None,
            "source": "",
            "published_at": "",
            "category": "closed world",
        }
        for p in world.passages
    ]
    questions_file, corpus = folder / "MultiHopRAG.json", folder / "corpus.json"
    write_atomically(questions_file, json.dumps(rows, indent=1) + "\n")
    write_atomically(corpus, json.dumps(articles, indent=1) + "\n")
    return questions_file, corpus

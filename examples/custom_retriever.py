"""A retriever of your own; here one that finds passages by the words of their titles.

    python launch/train.py --config=configs/qwen0p5b_cpu.py --config.model.path=MODEL \\
        --config.data.source=data/questions.jsonl --config.retrieval.corpus=data/corpus.jsonl \\
        --config.retrieval.service=examples/custom_retriever.py:TitleRetriever --workdir=runs/titles

`launch/eval.py`, `launch/ask.py` and the servers use it as well, from the config of the run.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from psearch_jax.config import RetrievalSection
from retrieval.protocol import Passage


class TitleRetriever:
    """Returns the passages whose title shares a word with the query."""

    def __init__(self, section: RetrievalSection):
        """`section`: the fields of `config.retrieval`; this one uses `corpus`."""
        rows = map(json.loads, Path(section.corpus).read_bytes().splitlines())
        self._passages = [Passage(row["id"], row["title"], row["text"]) for row in rows]

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most k passages per query, best first, in the order of the queries.

        One call has the sub-queries of all waiting rollouts. The result for a query must not depend on the others.
        """
        return [self._matches(set(query.lower().split()))[:k] for query in queries]

    def describe(self) -> dict:
        """What is searched, for the record of the run; None for unknown values."""
        rows = len(self._passages)
        return {"corpus": "titles", "corpus_sha256": None, "ranking_sha256": None, "rows": rows}

    def _matches(self, words: set[str]) -> list[Passage]:
        return [passage for passage in self._passages if words & set(passage.title.lower().split())]

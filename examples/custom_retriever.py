"""Trains with your own retriever; here one that finds passages by the words of their titles.

    python examples/custom_retriever.py --config=configs/qwen1p5b.py --config.model.path=MODEL \\
        --config.data.source=questions.jsonl --corpus=corpus.jsonl --workdir=runs/titles

Takes any file of configs/ and any `--config.SECTION.FIELD=VALUE`, like launch/train.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from psearch_jax.assembly import build
from psearch_jax.config import from_mapping
from psearch_jax.runtime import cli
from psearch_jax.train import trainer
from retrieval.protocol import Passage

CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/smoke.py.", lock_config=False)
CORPUS = flags.DEFINE_string("corpus", None, "A file of rows with id, title and text.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
flags.mark_flags_as_required(["config", "corpus", "workdir"])


class TitleRetriever:
    """Returns the passages whose title shares a word with the query."""

    def __init__(self, corpus: Path):
        rows = map(json.loads, corpus.read_bytes().splitlines())
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


def main(_: list[str]) -> None:
    cli.configure_jax()
    config = from_mapping(CONFIG.value.to_dict())
    run = build.training_run(config, retriever=TitleRetriever(Path(CORPUS.value)))
    trainer.train(run, WORKDIR.value)


if __name__ == "__main__":
    cli.run(main)

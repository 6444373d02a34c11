"""Merges question sets into one dataset, which training reads without loading all of it into memory.

    python launch/prepare_data.py --source=nq:FILE --source=hotpotqa:FILE --out=DIR
    python launch/prepare_data.py --source=made:triples:FILE --corpus=CORPUS.jsonl --questions=2000 --out=DIR
    python launch/train.py --config=configs/qwen7b.py --config.data.source=DIR ...

FILE is FlashRAG jsonl, a set's own JSON array, or Search-R1 parquet. `tfds:BUILDER:SPLIT` reads a set of TensorFlow
Datasets. `triples:FILE` makes questions from evidence triples (docs/data.md). DIR gets questions.array_record, whose
rows are JSON objects, and questions.json with their counts.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from absl import flags

from psearch_jax.runtime import cli
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.types import KINDS, UserError
from retrieval.corpus import MemoryMappedCorpus

SOURCE = flags.DEFINE_multi_string(
    "source", None, "NAME:FILE, NAME:tfds:BUILDER:SPLIT or NAME:triples:FILE; repeatable."
)
CORPUS = flags.DEFINE_string("corpus", None, "Corpus whose passages must state the facts of questions from triples.")
QUESTIONS = flags.DEFINE_integer("questions", 2000, "Number of questions to make from each source of triples.", 1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the questions made from triples.", 0)
OUT = flags.DEFINE_string("out", None, "The directory to create.")
SKIP = flags.DEFINE_bool("skip_bad_rows", False, "Skip bad rows and list them in DIR/skipped.txt.")
cli.require("source", "out")


def main(_: list[str]) -> None:
    cli.configure_jax()  # also sets up logging
    from psearch_jax.data.prepared import TRIPLES_PREFIX, TripleOptions, prepare  # slow, not needed for --help
    from psearch_jax.eval.tables import table

    sources = [argument.partition(":")[::2] for argument in SOURCE.value]
    for argument, (name, location) in zip(SOURCE.value, sources, strict=True):
        if not name or not location:
            raise UserError(f"--source={argument}: accepted: NAME:FILE, NAME:tfds:BUILDER:SPLIT or NAME:triples:FILE")
    skipped: list[str] | None = [] if SKIP.value else None
    if not any(location.startswith(TRIPLES_PREFIX) for _, location in sources):
        for name in ("corpus", "questions", "seed"):
            if flags.FLAGS[name].present:
                raise UserError(
                    f"--{name}={flags.FLAGS[name].value}: accepted with a --source=NAME:{TRIPLES_PREFIX}FILE only"
                )
    corpus = MemoryMappedCorpus(CORPUS.value) if CORPUS.value else None
    triples = TripleOptions(QUESTIONS.value, SEED.value, corpus)
    questions = prepare(sources, OUT.value, skipped, triples)

    by_source: dict[str, Counter[str]] = {}
    for source, kind, count in questions.counts:
        by_source.setdefault(source, Counter())[kind] += count
    rows = [[source, str(c.total()), *(str(c[kind]) for kind in KINDS)] for source, c in by_source.items()]
    print(table([["source", "questions", *KINDS], *rows]))
    if skipped:
        write_atomically(Path(OUT.value) / "skipped.txt", "".join(f"{line}\n" for line in skipped))
        print(f"{len(skipped)} bad rows skipped, see {OUT.value}/skipped.txt; the first: {skipped[0]}")


if __name__ == "__main__":
    cli.run(main)

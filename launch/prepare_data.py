"""Merges question sets into one dataset, which training reads without loading all of it into memory.

    python launch/prepare_data.py --source=nq:FILE --source=hotpotqa:FILE --out=DIR
    python launch/prepare_data.py --source=2wiki:FILE --source=2wiki:FILE --corpus_out=CORPUS.jsonl
    python launch/prepare_data.py --source=made:triples:FILE --corpus=CORPUS.jsonl --questions=2000 --out=DIR
    python launch/train.py --config=configs/qwen7b.py --config.data.source=DIR ...

FILE is FlashRAG jsonl, a set's own JSON array, or parquet. `tfds:BUILDER:SPLIT` reads a set of TensorFlow
Datasets. `triples:FILE` makes questions from evidence triples (docs/data.md). DIR gets questions.array_record, whose
rows are JSON objects, and questions.json with their counts. CORPUS.jsonl gets the paragraphs in the files' `context`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from absl import flags
from tqdm import tqdm

from psearch_jax.data import triple_questions as made
from psearch_jax.data.sources import iter_contexts
from psearch_jax.runtime import cli
from psearch_jax.runtime.paths import check_new, on_disk, write_atomically
from psearch_jax.types import KINDS, UserError
from retrieval.corpus import MemoryMappedCorpus, write_corpus

SOURCE = flags.DEFINE_multi_string(
    "source", None, "NAME:FILE, NAME:tfds:BUILDER:SPLIT or NAME:triples:FILE; repeatable."
)
CORPUS = flags.DEFINE_string("corpus", None, "Corpus whose passages must state the facts of questions from triples.")
QUESTIONS = flags.DEFINE_integer("questions", 2000, "Number of questions to make from each source of triples.", 1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the questions made from triples.", 0)
EXCLUDE = flags.DEFINE_string("exclude_entities_of", None, "Question file whose entities no triple may be about.")
SIZES = flags.DEFINE_list("sizes", [*map(str, made.SIZES)], "Numbers of names to choose from, for triples.")
FORMS = flags.DEFINE_list("forms", [*made.ALL_FORMS], "Forms of the questions made from triples.")
PAIRS = flags.DEFINE_bool("pairs", False, "Make minimal pairs from triples, instead of questions of --forms.")
OUT = flags.DEFINE_string("out", None, "The directory to create for the questions.")
CORPUS_OUT = flags.DEFINE_string("corpus_out", None, "Instead of --out: the corpus of the paragraphs in all sources.")
WORDS = flags.DEFINE_integer("passage_words", 0, "First words of each paragraph for --corpus_out; 0: all.", 0)
SKIP = flags.DEFINE_bool("skip_bad_rows", False, "Skip bad rows and list them in DIR/skipped.txt.")
FOR_TRIPLES = ("corpus", "questions", "seed", "exclude_entities_of", "sizes", "forms", "pairs")
cli.require("source")
flags.register_validator("sizes", lambda v: v and {*v} <= {*"23456789"}, "accepted: 2 to 9, separated by commas")
flags.register_validator("forms", lambda v: v and {*v} <= {*made.ALL_FORMS}, f"accepted: {','.join(made.ALL_FORMS)}")
flags.register_multi_flags_validator(
    ["pairs", "forms"], lambda v: not v["pairs"] or {*v["forms"]} == {*made.ALL_FORMS}, "accepted: one of the two"
)
flags.register_multi_flags_validator(
    ["out", "corpus_out", "skip_bad_rows", "passage_words"],
    lambda v: (
        bool(v["out"]) != bool(v["corpus_out"]) and not v["skip_bad_rows" if v["corpus_out"] else "passage_words"]
    ),
    "accepted: --out=DIR, without --passage_words; or --corpus_out=FILE, without --skip_bad_rows",
)


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
        for name in FOR_TRIPLES:
            if flags.FLAGS[name].present:
                raise UserError(
                    f"--{name}={flags.FLAGS[name].value}: accepted with a --source=NAME:{TRIPLES_PREFIX}FILE only"
                )
    if CORPUS_OUT.value:
        check_new(on_disk(CORPUS_OUT.value, "--corpus_out"), "a new file", "--corpus_out=")
        passages = iter_contexts(location for _, location in sources)
        if words := WORDS.value:
            passages = (replace(p, text=" ".join(p.text.split()[:words])) for p in passages)
        write_corpus(CORPUS_OUT.value, tqdm(passages, "corpus", unit=" passages", disable=None))
        print(f"{CORPUS_OUT.value}: {len(MemoryMappedCorpus(CORPUS_OUT.value))} passages")
        return
    corpus, sizes = MemoryMappedCorpus(CORPUS.value) if CORPUS.value else None, [int(size) for size in SIZES.value]
    triples = TripleOptions(QUESTIONS.value, SEED.value, corpus, EXCLUDE.value, sizes, FORMS.value, PAIRS.value)
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

"""Merges question sets into one dataset that training reads without loading it.

    python launch/prepare_data.py --source=nq:FILE --source=hotpotqa:FILE --split=train --out=DIR
    python launch/train.py --config=configs/qwen7b.py --config.data.source=DIR ...

FILE is FlashRAG jsonl, a set's own JSON array, or Search-R1 parquet; `tfds:BUILDER:SPLIT` reads a set of TensorFlow
Datasets. DIR is a TFDS dataset, `psearch_qa`, in array_record files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from absl import flags

from psearch_jax import launching
from psearch_jax.paths import write_whole
from psearch_jax.types import KINDS, UserError

SOURCE = flags.DEFINE_multi_string("source", None, "NAME:FILE or NAME:tfds:BUILDER:SPLIT; repeatable.")
SPLIT = flags.DEFINE_string("split", "train", "The name of the split that is made.")
OUT = flags.DEFINE_string("out", None, "The directory to make.")
SKIP = flags.DEFINE_bool("skip_bad_rows", False, "Leave bad rows out, and list them in DIR/skipped.txt.")
flags.mark_flags_as_required(["source", "out"])


def main(_: list[str]) -> None:
    launching.configure_jax()  # and our log lines
    from psearch_jax.data.prepared import prepare  # slow to import: --help needs none of it
    from psearch_jax.eval.tables import table

    sources = [argument.partition(":")[::2] for argument in SOURCE.value]
    for argument, (name, location) in zip(SOURCE.value, sources, strict=True):
        if not name or not location:
            raise UserError(f"--source={argument}: accepted: NAME:FILE or NAME:tfds:BUILDER:SPLIT")
    if not SPLIT.value.isidentifier() or SPLIT.value == "all":
        raise UserError(f"--split={SPLIT.value}: accepted: a word such as train")
    skipped: list[str] | None = [] if SKIP.value else None
    questions = prepare(sources, SPLIT.value, OUT.value, skipped)

    by_source: dict[str, Counter[str]] = {}
    for source, kind, count in questions.counts:
        by_source.setdefault(source, Counter())[kind] += count
    rows = [[source, str(c.total()), *(str(c[kind]) for kind in KINDS)] for source, c in by_source.items()]
    print(table([["source", "questions", *KINDS], *rows]))
    if skipped:
        write_whole(Path(OUT.value) / "skipped.txt", "".join(f"{line}\n" for line in skipped))
        print(f"{len(skipped)} bad rows left out, see {OUT.value}/skipped.txt; the first: {skipped[0]}")


if __name__ == "__main__":
    launching.run(main)

"""Index a corpus for retrieval.

    python launch/build_index.py --corpus=FILE.jsonl --encoder=hashing --out=DIR

The corpus holds jsonl rows `{"id", "contents"}` (plain or .gz); contents is `"Title"`, a line break and the text.
"""

import time

from absl import flags

from psearch_jax import launching
from retrieval.corpus import MemoryMappedCorpus
from retrieval.hashing import HashingEncoder
from retrieval.index import ScannIndex

ENCODERS = {"hashing": lambda corpus: HashingEncoder().fit(corpus)}

_CORPUS = flags.DEFINE_string("corpus", None, "jsonl file of passages, plain or .gz")
_ENCODER = flags.DEFINE_enum("encoder", "hashing", list(ENCODERS), "what turns texts into vectors")
_OUT = flags.DEFINE_string("out", None, "directory to make")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace the index that is in the way")
flags.mark_flags_as_required(["corpus", "out"])


def main(_: list[str]) -> None:
    started = time.perf_counter()
    corpus = MemoryMappedCorpus(_CORPUS.value)
    encoder = ENCODERS[_ENCODER.value](corpus)
    index = ScannIndex.build(_OUT.value, corpus, encoder, overwrite=_OVERWRITE.value)
    check = index.manifest["self_check"]
    print(
        f"{_OUT.value}: {index.rows} rows of {index.dimensions} dimensions in {time.perf_counter() - started:.1f} s; "
        f"{check['found']} of {check['queries']} passages found in the top 3 by title and first words"
    )


if __name__ == "__main__":
    launching.run(main)

"""Index a corpus for retrieval.

    python launch/build_index.py --corpus=FILE.jsonl --encoder=hashing --out=DIR

The corpus holds jsonl rows `{"id", "contents"}` (plain or .gz); contents is `"Title"`, a line break and the text.
"""

import sys
import time

from absl import app, flags

from retrieval.corpus import MemoryMappedCorpus
from retrieval.hashing import HashingEncoder
from retrieval.index import ScannIndex
from retrieval.protocol import CorpusError, RetrievalError

ENCODERS = {"hashing": lambda corpus: HashingEncoder().fit(corpus)}

_CORPUS = flags.DEFINE_string("corpus", None, "jsonl file of passages, plain or .gz")
_ENCODER = flags.DEFINE_string("encoder", "hashing", f"what turns texts into vectors: {', '.join(ENCODERS)}")
_OUT = flags.DEFINE_string("out", None, "directory to make")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace the index that is in the way")


def build() -> None:
    """Build the index the flags describe and print what was made."""
    for flag, wanted in ((_CORPUS, "a jsonl file of passages"), (_OUT, "the directory to make")):
        if not flag.value:
            raise CorpusError(f"--{flag.name} is missing, expected {wanted}")
    if _ENCODER.value not in ENCODERS:
        raise CorpusError(f"--encoder is {_ENCODER.value!r}, expected one of: {', '.join(ENCODERS)}")
    started = time.perf_counter()
    corpus = MemoryMappedCorpus(_CORPUS.value)
    encoder = ENCODERS[_ENCODER.value](corpus)
    index = ScannIndex.build(_OUT.value, corpus, encoder, overwrite=_OVERWRITE.value)
    check = index.manifest["self_check"]
    print(
        f"{_OUT.value}: {index.rows} rows of {index.dimensions} dimensions in {time.perf_counter() - started:.1f} s; "
        f"{check['found']} of {check['queries']} passages found in the top 3 by title and first words"
    )


def main(argv: list[str]) -> int:
    """Run `build`; bad input ends in one line on stderr and exit code 2."""
    del argv
    try:
        build()
    except (CorpusError, RetrievalError) as error:
        print(f"build_index: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    app.run(main)

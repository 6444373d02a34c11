"""Indexes a corpus for retrieval.

    python launch/build_index.py --corpus=FILE --encoder=hashing|bm25|MODEL_DIR --out=DIR [--target_recall=0.95]

The corpus is jsonl rows `{"id", "contents"}` or `{"id", "title", "text"}` (Search-R1, FlashRAG), or MultiHop-RAG's
JSON array of articles. MODEL_DIR is a BERT-family sentence encoder such as intfloat/e5-base-v2.
After a kill the same command resumes. The vectors that Search-R1 published can be used without encoding again:

    python launch/build_index.py --corpus=wiki-18.jsonl --encoder=e5-base-v2/ --from_faiss=e5_Flat.index --out=DIR

Opening an index compares sizes and samples with its manifest. This command compares every byte:

    python launch/build_index.py --verify --out=DIR
"""

import logging
import sys
import time

from absl import flags

from psearch_jax.runtime import cli
from psearch_jax.types import UserError
from retrieval.corpora import open_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import BuildOptions, build_index, refuse_occupied, verify_index
from retrieval.indexing.faiss_flat import read_flat
from retrieval.protocol import Encoder, on_disk
from retrieval.ranking.index import EXACT_BELOW_ROWS

_CORPUS = flags.DEFINE_string("corpus", None, "passages: jsonl, or MultiHop-RAG's json")
_ENCODER = flags.DEFINE_string("encoder", "hashing", "hashing, bm25, or the directory of a BERT sentence encoder")
_OUT = flags.DEFINE_string("out", None, "index directory to create")
_VERIFY = flags.DEFINE_bool("verify", False, "only compare every byte of the index --out with its manifest")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace an existing index")
_TARGET = flags.DEFINE_float("target_recall", None, "use the fastest search with this recall of the 3 best", 0, 1)
_FROM_FAISS = flags.DEFINE_string("from_faiss", None, "FAISS flat index with the vectors of --corpus in its order")
_DTYPE = flags.DEFINE_enum(
    "encoder_dtype", None, ["float32", "bfloat16"], "MODEL_DIR: dtype of the layers (default: float32 on a CPU)"
)
_QUERY_PREFIX = flags.DEFINE_string("query_prefix", None, "MODEL_DIR: prefix of queries (default: by model)")
_PASSAGE_PREFIX = flags.DEFINE_string("passage_prefix", None, "MODEL_DIR: prefix of passages (default: by model)")
cli.require("out")


def main(_: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    log = logging.getLogger("retrieval")
    log.setLevel(logging.INFO)
    started = time.perf_counter()
    if _VERIFY.value:
        size = verify_index(_OUT.value)
        print(f"{_OUT.value}: all {size / 1e9:.3f} GB match the manifest ({time.perf_counter() - started:.1f} s)")
        return
    if _CORPUS.value is None:
        raise UserError("flag --corpus is missing: the passages to index")
    if _FROM_FAISS.value is not None and _ENCODER.value == "bm25":
        raise UserError("--from_faiss: --encoder=bm25 found, accepted: --encoder=MODEL_DIR, to encode the queries")
    if _ENCODER.value in ("bm25", HashingEncoder.name):
        refused = [n for n in ("encoder_dtype", "query_prefix", "passage_prefix") if flags.FLAGS[n].value is not None]
        if refused:
            raise UserError(
                f"--{refused[0]}: --encoder={_ENCODER.value} found, accepted: with --encoder=MODEL_DIR only"
            )
    if _ENCODER.value == "bm25" and _TARGET.value is not None:
        raise UserError("--target_recall: --encoder=bm25 found, accepted: with an encoder of vectors only")
    options = BuildOptions(target_recall=_TARGET.value)
    corpus = open_corpus(_CORPUS.value)
    refuse_occupied(on_disk(_OUT.value).absolute(), corpus.path, _OVERWRITE.value)
    encoder = make_encoder(_ENCODER.value)
    if _TARGET.value is not None and len(corpus) < EXACT_BELOW_ROWS:
        log.warning(
            "--target_recall: no effect, because fewer than %d passages are searched exactly", EXACT_BELOW_ROWS
        )
    vectors = None if _FROM_FAISS.value is None else read_flat(_FROM_FAISS.value)
    if isinstance(encoder, HashingEncoder):
        encoder = encoder.fit(corpus)  # reads all passages: only after all checks above
    manifest = build_index(_OUT.value, corpus, encoder, options, vectors, _OVERWRITE.value)
    print(f"{_OUT.value}: {summarize(manifest)} in {time.perf_counter() - started:.1f} s")


def make_encoder(name: str) -> Encoder | None:
    """The encoder that --encoder names, not yet fitted; None for BM25."""
    if name == "bm25":
        return None
    if name == HashingEncoder.name:
        return HashingEncoder()
    cli.configure_jax()
    from retrieval.encoders.encoder import BertEncoder  # imported late: loads JAX

    return BertEncoder.from_model(
        name, query_prefix=_QUERY_PREFIX.value, passage_prefix=_PASSAGE_PREFIX.value, dtype=_DTYPE.value
    )


def summarize(manifest: dict) -> str:
    """A one-line summary of an index."""
    parts = [f"{manifest['rows']} rows"]
    if "dimensions" in manifest:
        parts[0] += f" of {manifest['dimensions']} dimensions"
    if manifest.get("recall"):
        recall, tree = manifest["recall"], manifest["tree"]
        parts.append(
            f"recall@{recall['k']} {recall['recall']:.3f} on {recall['queries']} queries with "
            f"{tree['searched_leaves']} of {tree['leaves']} leaves and {tree['reordered']} reordered"
        )
    check = manifest["self_check"]
    parts.append(f"{check['found']} of {check['queries']} passages found in the top 3 by title and first words")
    return "; ".join(parts)


if __name__ == "__main__":
    cli.run(main)

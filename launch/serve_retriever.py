"""Serves an index over HTTP in the form of Search-R1's `/retrieve`, or a third-party search service in that form.

    python launch/serve_retriever.py --index=DIR [--host=127.0.0.1 --port=8000 --token_file=FILE]
    python launch/serve_retriever.py --live=SETTINGS.json

DIR is made by launch/build_index.py; several over one corpus, separated by commas, are fused by reciprocal rank.
SETTINGS.json defines the requests to a service with JSON answers and where its results are (remote/json_api.py).
With --reranker, a cross-encoder reranks --candidates passages per query. The address is printed once connections are
accepted. SIGTERM finishes the requests in flight, for at most --stop_seconds.
"""

import logging
import os
import sys
from pathlib import Path

from absl import flags

from psearch_jax.runtime import cli
from psearch_jax.types import UserError
from retrieval.protocol import Retriever

_INDEX = flags.DEFINE_string("index", None, "index directory, or several over one corpus separated by commas")
_LIVE = flags.DEFINE_string("live", None, "settings file of a search service, instead of --index")
_RERANKER = flags.DEFINE_string("reranker", None, "directory of a BERT cross-encoder that reranks the passages")
_CANDIDATES = flags.DEFINE_integer("candidates", 20, "passages per query that the reranker scores", 1, 1000)
_TOPK = flags.DEFINE_integer("topk", 3, "passages per query if a request has no topk", 1, 100)
_CACHE = flags.DEFINE_integer("cache_queries", 65_536, "maximum number of cached answers of --index", 0)
_CACHE_MB = flags.DEFINE_integer("cache_mb", 1024, "maximum megabytes of cached answers of --index", 0)
cli.server_flags(8000)


def main(_: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    token = cli.server_token()
    if bool(_INDEX.value) == bool(_LIVE.value):
        raise UserError(f"--index, --live: found {'both' if _LIVE.value else 'neither'}, accepted: one of them")
    from retrieval.remote import http
    from retrieval.remote.server import make_app, serve

    if flags.FLAGS["candidates"].present and not _RERANKER.value:
        raise UserError(f"--candidates={_CANDIDATES.value}: accepted with --reranker only")
    cli.configure_jax()  # for a BERT encoder or a reranker
    retriever = _live() if _LIVE.value else _index()
    if _RERANKER.value:
        from retrieval.ranking.rerank import CrossEncoder, Reranked

        retriever = Reranked(retriever, CrossEncoder(Path(_RERANKER.value)), _CANDIDATES.value)
    app = make_app(retriever, token=token, default_topk=_TOPK.value, hosts=http.names_of(flags.FLAGS.host))
    about = retriever.describe()
    what = f"{about['rows']} passages" if about["rows"] else about["corpus"]
    ready = f"serving {what} on {{url}}"
    if not serve(app, flags.FLAGS.host, flags.FLAGS.port, ready, flags.FLAGS.stop_seconds):
        os._exit(0)  # a normal exit would wait for the search, whose clients already got status 503


def _index() -> Retriever:
    from retrieval.service import RetrievalService

    return RetrievalService.open(_INDEX.value, _CACHE.value, _CACHE_MB.value * 2**20)


def _live() -> Retriever:
    from retrieval.remote.json_api import LiveSearch, read_settings

    return LiveSearch(*read_settings(_LIVE.value))


if __name__ == "__main__":
    cli.run(main)

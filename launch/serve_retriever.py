"""Serves an index over HTTP in the form of Search-R1's `/retrieve`.

    python launch/serve_retriever.py --index=DIR [--host=127.0.0.1 --port=8000 --token_file=FILE]

DIR is made by launch/build_index.py. The address is printed once connections are accepted. SIGTERM finishes the
requests in flight, for at most --stop_seconds.
"""

import logging
import os
import sys

from absl import flags

from psearch_jax.runtime import cli

_INDEX = flags.DEFINE_string("index", None, "index directory")
_CACHE = flags.DEFINE_integer("cache_mb", 1024, "maximum size of the cache of answers in MiB; 0: no cache", 0)
cli.server_flags(8000)
cli.require("index")


def main(_: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    token = cli.server_token()
    from retrieval.remote import http
    from retrieval.remote.server import make_app, serve
    from retrieval.service import RetrievalService

    host = flags.FLAGS.host
    with http.listen(host, flags.FLAGS.port) as listener:
        cli.configure_jax()  # for a BERT encoder
        retriever = RetrievalService.open(_INDEX.value, _CACHE.value * 2**20)
        app = make_app(retriever, token=token, hosts=http.host_names(host))
        ready = f"serving {retriever.rows} passages on {{url}}"
        if not serve(listener, app, host, ready, flags.FLAGS.stop_seconds):
            os._exit(0)  # a normal exit would wait for the search, whose clients already got status 503


if __name__ == "__main__":
    cli.run(main)

"""Serve an index over HTTP in the form of Search-R1's `/retrieve`.

    python launch/serve_retriever.py --index=DIR [--host=127.0.0.1 --port=8000 --token_file=FILE]

DIR is made by launch/build_index.py; several over one corpus, separated by commas, are fused. The address is printed
once the server accepts connections. SIGTERM finishes what is in flight, for at most --stop_seconds.
"""

import logging
import os
import sys

from absl import flags

from psearch_jax import launching

_INDEX = flags.DEFINE_string("index", None, "index directory, or several over one corpus separated by commas")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "address to listen on; 0.0.0.0 is every network this machine is in")
_PORT = flags.DEFINE_integer("port", 8000, "port; 0 takes a free one", 0, 65535)
_TOPK = flags.DEFINE_integer("topk", 3, "passages per query where a request names no number", 1, 100)
_TOKEN = flags.DEFINE_string("token_file", None, "file with the bearer token that clients have to send")
_CACHE = flags.DEFINE_integer("cache_queries", 65_536, "answers kept", 0)
_CACHE_MB = flags.DEFINE_integer("cache_mb", 1024, "megabytes that kept answers take at most", 0)
_STOP = flags.DEFINE_integer("stop_seconds", 20, "how long a stop waits for what is in flight", 0)
flags.mark_flag_as_required("index")


def main(_: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    token = launching.read_token(_TOKEN.value, "--token_file") if _TOKEN.value else None
    from retrieval.server import make_app, serve
    from retrieval.service import RetrievalService

    launching.configure_jax()  # for a BERT encoder
    service = RetrievalService.open(_INDEX.value, _CACHE.value, _CACHE_MB.value * 2**20)
    app = make_app(service, token=token, default_topk=_TOPK.value)
    ready = f"serving {service.rows} passages on {{url}}"
    if not serve(app, _HOST.value, _PORT.value, ready, _STOP.value):
        os._exit(0)  # an exit in order would wait for the search, and whoever asked for it has been told


if __name__ == "__main__":
    launching.run(main)

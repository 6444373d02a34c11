"""Serves a policy over HTTP: chat completions with streaming, as OpenAI's clients speak them, and a page to try it.

    python launch/serve_agent.py                         the toy policy in its closed world
    python launch/serve_agent.py --model=RUN|CHECKPOINT|HF_DIR --index=DIR [--port=8001 --token_file=FILE]

All who ask share --slots rows of one policy, as rollouts do. The address is printed once connections are accepted.
SIGTERM finishes what is in flight, for at most --stop_seconds.
"""

import logging
import os
import sys
from pathlib import Path

from absl import flags

from psearch_jax import launching
from psearch_jax.serving import given
from retrieval import http

ROOT = Path(__file__).resolve().parent.parent
given.define_flags()
_HOST = flags.DEFINE_string("host", "127.0.0.1", "address to listen on; 0.0.0.0 is every network this machine is in")
_PORT = flags.DEFINE_integer("port", 8001, "port; 0 takes a free one", 0, 65535)
_TOKEN = flags.DEFINE_string("token_file", None, "file with the bearer token that clients have to send")
_SLOTS = flags.DEFINE_integer("slots", 32, "questions answered together; others wait for a slot", 1)
_REQUESTS = flags.DEFINE_integer("requests", 256, "requests held at one time; others are told to ask again", 1)
_NAME = flags.DEFINE_string("name", None, "what clients are told the policy is called; default: --model's last part")
_STOP = flags.DEFINE_integer("stop_seconds", 20, "how long a stop waits for what is in flight", 0)


def main(_: list[str]) -> None:
    launching.configure_jax()
    logging.getLogger("retrieval").addHandler(logging.StreamHandler())
    token = launching.read_token(_TOKEN.value, "--token_file") if _TOKEN.value else None
    listener = http.listen(_HOST.value, _PORT.value)  # before the minutes that large weights take
    # Questions come one by one: prompts are prefilled for a quarter of the slots at a time.
    config = given.config(ROOT, _SLOTS.value, samples=4)

    from psearch_jax import build  # slow to import: bad input is refused before
    from psearch_jax.serving.answerer import Answerer
    from psearch_jax.serving.chat import Limits, make_app

    model = given.model()
    parts = build.from_path(config, model)
    params, collector, examples = parts.sampling_copy(), parts.collector, given.examples(parts.world)
    del parts  # the parameters are not needed beside their copy
    print("compiling for every length of prompts and passages", file=sys.stderr, flush=True)
    collector.warm_up(params)
    answerer = Answerer(collector, params)
    name = _NAME.value or flags.FLAGS.model.rstrip("/").rpartition("/")[2]
    hosts = () if _HOST.value in ("0.0.0.0", "::") else (*http.LOOPBACK, _HOST.value)
    app = make_app(answerer, name, Limits(requests=_REQUESTS.value), token, examples, hosts)
    http.serve_on(listener, app, _HOST.value, f"{name} answers at {{url}}", "/", "ask", _STOP.value)
    sys.stdout.flush()
    os._exit(0)  # whoever still waits has been told; an exit in order would wait for the ids being decoded


if __name__ == "__main__":
    launching.run(main)

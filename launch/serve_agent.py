"""Serves a policy over HTTP: OpenAI-compatible chat completions with streaming, and a web page to try it.

    python launch/serve_agent.py                         the toy policy in its closed world
    python launch/serve_agent.py --model=RUN|CHECKPOINT|HF_DIR --index=DIR [--port=8001 --token_file=FILE]

Concurrent questions share a batch of --slots rows. The address is printed once connections are accepted. SIGTERM
finishes the requests in flight, for at most --stop_seconds.
"""

import logging
import os
import sys
from pathlib import Path

from absl import flags

from psearch_jax.assembly import policy_flags
from psearch_jax.runtime import cli
from retrieval.remote import http

ROOT = Path(__file__).resolve().parent.parent
policy_flags.define_flags("toy")
flags.adopt_module_key_flags(policy_flags)  # --help lists them
cli.server_flags(8001)
_SLOTS = flags.DEFINE_integer("slots", 32, "questions answered in one batch; others wait for a slot", 1)
_REQUESTS = flags.DEFINE_integer("requests", 256, "maximum concurrent requests; others get status 503", 1)


def main(_: list[str]) -> None:
    cli.configure_jax()
    logging.getLogger("retrieval").addHandler(logging.StreamHandler())
    host, token = flags.FLAGS.host, cli.server_token()
    listener = http.listen(host, flags.FLAGS.port)  # before loading weights, which may take minutes
    # Questions arrive one by one: prompts are prefilled for a quarter of the slots at a time.
    config = policy_flags.to_serve(ROOT, _SLOTS.value, samples=4)

    from psearch_jax.assembly import build  # slow import, after bad input was refused
    from psearch_jax.serving.answerer import Answerer
    from psearch_jax.serving.chat import Limits, make_app

    model = policy_flags.model()
    parts = build.from_path(config, model)
    weights, collector, examples = parts.sampling_weights(), parts.collector, policy_flags.examples(parts.world)
    del parts  # free the parameters: only their copy is used
    print("compiling for every length of prompts and passages", file=sys.stderr, flush=True)
    collector.warm_up(weights)
    answerer = Answerer(collector, weights)
    name = flags.FLAGS.model.rstrip("/").rpartition("/")[2]
    app = make_app(answerer, name, Limits(requests=_REQUESTS.value), token, examples, http.host_names(host))
    http.serve(listener, app, host, f"{name} answers at {{url}}", "/", "ask", flags.FLAGS.stop_seconds)
    sys.stdout.flush()
    os._exit(0)  # all clients got an answer or an error; a normal exit would wait for decoding to end


if __name__ == "__main__":
    cli.run(main, defaults=policy_flags.DEFAULTS)

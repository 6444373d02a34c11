"""The HTTP retriever, against a real server on loopback."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from retrieval.client import HttpRetriever
from retrieval.protocol import RetrievalError

DOCUMENT = {"id": "7", "contents": '"Ada Lovelace"\nAda Lovelace was born in 1815.'}


class Server:
    """Answers with the given statuses in turn, then with 200; `answer` makes the body from the request."""

    def __init__(self, statuses=(), answer=None):
        self.requests: list[dict] = []
        waiting = list(statuses)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(request)
                status = waiting.pop(0) if waiting else 200
                rankings = [[{"document": DOCUMENT, "score": 0.5}] for _ in request["queries"]]
                body = json.dumps(answer(request) if answer else {"result": rankings}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/retrieve"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def test_one_request_carries_every_query():
    """One call per query makes retrieval the bottleneck; empty and repeated queries must not travel."""
    with Server() as server:
        found = HttpRetriever(server.url).search(["Ada  Lovelace", "", "ada", "Ada Lovelace"], 3)
    assert server.requests == [{"queries": ["Ada Lovelace", "ada"], "topk": 3, "return_scores": True}]
    assert [len(ranking) for ranking in found] == [1, 0, 1, 1]
    passage = found[0][0]
    assert (passage.id, passage.title, passage.text) == ("7", "Ada Lovelace", "Ada Lovelace was born in 1815.")


def test_a_stumbling_server_is_tried_again():
    """One failed request ended whole runs of earlier systems."""
    with Server(statuses=[503, 500]) as server:
        assert HttpRetriever(server.url).search(["a"], 1)[0][0].id == "7"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "answer",
    [lambda _: {"wrong": []}, lambda _: {"result": [[{"document": {}}]]}, lambda _: {"result": []}, lambda _: 3],
)
def test_an_answer_out_of_form_is_an_error(answer):
    """A silent empty result would teach the policy that searching is of no use."""
    with Server(answer=answer) as server, pytest.raises(RetrievalError, match="127.0.0.1"):
        HttpRetriever(server.url).search(["a"], 1)


def test_an_absent_server_is_one_named_error():
    """A stack of connection errors hides which address was meant."""
    with Server() as server:
        pass
    with pytest.raises(RetrievalError, match="no answer"):
        HttpRetriever(server.url, retries=1).search(["a"], 1)

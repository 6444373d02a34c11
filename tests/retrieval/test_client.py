"""The HTTP retriever against real servers on loopback, which fail in many ways."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from retrieval.protocol import RetrievalError
from retrieval.remote import client
from retrieval.remote.client import HttpRetriever
from retrieval.remote.server import MAX_QUERIES, Limits

DOCUMENT = {"id": "7", "contents": '"Ada Lovelace"\nAda Lovelace was born in 1815.'}


class Server:
    """Answers with the given statuses in order, then with 200; `answers` make the bodies, and the last one repeats."""

    def __init__(self, statuses: Iterable[int] = (), answers: Iterable[Callable[[dict], Any]] = ()):
        self.requests: list[dict] = []
        self.headers: list[Any] = []
        statuses, answers = list(statuses), list(answers)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(request)
                outer.headers.append(self.headers)
                status = statuses.pop(0) if statuses else 200
                result: Any = {"result": [[{"document": DOCUMENT, "score": 0.5}] for _ in request["queries"]]}
                if answers:
                    result = (answers.pop(0) if len(answers) > 1 else answers[0])(request) or result
                body = result if isinstance(result, bytes) else json.dumps(result).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # clients that hang up are part of the tests
        self.url = f"http://127.0.0.1:{self.http.server_port}/retrieve"

    def __enter__(self) -> Server:
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


def echo(request: dict) -> dict:
    """An answer whose passages have the queries as ids."""
    return {"result": [[{"document": DOCUMENT | {"id": query}, "score": 1.0}] for query in request["queries"]]}


def gone() -> str:
    """The address of a server that has shut down."""
    with Server() as server:
        return server.url


def test_one_request_carries_every_query():
    """A batch is one request; empty and repeated queries are not sent, and the token is."""
    with Server() as server:
        rankings = HttpRetriever(server.url, token="secret").search(["Ada  Lovelace", "", "ada", "Ada Lovelace"], 3)
    assert server.requests == [{"queries": ["Ada Lovelace", "ada"], "topk": 3, "return_scores": True}]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert [len(ranking) for ranking in rankings] == [1, 0, 1, 1]
    passage = rankings[0][0]
    assert (passage.id, passage.title, passage.text) == ("7", "Ada Lovelace", "Ada Lovelace was born in 1815.")


def test_large_batches_are_split_and_merged_in_order():
    """A batch above the server's limits is split by queries, bytes and passages, and its answers keep their order."""
    assert client.ROWS_PER_REQUEST <= Limits().rows and client.QUERIES_PER_REQUEST <= MAX_QUERIES
    with Server(answers=[echo]) as server:
        rankings = HttpRetriever(server.url).search([str(n) for n in range(5000)], 1)
        assert [len(request["queries"]) for request in server.requests] == [2048, 2048, 904]
        assert [ranking[0].id for ranking in rankings] == [str(n) for n in range(5000)]
        server.requests.clear()
        long = [f"{n} {'東' * 8000}" for n in range(100)]  # 48 kB each as JSON
        assert [ranking[0].id for ranking in HttpRetriever(server.url).search(long, 1)] == long
        assert [len(request["queries"]) for request in server.requests] == [43, 43, 14]
        server.requests.clear()
        HttpRetriever(server.url).search([str(n) for n in range(1000)], 100)
        assert [len(request["queries"]) for request in server.requests] == [655, 345]


def test_failures_are_retried_and_logged(caplog):
    """Failed requests and malformed answers are retried, with one line when it begins and one when it ends."""
    answers = [lambda _: None] * 3 + [lambda _: {"wrong": []}, lambda _: None]
    with Server([503, 429, 500], answers) as server, caplog.at_level(logging.WARNING, "retrieval"):
        assert HttpRetriever(server.url).search(["a"], 1)[0][0].id == "7"
    assert len(server.requests) == 5
    first, last = (record.getMessage() for record in caplog.records)
    assert "status 503" in first and "retrying for up to 300 s" in first and "continuing" in last


def answer_with(contents: Any = "Ada", score: Any = 0.5, id_: Any = "7") -> dict:
    return {"result": [[{"document": {"id": id_, "contents": contents}, "score": score}]]}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answer_with(contents=None), "field result.0.0.document.contents: "),
        (answer_with(score=10**400), "field result.0.0.score: "),
        (answer_with(score=float("nan")), "field result.0.0.score: "),
        (answer_with(id_=[7]), "field result.0.0.document.id"),
        ({"result": [None]}, "field result.0: "),
        ({"result": []}, "0 rankings for 1 queries"),
        ([[]], "field the answer: "),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_answer_is_an_error_that_names_the_fault(answer, words):
    """A faulty server never becomes a silent empty result, a traceback, or a score that has no order."""
    with Server(answers=[lambda _: answer]) as server, pytest.raises(RetrievalError) as error:
        HttpRetriever(server.url, retry_deadline_s=0).search(["a"], 1)
    assert words in str(error.value) and "/retrieve form" in str(error.value) and "\n" not in str(error.value)


def test_answers_of_other_servers_are_accepted():
    """Half surrogates, whole numbers, and rows without id and score, as from Search-R1's web search servers."""
    bare = {"result": [[{"document": {"contents": '"Ada"\nborn'}}, {"document": {"contents": '"Bo"\nborn'}}]]}
    with Server(answers=[lambda _: answer_with('"A\ud83d"\nb', 2, 7), lambda _: bare]) as server:
        (passage,) = HttpRetriever(server.url, retry_deadline_s=0).search(["a"], 1)[0]
        first, second = HttpRetriever(server.url, retry_deadline_s=0).search(["a"], 2)[0]
    assert (passage.id, passage.title, passage.text, passage.score) == ("7", "A?", "b", 2.0)
    assert (first.title, first.text, first.score) == ("Ada", "born", 0.0) and first.id != second.id


def test_a_refusal_is_not_repeated():
    """A wrong token is reported at once, even if the server of another part of the batch is down."""
    with Server(statuses=[401] * 9) as server:
        with pytest.raises(RetrievalError, match="refused with status 401"):
            HttpRetriever(server.url).search(["a"], 1)
        assert len(server.requests) == 1
        started = time.monotonic()
        with pytest.raises(RetrievalError, match="refused with status 401"):
            HttpRetriever(f"{server.url},{gone()}").search([str(n) for n in range(100)], 1)
    assert time.monotonic() - started < 10


class Dripping:
    """A server that sends `head`, and then `drop` every `pause_s` seconds for ever."""

    def __init__(self, head: bytes, drop: bytes, pause_s: float = 0.02):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/retrieve"
        self._head, self._drop, self._pause_s, self._over = head, drop, pause_s, threading.Event()

    def _drip(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(self._head)
            while not self._over.wait(self._pause_s):
                connection.sendall(self._drop)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._drip, args=self._listener.accept()[:1], daemon=True).start()

    def __enter__(self) -> Dripping:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("head", "drop"),
    [(b"", b""), (OK + b"Content-Length: 100000\r\n\r\n", b"x"), (OK + b"Connection: close\r\n\r\n", b"x")],
)
def test_the_time_out_holds_for_the_complete_answer(head, drop):
    """A server that never answers, or sends a byte now and then, is given up."""
    with Dripping(head, drop) as server, pytest.raises(RetrievalError, match=r"Timeout: no complete answer in 0\.4 s"):
        HttpRetriever(server.url, timeout_s=0.4, retry_deadline_s=0).search(["a"], 1)


def test_an_answer_without_end_does_not_fill_the_memory(monkeypatch):
    """A server that sends for ever is given up before the time-out."""
    monkeypatch.setattr("retrieval.remote.wire.ANSWER_BYTES", 2**20)
    with Dripping(OK + b"\r\n", b"x" * 2**18, 0.0) as server, pytest.raises(RetrievalError, match="more than 1048576"):
        HttpRetriever(server.url, retry_deadline_s=0).search(["a"], 1)


def test_replicas_share_a_batch():
    """A batch is split over the replicas, and its answers keep their order."""
    with Server(answers=[echo]) as first, Server(answers=[echo]) as second:
        queries = [str(n) for n in range(200)]
        rankings = HttpRetriever(f"{first.url}, {second.url}").search(queries, 1)
        assert [ranking[0].id for ranking in rankings] == queries
        assert [len(r["queries"]) for r in first.requests + second.requests] == [100, 100]


def test_a_failed_replica_is_left_alone():
    """Another replica answers at once, and one that hangs costs its time-out only now and then."""
    with Dripping(b"", b"", 60) as hanging, Server() as server:
        retriever = HttpRetriever(f"{hanging.url},{server.url},{gone()}", timeout_s=0.5, retry_deadline_s=5)
        started = time.monotonic()
        for n in range(20):
            assert retriever.search([str(n)], 1)[0][0].id == "7"
        assert time.monotonic() - started < 5 and len(server.requests) == 20


def test_a_program_can_end_while_servers_are_down():
    """A stopped run does not wait for threads that retry."""
    code = (
        "import time; from retrieval.protocol import in_background\n"
        "from retrieval.remote.client import HttpRetriever\n"
        f"in_background(lambda: HttpRetriever('{gone()},{gone()}').search([str(n) for n in range(100)], 1))\n"
        "time.sleep(0.5)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True).returncode == 0

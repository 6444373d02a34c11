"""HTTP retrievers against real servers on loopback, which fail in many ways."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers import people

from retrieval.protocol import RetrievalError
from retrieval.remote.client import HttpRetriever, ShardedRetriever, connect
from retrieval.service import RetrievalService

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


def gone() -> str:
    """The address of a server that has shut down."""
    with Server() as server:
        return server.url


def test_one_request_carries_every_query():
    """One call per query would make retrieval the bottleneck; empty and repeated queries would be sent."""
    with Server() as server:
        rankings = HttpRetriever([server.url]).search(["Ada  Lovelace", "", "ada", "Ada Lovelace"], 3)
    assert server.requests == [{"queries": ["Ada Lovelace", "ada"], "topk": 3, "return_scores": True}]
    assert [len(ranking) for ranking in rankings] == [1, 0, 1, 1]
    passage = rankings[0][0]
    assert (passage.id, passage.title, passage.text) == ("7", "Ada Lovelace", "Ada Lovelace was born in 1815.")


def test_large_batches_are_cut_and_put_together():
    """A batch above the server's limits would be refused, or its parts would return in another order."""

    def answer(request):
        rows = [{"document": DOCUMENT | {"id": query}, "score": 1.0} for query in request["queries"]]
        return {"result": [[row] for row in rows]}

    with Server(answers=[answer]) as server:
        rankings = HttpRetriever([server.url]).search([str(n) for n in range(5000)], 1)
        assert [len(request["queries"]) for request in server.requests] == [2048, 2048, 904]
        assert [ranking[0].id for ranking in rankings] == [str(n) for n in range(5000)]
        server.requests.clear()
        long = [f"{n} {'東' * 8000}" for n in range(100)]  # 48 kB each as JSON
        assert [ranking[0].id for ranking in HttpRetriever(server.url).search(long, 1)] == long
        assert [len(request["queries"]) for request in server.requests] == [43, 43, 14]


def test_a_stumbling_server_is_tried_again(caplog):
    """One failed request would end the run, or waiting without a log line would look like a hang."""
    with Server(statuses=[503, 429, 500]) as server, caplog.at_level(logging.WARNING, "retrieval"):
        assert HttpRetriever([server.url]).search(["a"], 1)[0][0].id == "7"
    assert len(server.requests) == 4
    first, last = (record.getMessage() for record in caplog.records)
    assert "status 503" in first and "retrying for up to 300 s" in first and "continuing" in last


@pytest.mark.parametrize(
    "answer", [{"wrong": []}, {"result": [[{"document": {}}]]}, {"result": []}, 3, {"result": [[{"score": "x"}]]}]
)
def test_an_answer_out_of_form_is_tried_again_and_then_an_error(answer):
    """A silent empty result would teach the policy that searching is useless."""
    with Server(answers=[lambda _: answer, lambda _: None]) as server:
        assert HttpRetriever([server.url]).search(["a"], 1)[0][0].id == "7"
    with Server(answers=[lambda _: answer]) as server, pytest.raises(RetrievalError, match="form"):
        HttpRetriever([server.url], retry_deadline_s=0.3).search(["a"], 1)


def answer_with(contents: Any = "Ada", score: Any = 0.5, id_: Any = "7") -> dict:
    return {"result": [[{"document": {"id": id_, "contents": contents}, "score": score}]]}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answer_with(contents=None), "field contents is of type NoneType, expected str"),
        (answer_with(contents=7), "field contents is of type int"),
        (answer_with(score=10**400), "expected a finite number"),
        (answer_with(score=float("inf")), "expected a finite number"),
        (answer_with(score=float("nan")), "expected a finite number"),
        (answer_with(score="0.5"), "field score is of type str"),
        (answer_with(score=None), "field score is of type NoneType"),
        (answer_with(score=True), "field score is of type bool"),
        (answer_with(id_=None), "field id is of type NoneType"),
        (answer_with(id_=[7]), "field id is of type list"),
        ({"result": [[None]]}, "a result is of type NoneType"),
        ({"result": [[{"document": "Ada", "score": 1.0}]]}, "field document is of type str"),
        ({"result": [None]}, "a ranking is of type NoneType"),
        ({"result": {"a": []}}, "field result is of type dict"),
        ({"result": "a"}, "field result is of type str"),
        ([[]], "the answer is of type list"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"result": [[{"score": ' + b"9" * 5000 + b"}]]}", "not JSON"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(answer, words):
    """A faulty server would end the run in a traceback, or a score of NaN would break the order of passages."""
    with Server(answers=[lambda _: answer]) as server, pytest.raises(RetrievalError) as error:
        HttpRetriever(server.url, retry_deadline_s=0).search(["a"], 1)
    assert words in str(error.value) and "/retrieve form" in str(error.value) and "\n" not in str(error.value)


def test_half_surrogates_and_whole_numbers_are_taken():
    """An answer that other clients of /retrieve accept would be refused."""
    with Server(answers=[lambda _: answer_with('"A\ud83d"\nb', 2, 7)]) as server:
        (passage,) = HttpRetriever(server.url, retry_deadline_s=0).search(["a"], 1)[0]
    assert (passage.id, passage.title, passage.text, passage.score) == ("7", "A\ud83d", "b", 2.0)


def test_rows_without_id_and_score_are_taken():
    """The servers that search the web for Search-R1 send neither; a run with them would retry for five minutes."""
    answer = {"result": [[{"document": {"contents": '"Ada"\nborn'}}, {"document": {"contents": '"Bo"\nborn'}}]]}
    with Server(answers=[lambda _: answer]) as server:
        first, second = HttpRetriever(server.url, retry_deadline_s=0).search(["a"], 2)[0]
    assert (first.title, first.text, first.score) == ("Ada", "born", 0.0) and first.id != second.id


@pytest.mark.parametrize("status", [401, 404, 413, 422])
def test_a_refusal_is_not_repeated(status):
    """A wrong token or address would be retried for five minutes before the user learns of it."""
    with Server(statuses=[status] * 9) as server, pytest.raises(RetrievalError, match=f"refused with status {status}"):
        HttpRetriever([server.url]).search(["a"], 1)
    assert len(server.requests) == 1


def test_an_absent_server_is_one_named_error():
    """A stack of connection errors would hide the address; retries would stop too early, or never."""
    urls, started = [gone(), gone()], time.monotonic()
    with pytest.raises(RetrievalError) as error:
        HttpRetriever(urls, retry_deadline_s=1).search(["a"], 1)
    assert 1 <= time.monotonic() - started < 20
    assert all(url in str(error.value) for url in urls) and "no answer in 1 s" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_never_answers_is_given_up():
    """Without a timeout, a lost packet would stop a run for ever."""

    def sleep(_):
        time.sleep(3)

    with Server(answers=[sleep]) as server, pytest.raises(RetrievalError, match="Timeout"):
        HttpRetriever([server.url], timeout_s=0.2, retry_deadline_s=0.5).search(["a"], 1)


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
    "head", [b"", OK + b"X-Long: ", OK + b"Content-Length: 100000\r\n\r\n", OK + b"Connection: close\r\n\r\n"]
)
def test_the_time_out_counts_the_whole_answer(head):
    """A timeout between bytes never fires while a server sends one now and then: the run would hang."""
    with Dripping(head, b"x") as server, pytest.raises(RetrievalError, match=r"Timeout: no complete answer in 0\.4 s"):
        started = time.monotonic()
        HttpRetriever(server.url, timeout_s=0.4, retry_deadline_s=0).search(["a"], 1)
    assert 0.3 < time.monotonic() - started < 5


def test_an_answer_without_end_does_not_fill_the_memory(monkeypatch):
    """A server that sends for ever would exhaust the memory before the timeout."""
    monkeypatch.setattr("retrieval.remote.wire.ANSWER_BYTES", 2**20)
    with Dripping(OK + b"\r\n", b"x" * 2**18, 0.0) as server, pytest.raises(RetrievalError, match="more than 1048576"):
        HttpRetriever(server.url, timeout_s=60, retry_deadline_s=0).search(["a"], 1)


def test_replicas_share_the_load():
    """The second server would stand idle until the first one fails."""

    def answer(request):
        time.sleep(0.2)
        return {"result": [[{"document": DOCUMENT | {"id": query}, "score": 1.0}] for query in request["queries"]]}

    with Server(answers=[answer]) as one, Server(answers=[answer]) as two:
        retriever = HttpRetriever([one.url, two.url])
        queries = [str(n) for n in range(200)]
        assert [ranking[0].id for ranking in retriever.search(queries, 1)] == queries
        assert [len(r["queries"]) for r in one.requests] == [len(r["queries"]) for r in two.requests] == [100]
        for query in queries[:6]:
            retriever.search([query], 1)
        assert len(one.requests) == len(two.requests) == 4
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda query: retriever.search([query], 1), queries[:8]))
        assert len(one.requests) == len(two.requests) == 8


def test_a_replica_that_hangs_is_left_alone():
    """Every second batch would wait for the timeout of a replica that accepts requests and never answers."""
    with Dripping(b"", b"", 60) as hanging, Server() as server:
        retriever, started = (
            HttpRetriever([hanging.url, server.url], timeout_s=0.5, retry_deadline_s=5),
            time.monotonic(),
        )
        for n in range(20):
            assert retriever.search([str(n)], 1)[0][0].id == "7"
        assert time.monotonic() - started < 3 and len(server.requests) == 20


def test_a_refusal_of_one_share_ends_the_search():
    """One share of a batch is refused for good, and the search would still wait minutes for another share's server."""
    with Server(statuses=[401] * 9) as server:
        started = time.monotonic()
        with pytest.raises(RetrievalError, match="refused with status 401"):
            HttpRetriever([server.url, gone()], retry_deadline_s=300).search([str(n) for n in range(100)], 1)
        assert time.monotonic() - started < 5


def test_a_program_can_end_while_servers_are_down():
    """A stopped run would wait for threads that retry dead servers for five minutes."""
    code = (
        "from retrieval.protocol import in_background; from retrieval.remote.client import connect; import time\n"
        f"for servers in ('{gone()},{gone()}', '{gone()}|{gone()}'):\n"
        "    in_background(lambda: connect(servers).search([str(n) for n in range(100)], 1))\n"
        "    time.sleep(0.5)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True).returncode == 0


def test_the_next_replica_takes_over():
    """A replica that is gone would be tried first for every batch, and each batch would wait."""
    with Server() as server:
        retriever = HttpRetriever([gone(), server.url], retry_deadline_s=0)
        with pytest.raises(RetrievalError):
            HttpRetriever([gone()], retry_deadline_s=0).search(["a"], 1)
        retriever = HttpRetriever([gone(), server.url], retry_deadline_s=5)
        for query in "abc":
            assert retriever.search([query], 1)[0][0].id == "7"
        for _ in range(8):  # which replica is asked first is random
            assert HttpRetriever([gone(), server.url], retry_deadline_s=0).search(["d"], 1)[0][0].id == "7"
    assert [request["queries"] for request in server.requests] == [["a"], ["b"], ["c"], *8 * [["d"]]]


def test_a_server_that_comes_back_is_used(caplog):
    """A server that restarts within the retry deadline would still end the run."""
    url = gone()

    def restart():
        time.sleep(0.5)
        server = ThreadingHTTPServer(("127.0.0.1", urlsplit(url).port), working.http.RequestHandlerClass)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    working = Server()
    thread = threading.Thread(target=restart)
    thread.start()
    with caplog.at_level(logging.WARNING, "retrieval"):
        assert HttpRetriever([url], retry_deadline_s=30).search(["a"], 1)[0][0].id == "7"
    thread.join()
    working.http.server_close()
    assert "continuing" in caplog.records[-1].getMessage()


def test_the_token_travels():
    """Requests would lack the token, and a protected server would refuse its own users."""
    with Server() as server:
        connect(server.url, token="secret").search(["a"], 1)
        connect(server.url).search(["a"], 1)
    assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret", None]


def test_parts_of_a_corpus_answer_as_the_whole():
    """Passages of a later shard would be lost, or rank before better ones of the first."""
    passages = people()
    full = RetrievalService.from_corpus(passages)
    encoder = full._ranker.encoder
    bounds = [(0, 100), (100, 101), (101, 320)]
    parts = ShardedRetriever([RetrievalService.from_corpus(passages[a:b], encoder) for a, b in bounds])
    queries = [f"{p.title} born" for p in passages] + ["", "born"]
    for k in (1, 3, 150):
        assert parts.search(queries, k) == full.search(queries, k)


def test_addresses_are_read():
    """Shards of a corpus would be taken for replicas, so that most of it is silently never searched."""
    with Server() as one, Server() as two:
        parts = connect(f"{one.url}|{two.url}")
        assert isinstance(parts, ShardedRetriever) and len(parts.search(["a"], 5)[0]) == 2
        replicas = connect(f"{one.url}, {two.url}")
        assert isinstance(replicas, HttpRetriever) and len(replicas.search(["a"], 5)[0]) == 1

"""The server over real HTTP on loopback, as Search-R1's clients use it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from helpers import people
from programs import wait_until
from serving import HTTP, Running

from retrieval.protocol import Passage, RetrievalError
from retrieval.remote.client import HttpRetriever
from retrieval.remote.server import Limits, make_app
from retrieval.service import RetrievalService


class Watched:
    """A real service whose calls are recorded, and slowed down or broken on demand."""

    def __init__(self, service: RetrievalService, seconds: float = 0.0):
        self.service, self.seconds, self.calls = service, seconds, []
        self.broken: BaseException | None = None

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.calls.append((list(queries), k))
        time.sleep(self.seconds)
        if self.broken or any("poison" in query for query in queries):
            raise self.broken or ValueError("poison found in /secret/place")
        return self.service.search(queries, k)

    def describe(self) -> dict:
        return self.service.describe()


@pytest.fixture(scope="module")
def service() -> RetrievalService:
    return RetrievalService.from_corpus(people(), cache_bytes=0)


@pytest.fixture(scope="module")
def running(service) -> Iterator[Running]:
    with Running(make_app(service)) as running:
        yield running


def contents(passage: Passage) -> dict:
    return {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}


def test_both_shapes_of_the_answer(running, service):
    """Answers have the fields that Search-R1's clients parse, with and without scores."""
    queries = ["Baro Quill born", "", "Zora Crane"]
    wanted = service.search(queries, 2)
    with_scores = running.post({"queries": queries, "topk": 2, "return_scores": True})
    assert with_scores.status == 200 and with_scores.headers["content-type"] == "application/json"
    rows = [[{"document": contents(p), "score": p.score} for p in ranking] for ranking in wanted]
    assert with_scores.json() == {"result": rows} and rows[1] == []
    plain = running.post({"queries": queries, "topk": 2})
    assert plain.json() == {"result": [[contents(p) for p in ranking] for ranking in wanted]}
    default = running.post({"queries": queries[:1], "topk": None}).json()["result"]
    assert len(default[0]) == 3 and running.post({"queries": []}).json() == {"result": []}


def test_oversized_bodies_are_cut_off(service):
    """A body above the limit is refused, also without a length."""
    with Running(make_app(service, Limits(body_bytes=1000))) as running:
        assert running.post(b" " * 1001).status == 413
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        connection.request("POST", "/retrieve", body=iter([b" " * 600] * 4), encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413 and "1000 bytes" in json.loads(answer.read())["detail"]
        assert running.post({"queries": ["Baro Quill"]}).status == 200


def test_a_token_is_asked_for(service):
    """Only /health answers without the token."""
    with Running(make_app(service, token="s3cret")) as running:
        body = {"queries": ["Baro Quill"]}
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            answer = running.post(body, **headers)
            assert answer.status == 401 and "bearer token" in answer.json()["detail"]
            assert HTTP.request("GET", running.url + "/metrics", headers=headers).status == 401
        assert running.post(body, Authorization="Bearer s3cret").status == 200
        assert HTTP.request("GET", running.url + "/health").json() == {"status": "ok", "rows": 320}


def test_concurrent_requests_share_searches(service):
    """Concurrent requests are searched together, and each gets its own passages."""
    watched = Watched(service, seconds=0.05)
    passages = people()
    with Running(make_app(watched)) as running, ThreadPoolExecutor(32) as pool:
        retriever = HttpRetriever(running.url + "/retrieve")

        def ask(number: int) -> bool:
            queries = [f"{passages[(number * 7 + i) % 320].title} born" for i in range(1 + number % 4)]
            k = 1 + number % 3
            return retriever.search(queries, k) == service.search(queries, k)

        assert all(pool.map(ask, range(96)))
        assert len(watched.calls) < 48 and len({k for _, k in watched.calls}) == 3
        metrics = HTTP.request("GET", running.url + "/metrics").data.decode()
    assert 'retriever_requests_total{status="200"} 96.0' in metrics
    assert f"retriever_batch_queries_count {len(watched.calls):.1f}" in metrics
    assert "retriever_in_flight 0.0" in metrics


class Panic(BaseException):
    """Like the exception of a panicking Rust library, this is not an Exception."""


@pytest.mark.parametrize("error", [RetrievalError("the disk is\ngone"), MemoryError("/secret"), Panic("/secret")])
def test_a_failed_search_is_told_and_survived(service, error):
    """A failed search is a 503 without internals, which /health reports until a search succeeds."""
    watched = Watched(service)
    with Running(make_app(watched)) as running:

        def health() -> tuple[int, dict]:
            answer = HTTP.request("GET", running.url + "/health")
            return answer.status, answer.json()

        watched.broken = error
        answer = running.post({"queries": ["Baro Quill"]})
        assert answer.status == 503
        assert answer.json() == {"detail": "the search failed; the server's log says why"}
        assert [health() for _ in range(2)] == [(503, {"status": "searches fail", "rows": 320})] * 2
        watched.broken = None
        assert health() == (200, {"status": "ok", "rows": 320})
        assert running.post({"queries": ["Baro Quill"]}).status == 200


def test_one_poisoned_query_spoils_one_answer(service):
    """A query that cannot be searched fails its own request only."""
    watched = Watched(service, seconds=0.1)
    with Running(make_app(watched)) as running, ThreadPoolExecutor(9) as pool:
        first = pool.submit(running.post, {"queries": ["Lena Wend"]})
        wait_until(lambda: len(watched.calls) == 1)
        queries = ["poison" if n == 3 else people()[n].title for n in range(8)]
        answers = list(pool.map(lambda query: running.post({"queries": [query], "topk": 1}), queries))
        assert first.result().status == 200
        assert HTTP.request("GET", running.url + "/health").status == 200
    assert [answer.status for answer in answers] == [200] * 3 + [503] + [200] * 4
    assert [a.json()["result"][0][0]["id"] for a in answers if a.status == 200] == [
        f"p{n}" for n in range(8) if n != 3
    ]


def test_a_refused_body_without_end_is_cut_off(service, monkeypatch):
    """A refused body is read up to a limit of bytes."""
    monkeypatch.setattr("retrieval.remote.http.LINGER_BYTES", 2**20)
    with Running(make_app(service, Limits(body_bytes=1000))) as running:
        connection, sent = running.raw(b"", 2**40), 0
        with pytest.raises(OSError):
            while sent < 2**30:
                sent += connection.send(b" " * 2**16)
        connection.close()


def test_a_body_that_does_not_come_is_not_waited_for(service):
    """A client cut off in the middle of a body does not hold its place."""
    with Running(make_app(service, Limits(body_s=0.3, requests=1))) as running:
        connection = running.raw(b'{"queries": ', 100)
        wait_until(lambda: running.post({"queries": []}).status == 503)  # the only place is taken
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408 and json.loads(answer.read()) == {"detail": "the body did not arrive in 0.3 s"}
        connection.close()
        assert running.post({"queries": ["Baro Quill"]}).status == 200


def test_more_than_fits_is_refused(service):
    """Requests and passages above the limit get 503 and may be asked again."""
    watched = Watched(service, seconds=0.5)
    with Running(make_app(watched, Limits(requests=3, rows_at_once=100))) as running, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(running.post, {"queries": ["Baro Quill"], "topk": 30}) for _ in range(3)]
        wait_until(lambda: "retriever_in_flight 3.0" in HTTP.request("GET", running.url + "/metrics").data.decode())
        answer = running.post({"queries": ["Lena Wend"]})
        assert (
            answer.status == 503 and answer.headers["Retry-After"] == "1" and "3 requests" in answer.json()["detail"]
        )
        assert [request.result().status for request in waiting] == [200] * 3
        answer = running.post({"queries": ["Lena Wend", "Baro Quill"], "topk": 51})
        assert answer.status == 503 and "100 passages" in answer.json()["detail"]
        assert running.post({"queries": ["Lena Wend"], "topk": 51}).status == 200


def test_a_client_that_reads_nothing_is_hung_up_on(monkeypatch):
    """The connection of a client that does not read its answer is closed."""
    monkeypatch.setattr("retrieval.remote.http.STALLED_S", 1)
    long = RetrievalService.from_corpus([Passage(str(n), f"Baro {n}", "quill " * 5000) for n in range(20)])
    with Running(make_app(long)) as running:
        body = {"queries": [f"Baro {n} quill" for n in range(20)], "topk": 20}
        connection = running.raw(json.dumps(body).encode())  # 12 MB come back
        wait_until(lambda: 'status="200"' in HTTP.request("GET", running.url + "/metrics").data.decode())
        wait_until(lambda: running.connections <= 1)  # the other one asks for /metrics
        connection.close()


def test_a_request_whose_headers_do_not_end_is_not_waited_for(service, monkeypatch):
    """A connection that sends no complete request is closed, even if a byte arrives from time to time."""
    monkeypatch.setattr("retrieval.remote.http.HEAD_S", 0.5)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with Running(make_app(Watched(service, seconds=1.0))) as running:
        silent, half, slow, second = (socket.create_connection(("127.0.0.1", running.port), 5) for _ in range(4))
        half.sendall(request)
        second.sendall(request + b"\r\n" + request)
        started = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - started < 10:
                slow.send(b"G")
                time.sleep(0.05)
        assert time.monotonic() - started < 5
        assert silent.recv(1) == half.recv(1) == b""
        answered = b"".join(iter(lambda: second.recv(1024), b""))
        assert answered.count(b"200 OK") == 1
        # A request whose answer takes longer is none of them.
        assert running.post({"queries": ["Baro Quill"]}).status == 200
        for connection in (silent, half, slow, second):
            connection.close()


def test_pages_of_other_sites_read_no_passages_without_a_token(service, running):
    """A server without a token refuses pages of other sites, also under a host name that resolves to it."""
    evil = f"http://evil.example:{running.port}"
    for path in ("/retrieve", "/info", "/metrics"):
        for headers in ({"Host": f"evil.example:{running.port}", "Origin": evil}, {"Origin": evil}):
            if path == "/retrieve":
                answer = running.post({"queries": ["Baro Quill"]}, **headers)
            else:
                answer = HTTP.request("GET", running.url + path, headers=headers)
            assert answer.status == 403 and b"quill" not in answer.data.lower(), (path, headers)
    with Running(make_app(service, hosts=())) as anywhere:
        assert anywhere.post({"queries": ["Baro Quill"]}, Host="retriever:8000").status == 200
        assert anywhere.post({"queries": ["Baro Quill"]}, Origin=evil).status == 403
    with Running(make_app(service, token="s3cret")) as closed:
        headers = {"Host": "retriever:8000", "Origin": evil, "Authorization": "Bearer s3cret"}
        assert closed.post({"queries": ["Baro Quill"]}, **headers).status == 200


def test_half_a_surrogate_pair_in_a_passage_is_served():
    """Half a surrogate pair, valid in JSON but not in UTF-8, is neither a 500 nor lost, and in queries replaced."""
    passages = [Passage("odd", "Baro Quill", "Baro Quill wrote \ud83d once."), *people()[1:]]
    service = RetrievalService.from_corpus(passages)
    queries = ["\ud800 Baro Quill", "\x00", "東京 born", "word " * 20_000]
    with Running(make_app(service)) as running:
        rankings = HttpRetriever(running.url + "/retrieve", retry_deadline_s=0).search(queries, 2)
    assert rankings[0][0].text.endswith("? once.") and rankings[0][1] == service.search(["? Baro Quill"], 2)[0][1]
    assert rankings[1] == []

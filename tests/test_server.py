"""The server: real processes and real HTTP on loopback, as Search-R1's clients speak it."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import urllib3
import uvicorn
from helpers import people

from retrieval.client import HttpRetriever, connect
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.directory import build_index
from retrieval.hashing import HashingEncoder
from retrieval.protocol import Passage, RetrievalError
from retrieval.server import Limits, make_app
from retrieval.service import RetrievalService

PROGRAM = Path(__file__).resolve().parents[1] / "launch" / "serve_retriever.py"
HTTP = urllib3.PoolManager(retries=False)


class Running:
    """An application on a free port, in a thread of this process."""

    def __init__(self, app):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    def post(self, body, path: str = "/retrieve", **headers) -> urllib3.BaseHTTPResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return HTTP.request("POST", self.url + path, body=data, headers=headers)


class Watched:
    """A real service whose calls are recorded, slowed down or broken on demand."""

    def __init__(self, service: RetrievalService, seconds: float = 0.0):
        self.service, self.seconds, self.calls, self.broken = service, seconds, [], False

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.calls.append((list(queries), k))
        time.sleep(self.seconds)
        if self.broken:
            raise RetrievalError("the disk is\ngone")
        return self.service.search(queries, k)

    def describe(self) -> dict:
        return self.service.describe()


@pytest.fixture(scope="module")
def service() -> RetrievalService:
    return RetrievalService.from_corpus(people(), cache_size=0)


@pytest.fixture(scope="module")
def running(service) -> Iterator[Running]:
    with Running(make_app(service)) as running:
        yield running


def contents(passage: Passage) -> dict:
    return {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}


def test_both_shapes_of_the_answer(running, service):
    """An existing client finds other field names, or the shape without scores fails as in the original."""
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


def test_a_client_written_for_search_r1(running):
    """The original's own way of reading an answer: title from the first line, text from the rest."""
    payload = {"queries": ["Baro Quill born"], "topk": 3, "return_scores": True}
    results = running.post(payload).json()["result"]
    text = ""
    for number, row in enumerate(results[0]):
        content = row["document"]["contents"]
        title, body = content.split("\n")[0], "\n".join(content.split("\n")[1:])
        text += f"Doc {number + 1}(Title: {title}) {body}\n"
    assert text.startswith('Doc 1(Title: "Baro Quill") Baro Quill was born in 1800')


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "expected an object"),
        ({}, "queries"),
        ({"queries": "who"}, "queries"),
        ({"queries": ["a", 3]}, "queries"),
        ({"queries": ["a"], "topk": "3"}, "topk"),
        ({"queries": ["a"], "topk": True}, "topk"),
        ({"queries": ["a"], "topk": 0}, "topk"),
        ({"queries": ["a"], "topk": 101}, "topk"),
        (b'{"queries": ["a"], "topk": NaN}', "topk"),
        ({"queries": ["a"], "return_scores": 1}, "return_scores"),
        ({"queries": ["a"] * 4097}, "at most 4096"),
        ({"queries": ["a" * 8193]}, "at most 8192"),
    ],
)
def test_malformed_requests_are_refused(running, body, words):
    """A wrong request is answered with a traceback, a guess, or the end of the server."""
    answer = running.post(body)
    assert answer.status == 422 and words in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


def test_other_requests_are_refused(running):
    """A wrong path or method gives a page of HTML to a client that reads JSON."""
    assert running.post({}, path="/search").status == 404
    answer = HTTP.request("GET", running.url + "/retrieve")
    assert answer.status == 405 and answer.json()["detail"]


def test_oversized_bodies_are_cut_off(service):
    """A body without a length fills the memory of the server."""
    with Running(make_app(service, Limits(body_bytes=1000))) as running:
        assert running.post(b" " * 1001).status == 413
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        connection.request("POST", "/retrieve", body=iter([b" " * 600] * 4), encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413 and "1000 bytes" in json.loads(answer.read())["detail"]
        assert running.post({"queries": ["Baro Quill"]}).status == 200


def test_queries_of_any_kind_over_http(running):
    """What a model writes (half surrogates, control characters) ends in a 500, which is tried again for minutes."""
    odd = ["\ud800 Baro Quill", "\x00", "東京 born", "## ##", "word " * 20_000]
    found = HttpRetriever([running.url + "/retrieve"], patience_s=1).search(odd, 3)
    assert found[0][0].id == "p0" and found[1] == []


def test_a_token_is_asked_for(service):
    """A server on a network answers whoever asks."""
    with Running(make_app(service, token="s3cret")) as running:
        body = {"queries": ["Baro Quill"]}
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            answer = running.post(body, **headers)
            assert answer.status == 401 and "bearer token" in answer.json()["detail"]
            assert HTTP.request("GET", running.url + "/metrics", headers=headers).status == 401
        assert running.post(body, Authorization="Bearer s3cret").status == 200
        assert HTTP.request("GET", running.url + "/health").json() == {"status": "ok", "rows": 320}


def test_concurrent_requests_share_searches(service):
    """Every client waits for a search of its own, or gets the passages of another one's query."""
    watched = Watched(service, seconds=0.05)
    passages = people()
    with Running(make_app(watched)) as running, ThreadPoolExecutor(32) as pool:
        retriever = HttpRetriever([running.url + "/retrieve"])

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


def test_a_failed_search_is_told_and_survived(service):
    """One failed search ends the server, or its clients get empty results."""
    watched = Watched(service)
    with Running(make_app(watched)) as running:
        watched.broken = True
        answer = running.post({"queries": ["Baro Quill"]})
        assert answer.status == 503 and "the disk is gone" in answer.json()["detail"]
        watched.broken = False
        assert running.post({"queries": ["Baro Quill"]}).status == 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_corpus(root / "people.jsonl", people())
    corpus = MemoryMappedCorpus(root / "people.jsonl")
    build_index(root / "index", corpus, HashingEncoder(256).fit(corpus))
    return root / "index"


def start(directory: Path, *flags: str) -> tuple[subprocess.Popen, str]:
    """A server process, and its address."""
    command = [sys.executable, str(PROGRAM), f"--index={directory}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("serving 320 passages on http://127.0.0.1:"), line + process.stderr.read()
    return process, line.split()[-1]


def test_the_program_serves_and_stops(directory, tmp_path):
    """SIGTERM cuts off a request in flight, or leaves the program with the exit code of a crash."""
    (tmp_path / "token").write_text("s3cret\n")
    process, url = start(directory, "--port=0", f"--token_file={tmp_path / 'token'}")
    retriever = HttpRetriever([url], token="s3cret")
    expected = RetrievalService.open(directory).search(["Baro Quill born"], 2)
    assert retriever.search(["Baro Quill born"], 2) == expected
    with pytest.raises(RetrievalError, match="401"):
        HttpRetriever([url]).search(["a"], 1)
    with ThreadPoolExecutor() as pool:
        large = pool.submit(retriever.search, [f"{p.title} {n}" for n in range(3) for p in people()], 50)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert len(large.result()) == 960
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""


def test_the_corpus_behind_an_address_has_a_name(directory, tmp_path):
    """An evaluation cannot say what it searched: results over another corpus look like those over the right one."""
    service = RetrievalService.open(directory)
    digest = hashlib.sha256((directory / "corpus.jsonl").read_bytes()).hexdigest()
    named = {"corpus": "index", "corpus_sha256": digest, "rows": 320}
    in_memory = RetrievalService.from_corpus(people())
    from_file = RetrievalService.from_corpus(directory / "corpus.jsonl")
    assert service.describe() == named and from_file.describe() == {**named, "corpus": "corpus.jsonl"}
    assert in_memory.describe() == {**named, "corpus": None}
    part = RetrievalService.from_corpus(people()[:20])
    with Running(make_app(service, token="s3cret")) as one, Running(make_app(service)) as two:
        assert HTTP.request("GET", one.url + "/info").status == 401
        assert connect(one.url + "/retrieve", token="s3cret").describe() == named
        both = f"{one.url}/retrieve,{two.url}/retrieve"
        assert connect(both, token="s3cret").describe() == named
        with Running(make_app(part)) as three:
            parts = connect(f"{two.url}/retrieve|{three.url}/retrieve")
            digests = f"{digest}|{part.describe()['corpus_sha256']}"
            assert parts.describe() == {"corpus": None, "corpus_sha256": digests, "rows": 340}
            with pytest.raises(RetrievalError, match="different corpora"):
                connect(f"{two.url}/retrieve,{three.url}/retrieve").describe()
    with pytest.raises(RetrievalError, match="/info"):
        connect(one.url + "/retrieve").describe()


def test_a_request_in_flight_is_finished(service):
    """A stop in the middle of a search drops the answer that a client waits for."""
    with ThreadPoolExecutor() as pool:
        with Running(make_app(Watched(service, seconds=1.0))) as running:
            answer = pool.submit(running.post, {"queries": ["Baro Quill"]})
            time.sleep(0.4)
        assert answer.result().status == 200  # the server stopped while it was searching


def test_a_killed_server_is_waited_for(directory):
    """kill -9 of the server ends the run of every client, or a client gets another one's answer after it."""
    process, url = start(directory, "--port=0")
    retriever = HttpRetriever([url], patience_s=60)
    direct = RetrievalService.open(directory)
    queries = [f"{p.title} born" for p in people()]
    assert retriever.search(queries[:5], 2) == direct.search(queries[:5], 2)
    process.kill()
    process.communicate()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(retriever.search, queries, 2)
        time.sleep(0.5)
        assert not waiting.done()
        again, _ = start(directory, f"--port={urlsplit(url).port}")
        assert waiting.result(timeout=60) == direct.search(queries, 2)
    again.terminate()
    again.communicate()


def test_bad_flags_are_one_line(directory, tmp_path):
    """A wrong flag ends in a traceback, or in a server that serves something else."""
    (tmp_path / "empty").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, words in (
            ([f"--index={tmp_path / 'absent'}"], "manifest.json"),
            ([f"--index={directory}", f"--port={port}"], f"--port={port}: cannot be bound"),
            ([f"--index={directory}", "--port=70000"], "--port"),
            ([f"--index={directory}", f"--token_file={tmp_path / 'empty'}"], "found 0 words"),
            ([f"--index={directory}", f"--token_file={tmp_path / 'absent'}"], "cannot be read"),
            ([], "--index"),
        ):
            done = subprocess.run([sys.executable, str(PROGRAM), *flags], capture_output=True, text=True, timeout=120)
            (line,) = done.stderr.splitlines()
            assert done.returncode == 2 and done.stdout == "" and words in line


@pytest.mark.slow
def test_a_minute_of_sixty_four_clients(directory):
    """Under load an answer goes to the wrong client, a connection is reset, or the server runs out of something."""
    process, url = start(directory, "--port=0", "--cache_queries=100")
    passages, direct = people(), RetrievalService.open(directory)
    until = time.monotonic() + 60

    def client(seed: int) -> int:
        rng, retriever, asked = random.Random(seed), HttpRetriever([url], patience_s=0), 0
        while time.monotonic() < until:
            queries = [f"{rng.choice(passages).title} born {rng.randrange(50)}" for _ in range(rng.randrange(1, 5))]
            k = rng.randrange(1, 4)
            assert retriever.search(queries, k) == direct.search(queries, k)
            asked += 1
        return asked

    with ThreadPoolExecutor(64) as pool:
        counts = list(pool.map(client, range(64)))
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""
    assert min(counts) > 20

"""External search services as retrievers: a real server on loopback that responds as web services do."""

import json
import logging
import subprocess
import sys
import threading
import time

import pytest
from programs import Program, completed
from serving import Running
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse
from starlette.routing import Route

from retrieval.protocol import CorpusError, RetrievalError
from retrieval.remote.client import HttpRetriever
from retrieval.remote.json_api import LiveSearch, read_settings
from retrieval.remote.wire import NO_DESCRIPTION

KEY = "s3cret/key"


class Service:
    """Answers each query with results that contain it; fails, stalls or returns nonsense on demand."""

    def __init__(self):
        self.calls: list[tuple[str, str, dict]] = []
        self.fail: list = []  # the next responses; None: a normal one
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def results(self, query: str, count: int) -> list[dict]:
        return [
            {"link": f"https://e/{query}/{i}", "name": f"<b>{query}</b> &amp; {i}", "about": {"short": f"text {i}"}}
            for i in range(count)
        ]

    def answer(self, request, query: str, count: int):
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.calls.append((request.method, query, dict(request.headers)))
            fail = self.fail.pop(0) if self.fail else None
        time.sleep(0.05)
        with self.lock:
            self.at_once -= 1
        if fail is not None:
            return fail
        if query == "nothing":
            return JSONResponse({"web": {}})
        return JSONResponse({"web": {"results": [{"other": 1}, *self.results(query, count)]}})

    def app(self) -> Starlette:
        def get(request):
            return self.answer(request, request.query_params["q"], int(request.query_params["n"]))

        async def post(request):
            asked = await request.json()
            assert isinstance(asked["num"], int)
            return self.answer(request, asked["q"][0], asked["num"])

        return Starlette(routes=[Route("/search", get), Route("/ask", post, methods=["POST"])])


@pytest.fixture(scope="module")
def served():
    service = Service()
    with Running(service.app()) as running:
        yield service, running.url


@pytest.fixture
def service(served):
    served[0].calls.clear()
    served[0].fail.clear()
    served[0].most_at_once = 0
    return served[0]


def settings(url: str, **more) -> dict:
    paths = {"results": "web.results", "id": "link", "title": "name", "text": ["about.short", "none.0"]}
    return {"url": f"{url}/search?q={{query}}&n={{k}}", **paths, "headers": {"X-Key": "${TEST_KEY}"}, **more}


def opened(tmp_path, monkeypatch, **given) -> LiveSearch:
    monkeypatch.setenv("TEST_KEY", KEY)
    (tmp_path / "live.json").write_text(json.dumps(given))
    return LiveSearch(*read_settings(tmp_path / "live.json"))


def test_results_become_passages_of_their_own_query(served, service, tmp_path, monkeypatch):
    """Markup stays, a path is applied wrongly, a query gets another's results, or one is requested twice."""
    live = opened(tmp_path, monkeypatch, **settings(served[1]))
    queries = ["who & what?", "", "é {k} ##", "who & what?", "nothing", "x" * 9000, "\ud800"]
    rankings = live.search(queries, 3)
    first = rankings[0][0]
    assert (first.id, first.title, first.text) == ("https://e/who & what?/0", "who & what? & 0", "text 0")
    assert [len(ranking) for ranking in rankings] == [3, 0, 3, 3, 0, 3, 3] and rankings[0] == rankings[3]
    assert rankings[2][1].title == "é {k} ## & 1"
    assert sorted(query for _, query, _ in service.calls) == sorted(
        {"who & what?", "é {k} ##", "nothing", "x" * 8192, "?"}
    )
    assert all(headers["x-key"] == KEY for *_, headers in service.calls) and 1 < service.most_at_once <= 8
    before = len(service.calls)
    assert live.search(queries[:1], 3) == rankings[:1] and len(service.calls) == before, (
        "the ranking must come from the cache"
    )
    live.search(queries[:1], 2)
    assert len(service.calls) == before + 1, "another k needs another request"
    assert live.describe() == {**NO_DESCRIPTION, "corpus": served[1].removeprefix("http://")}


def test_a_service_that_takes_json_and_answers_a_list(served, service, tmp_path, monkeypatch):
    """Half of the services take POST requests, where the number of results must stay a number."""
    body = {"q": ["{query}"], "num": "{k}"}
    fields = settings(served[1]) | {"url": f"{served[1]}/ask", "body": body, "text": "about.short", "id": ""}
    first, second = opened(tmp_path, monkeypatch, **fields).search(["a {k}"], 2)[0]
    assert service.calls[0][:2] == ("POST", "a {k}") and first.id != second.id and len(first.id) == 16


def test_failures_are_waited_out_and_then_told_without_the_key(served, service, tmp_path, monkeypatch, caplog):
    """A busy minute ends a run, a refusal does not end it at once, or the API key appears in a log."""
    live = opened(tmp_path, monkeypatch, **settings(served[1], retry_deadline_s=5))
    busy = PlainTextResponse(f"slow down, {KEY}", 429)
    service.fail += [busy, PlainTextResponse("<html>", 200)]
    with caplog.at_level(logging.DEBUG):
        assert len(live.search(["patience"], 2)[0]) == 2
        assert len(service.calls) == 3
        service.fail += [PlainTextResponse(f"bad key {KEY}", 403)]
        with pytest.raises(RetrievalError, match=r"status 403: bad key \*\*\*"):
            live.search(["refused"], 2)
        service.fail += [RedirectResponse("http://elsewhere/")]
        with pytest.raises(RetrievalError, match="status 307"):
            live.search(["moved"], 2)
        assert len(service.calls) == 5, "a refusal or a redirect must not be retried"
        service.fail += [JSONResponse({"web": {"results": {}}})]
        with pytest.raises(RetrievalError, match="results=web.results is a dict"):
            live.search(["other"], 2)
    assert KEY not in caplog.text and "asked again" in caplog.text


def test_a_query_that_alone_is_refused_finds_nothing(served, service, tmp_path, monkeypatch, caplog):
    """One query too long for a service ends a run, and the answers to the others are requested, and paid for, again;
    or settings that fail for every query look like queries without results."""
    live = opened(tmp_path, monkeypatch, **settings(served[1], at_once=1))
    service.fail += [PlainTextResponse("no such field", 422)] * 2
    with pytest.raises(RetrievalError, match="status 422: no such field"):
        live.search(["a", "b"], 2)
    service.fail += [None, PlainTextResponse(f"too long for {KEY}", 414), None, PlainTextResponse("who are you", 401)]
    assert [len(ranking) for ranking in live.search(["a", "b", "c"], 2)] == [2, 0, 2]
    assert "414: too long for ***: this query gets no passages" in caplog.text and KEY not in caplog.text
    before = len(service.calls)
    with pytest.raises(RetrievalError, match="status 401"):
        live.search(["a", "c", "d"], 2)
    assert len(service.calls) == before + 1, "answered queries must come from the cache"
    with pytest.raises(RetrievalError, match="status 401"):
        service.fail += [None, PlainTextResponse("who are you", 401)]
        live.search(["e", "f"], 2)
    before = len(service.calls)
    assert len(live.search(["e"], 2)[0]) == 2 and len(service.calls) == before, (
        "also if another query of the batch failed"
    )


@pytest.mark.parametrize("end", ["\n", " "])
def test_a_key_of_a_file_ends_with_its_line(served, service, tmp_path, monkeypatch, caplog, end):
    """The line break of a mounted secret makes an invalid header, and every error message shows the key."""
    live = opened(tmp_path, monkeypatch, **settings(served[1]))
    monkeypatch.setenv("TEST_KEY", KEY + end)
    live = LiveSearch(*read_settings(tmp_path / "live.json"))
    assert live.search(["a"], 1)[0] and service.calls[0][2]["x-key"] == KEY


def test_a_key_is_hidden_before_a_message_is_cut(served, service, tmp_path, monkeypatch):
    """A message that is shortened before the key is hidden may end with a part of the key."""
    service.fail += [PlainTextResponse("a" * 195 + KEY, 403)]
    with pytest.raises(RetrievalError) as error:
        opened(tmp_path, monkeypatch, **settings(served[1])).search(["a"], 1)
    assert "aaa***" in str(error.value) and KEY[:3] not in str(error.value)


def test_half_a_surrogate_pair_of_a_service(served, service, tmp_path, monkeypatch):
    """A digest of text that UTF-8 cannot encode makes the search fail until its retry deadline."""
    odd = {"link": "1\ud83d", "name": "T\ud83d", "about": {"short": "b\ud83d"}}
    service.fail += [PlainTextResponse(json.dumps({"web": {"results": [odd]}}))]
    (passage,) = opened(tmp_path, monkeypatch, **settings(served[1])).search(["a"], 1)[0]
    assert (passage.id, passage.title, passage.text) == ("1?", "T?", "b?")


def test_a_service_that_is_gone_costs_its_patience_and_no_more(tmp_path, monkeypatch):
    """Queries wait one after another, each until its own retry deadline."""
    gone = settings("http://127.0.0.1:9", retry_deadline_s=0.5, timeout_s=1, at_once=2)
    live = opened(tmp_path, monkeypatch, **gone)
    began = time.monotonic()
    with pytest.raises(RetrievalError, match="127.0.0.1:9: no answer"):
        live.search([f"q{i}" for i in range(20)], 2)
    assert time.monotonic() - began < 8


def test_no_more_than_so_many_a_second(served, service, tmp_path, monkeypatch):
    """Requests exceed the agreed rate, which services bill or block."""
    live = opened(tmp_path, monkeypatch, **settings(served[1], per_second=20))
    began = time.monotonic()
    live.search([f"q{i}" for i in range(11)], 1)
    assert time.monotonic() - began >= 0.5 and len(service.calls) == 11


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"urls": 1}, "unknown field urls"),
        ({"url": "ftp://x/{query}"}, "url is ftp"),
        ({"url": "https://x/"}, "{query} in it"),
        ({"url": "https://x/", "body": {"q": ["{qurey}"]}}, "{query} in it or in the body"),
        ({"text": []}, "field text is"),
        ({"timeout_s": 0}, "field timeout_s is 0"),
        ({"at_once": 1.5}, "field at_once"),
        ({"headers": {"a": 1}}, "field headers"),
        ({"headers": {"a": "${NOT_SET_HERE}"}}, "NOT_SET_HERE is not set"),
    ],
)
def test_settings_that_cannot_be_meant_are_named(tmp_path, monkeypatch, changed, named):
    """A misspelt field silently gets its default, and is noticed on a bill."""
    with pytest.raises(CorpusError) as error:
        opened(tmp_path, monkeypatch, **settings("https://x") | changed)
    assert named in str(error.value) and "live.json" in str(error.value)


def test_it_is_served_as_every_other_retriever(served, service, tmp_path, monkeypatch):
    """A live service that is served at /retrieve differs from other retrievers, which a run must not notice."""
    monkeypatch.setenv("TEST_KEY", KEY)
    (tmp_path / "live.json").write_text(json.dumps(settings(served[1])))
    command = [sys.executable, "launch/serve_retriever.py", f"--live={tmp_path / 'live.json'}", "--port=0"]
    program = Program(command, stderr=subprocess.DEVNULL)
    line = program.stdout.readline()
    assert line.startswith(f"serving {served[1].removeprefix('http://')} on http://127.0.0.1:"), line
    rankings = HttpRetriever([line.split()[-1]]).search(["first", "second"], 2)
    program.terminate()
    assert [ranking[0].text for ranking in rankings] == ["text 0", "text 0"] and rankings[1][0].title == "second & 0"
    assert program.wait(60) == 0
    done = completed([sys.executable, "launch/serve_retriever.py"])
    assert done.returncode == 2 and "--index, --live: found neither" in done.stderr


def test_a_path_without_results_is_logged(served, service, tmp_path, monkeypatch, caplog):
    """With a mistyped path every search would find nothing, and a run would learn that searching is useless."""
    live = opened(tmp_path, monkeypatch, **settings(served[1]) | {"results": "web.result"})
    with caplog.at_level(logging.WARNING):
        assert live.search(["a", "b"], 2) == [[], []]
    (warning,) = [r.getMessage() for r in caplog.records if "results=web.result" in r.getMessage()]
    assert warning.endswith("found: web")
    live = opened(tmp_path, monkeypatch, **settings(served[1]) | {"text": "abuot.short", "title": ""})
    with pytest.raises(RetrievalError, match=r"no result has a text at text=abuot\.short.*the first: other"):
        live.search(["c"], 2)

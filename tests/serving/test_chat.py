"""Chat completions: real HTTP, the shipped policy, many clients at once, and the page in a real browser."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from browsing import asked, focus, opened, press, text, wait
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program, completed, wait_until
from serving import HTTP, Running
from starlette.exceptions import HTTPException

from configs.smoke import get_config
from psearch_jax.assembly import build
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.config import from_mapping
from psearch_jax.serving.answerer import Answerer
from psearch_jax.serving.api import ChatRequest
from psearch_jax.serving.chat import Limits, make_app
from retrieval.protocol import Passage, RetrievalError
from retrieval.remote.http import listen, parse

PATH = "/v1/chat/completions"
HOSTILE = "<img src=x onerror='window.forged = 1'><script>window.forged = 1</script>"


class Watched:
    """The world's retriever, slowed down, broken or poisoned on demand."""

    def __init__(self, retriever):
        self.retriever, self.seconds, self.broken, self.poison = retriever, 0.0, False, False

    def search(self, queries, k):
        time.sleep(self.seconds)
        if self.broken:
            raise RetrievalError("gone to /secret/path")
        rankings = self.retriever.search(queries, k)
        return [[Passage("bad", HOSTILE, HOSTILE), *r] for r in rankings] if self.poison else rankings

    def describe(self):
        return self.retriever.describe()


@pytest.fixture(scope="module")
def toy():
    """The shipped policy with four slots, its retriever, and an answerer that uses both."""
    config = from_mapping(get_config().to_dict())
    parts = build.from_path(replace(config, rollout=replace(config.rollout, slots=4, samples=2, num_buckets=1)), "toy")
    watched = Watched(parts.collector.retriever)
    answerer = Answerer(replace(parts.collector, retriever=watched), parts.sampling_weights())
    asked = [q.text for kind in ("parallel", "sequential") for q in questions(parts.world, "eval", kind, 6, 0)]
    yield answerer, watched, asked
    answerer.close()


@pytest.fixture(scope="module")
def running(toy):
    answerer, _, asked = toy
    with Running(make_app(answerer, "toy", Limits(requests=16), examples=tuple(asked[:2]))) as running:
        yield running


def body(question: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": question}], **more}


def chunks(response) -> list[dict]:
    lines = response.data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_an_answer_in_one_piece_and_the_same_in_many(running, toy):
    """A client that streams gets the answer, passages and usage of one that waits."""
    answerer, _, asked = toy
    trajectory = list(answerer.answer(asked[0]))[-1].trajectory
    response = running.post(body(asked[0]), PATH)
    reply = response.json()
    message = reply["choices"][0]["message"]
    assert response.status == 200 and reply["object"] == "chat.completion" and reply["model"] == "toy"
    assert message["content"] == trajectory.answer and reply["choices"][0]["finish_reason"] == "stop"
    assert message["reasoning_content"] == "".join(turn.text for turn in trajectory.turns)
    written = int(trajectory.mask.sum())
    assert reply["usage"]["completion_tokens"] == written and reply["usage"]["total_tokens"] == len(trajectory.ids)
    streamed = running.post(body(asked[0], stream=True), PATH)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    parts = chunks(streamed)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message["reasoning_content"]
    assert "".join(d.get("content", "") for d in deltas) == message["content"]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop" and parts[-1]["usage"] == reply["usage"]
    extras = [part["psearch"] for part in parts[:-1] if "psearch" in part]
    searched = [turn for turn in reply["psearch"]["turns"] if turn["queries"]]
    assert [extra["queries"] for extra in extras[::2]] == [turn["queries"] for turn in searched]
    assert [extra["passages"] for extra in extras[1::2]] == [turn["passages"] for turn in searched]
    assert len({part["id"] for part in parts}) == 1 and parts[0]["id"] != reply["id"]


def test_a_client_limits_the_tokens(running, toy):
    """A limit cuts the first turn, or a later one, exactly there; others in the same batch keep theirs."""
    _, _, asked = toy
    free = running.post(body(asked[0]), PATH).json()
    for field, most in (("max_tokens", 5), ("max_completion_tokens", free["usage"]["completion_tokens"] - 6)):
        reply = running.post(body(asked[0], **{field: most}), PATH).json()
        assert reply["usage"]["completion_tokens"] == most and reply["choices"][0]["finish_reason"] == "length"
        written = reply["choices"][0]["message"]["reasoning_content"]
        assert free["choices"][0]["message"]["reasoning_content"].startswith(written.rstrip())
    enough = running.post(body(asked[0], max_tokens=free["usage"]["completion_tokens"]), PATH).json()
    assert enough["choices"] == free["choices"]
    both = running.post(body(asked[0], max_completion_tokens=None, max_tokens=5), PATH).json()
    assert both["usage"]["completion_tokens"] == 5
    assert running.post(body(asked[0], max_tokens=0), PATH).status == 422


def test_every_client_of_many_gets_the_answer_to_its_own_question(running, toy):
    """Sixteen clients over four slots each get the answer that their question has when it is asked alone."""
    _, _, asked = toy
    rounds = [(text, {"temperature": 1.0, "seed": seed}) for text in asked for seed in range(2)]
    alone = [running.post(body(text, **more), PATH).json() for text, more in rounds]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda one: running.post(body(one[0], **one[1]), PATH).json(), rounds))
    for before, after in zip(alone, together, strict=True):
        assert before["choices"] == after["choices"] and before["usage"] == after["usage"]
    assert len({json.dumps(one["choices"]) for one in alone}) > len(asked), "another seed samples another answer"


def test_a_client_that_leaves_gives_its_slot_back(running, toy):
    """The slots of clients that disconnect are free for the next question."""
    answerer, watched, asked = toy
    watched.seconds = 0.5
    for stream in (True, False):
        sent = [running.raw(json.dumps(body(text, stream=stream)).encode(), path=PATH) for text in asked[:4]]
        if stream:
            assert all(b"200 OK" in one.recv(12000) for one in sent)
        time.sleep(0.3)
        for one in sent:
            one.close()
    watched.seconds = 0.0
    assert running.post(body(asked[5]), PATH).status == 200
    wait_until(lambda: "answers_in_flight 0.0" in running_metrics(running), 30)
    assert not answerer._pending


def running_metrics(running) -> str:
    return HTTP.request("GET", running.url + "/metrics").data.decode()


def test_a_retriever_that_fails_is_told_and_the_next_one_answered(running, toy):
    """A failed search is an error in the answer, in the stream and in /health, until a search succeeds."""
    _, watched, asked = toy
    watched.broken = True
    response = running.post(body(asked[0]), PATH)
    parts = chunks(running.post(body(asked[0], stream=True), PATH))
    health = HTTP.request("GET", running.url + "/health")
    watched.broken = False
    assert response.status == 503 and "secret" not in response.data.decode()
    assert "error" in parts[-1] and "secret" not in json.dumps(parts) and health.status == 503
    assert running.post(body(asked[0]), PATH).status == 200
    assert HTTP.request("GET", running.url + "/health").json() == {"status": "ok"}


def test_a_token_is_asked_for_but_not_for_the_page(toy):
    """The API needs the token; the page that asks for it does not."""
    answerer, _, asked = toy
    with Running(make_app(answerer, "toy", token="word")) as closed:
        for path in (PATH, "/v1/models", "/metrics"):
            method = "POST" if path == PATH else "GET"
            refused = HTTP.request(method, closed.url + path, body=b"{}" if path == PATH else None)
            assert refused.status == 401 and refused.json()["error"]["type"] == "authentication_error"
        for path in ("/", "/page.js", "/page.css", "/page.json", "/health"):
            assert HTTP.request("GET", closed.url + path).status == 200
        assert closed.post(body(asked[0]), PATH, Authorization="Bearer word").status == 200
        models = HTTP.request("GET", closed.url + "/v1/models", headers={"Authorization": "Bearer word"}).json()
        assert [model["id"] for model in models["data"]] == ["toy"]


def parsed(request) -> ChatRequest:
    return parse(ChatRequest, json.dumps(request).encode())


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"messages": [{"role": "user", "content": "Who?"}, PICTURE]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "the body"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"stream": 1}, "stream"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"n": 2}, "n"),
    ],
)
def test_a_wrong_field_is_named(changed, named):
    """No field is silently read as something else, which would answer another question than was asked."""
    with pytest.raises(HTTPException) as refused:
        parsed({**body("Who?"), **changed})
    assert refused.value.status_code == 422 and refused.value.detail.startswith(named)
    assert "\n" not in refused.value.detail


def test_what_other_clients_send_is_accepted():
    """Texts in parts, earlier messages with pictures, and unknown fields are no reason to refuse."""
    parts = [{"type": "text", "text": "Who"}, {"type": "image_url"}, {"type": "text", "text": "is it?"}]
    messages = [{"role": "system", "content": "s"}, PICTURE, {"role": "assistant", "content": None}]
    messages.append({"role": "user", "content": parts})
    asked = parsed({"messages": messages, "temperature": None, "seed": None, "n": 1, "top_p": 1})
    assert asked.question == "Who is it?" and not asked.stream
    asked = parsed(body(" Who? ", stream=True, temperature=2, seed=4))
    assert (asked.question, asked.stream, asked.temperature, asked.seed) == ("Who?", True, 2.0, 4)


def test_pages_of_other_sites_are_refused_without_a_token(running, toy):
    """A page of another site can neither ask in a reader's name nor, through its own host name, read the answers."""
    _, _, asked = toy
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "http://["}):
        refused = running.post(body(asked[0]), PATH, **headers)
        assert refused.status == 403 and refused.json()["error"]["message"], headers
    assert running.post(body(asked[0]), PATH, Origin=running.url).status == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "stream", "temperature", "seed", "n"]), JSON))
def test_every_request_is_accepted_or_refused(asked):
    """No request ends in another exception, which would be a status 500."""
    try:
        accepted = parsed(asked)
    except HTTPException as refused:
        assert refused.status_code == 422
    else:
        assert accepted.question and 0 <= (accepted.temperature or 0) <= 2


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_asks_and_shows_the_fan_out(browser, running, toy, width):
    """With the keyboard only: a question is asked, parallel searches show as such, and no script in a passage runs."""
    from selenium.webdriver.common.keys import Keys

    _, watched, asked_here = toy
    watched.poison = True
    opened(browser, running.url, width, "dark" if width == 400 else "light")
    wait(browser, "return document.querySelectorAll('#examples button').length === 2")
    focus(browser, "#examples button")
    press(browser, Keys.ENTER)
    assert browser.execute_script("return document.activeElement.id") == "question"
    press(browser, Keys.ENTER)
    wait(browser, "return document.querySelector('article .took') !== null")
    watched.poison = False
    assert text(browser, "article h2") == asked_here[0]
    response = running.post(body(asked_here[0]), PATH)
    assert response.status == 200
    queries = browser.execute_script("return [...document.querySelectorAll('.fan strong')].map(e => e.textContent)")
    assert queries and all(queries) and "window.forged" in text(browser, ".fan p")
    assert browser.execute_script("return window.forged") is None and text(browser, ".answer")
    assert "turns, " in text(browser, ".took") and not browser.execute_script(
        "return document.querySelector('#go').disabled"
    )
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    urls = asked(browser)
    assert all(url.startswith((running.url, "data:")) for url in urls) and f"{running.url}{PATH}" in urls


def test_the_program_serves_and_stops_in_order():
    """SIGTERM finishes the answer in progress."""
    arguments = ["launch/serve_agent.py", "--port=0", "--slots=2"]
    program = Program([sys.executable, *arguments], stderr=subprocess.DEVNULL)
    line = program.stdout.readline()
    assert line.startswith("toy answers at http://127.0.0.1:"), line
    url = line.split()[-1].rstrip("/")
    responses: list = []
    asking = threading.Thread(
        target=lambda: responses.append(HTTP.request("POST", url + PATH, body=json.dumps(body("Who?")).encode()))
    )
    asking.start()
    wait_until(lambda: responses or b"answers_in_flight 1.0" in HTTP.request("GET", url + "/metrics").data, 60)
    assert not responses, "answered before it could be stopped"
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 0
    asking.join(60)
    assert responses and responses[0].status == 200, responses


def test_a_program_that_cannot_serve_says_so():
    """An unknown policy and a used port are reported in one line, before anything is compiled."""
    with listen("127.0.0.1", 0) as taken:
        used = completed([sys.executable, "launch/serve_agent.py", f"--port={taken.getsockname()[1]}"])
    assert used.returncode == 2 and "cannot be bound" in used.stderr and "compiling" not in used.stderr
    done = completed([sys.executable, "launch/serve_agent.py", "--model=nowhere", "--corpus=nothing.jsonl"])
    assert done.returncode == 2 and "Traceback" not in done.stderr and "nowhere" in done.stderr

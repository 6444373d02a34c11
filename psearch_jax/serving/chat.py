"""Serves a policy over HTTP with OpenAI's chat-completions API, and a web page to try it.

POST /v1/chat/completions   answers the last message of role `user`; with `stream` as server-sent events
GET  /v1/models             the policy
GET  /                      a page to ask questions and watch the parallel searches
GET  /openapi.json          the API description
GET  /health, /metrics      as in the retrieval server

The answer is the message's `content`; the text of all turns is its `reasoning_content`. Fields that OpenAI's format
lacks are under `psearch`: the searches with their passages, and the seconds of each turn. Of the request, `messages`,
`stream`, `temperature` and `seed` are used, `n` must be 1, and other fields are ignored.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from psearch_jax.limits import MAX_SEED, MAX_TEMPERATURE
from psearch_jax.serving.answerer import Answerer, Event
from psearch_jax.serving.console import AnswerSummary, as_json, rankings
from psearch_jax.serving.openapi import description
from psearch_jax.types import Trajectory, UserError
from retrieval.remote import http

PAGE = {path.name: path.read_bytes() for path in sorted((Path(__file__).parent / "page").iterdir())}
DONE, STOPPING = b"data: [DONE]\n\n", "the server is stopping"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# No third-party content and no inline scripts, so that a passage injected into the page could not run one.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Limits(http.Bounds):
    """Limits for one request and for all requests together."""

    body_bytes: int = 256 * 2**10
    question_chars: int = 8192


@dataclass(frozen=True)
class Asking:
    """The fields of a request that are used."""

    question: str
    stream: bool = False
    temperature: float = 0.0
    seed: int = 0


class Metrics:
    """The server's Prometheus metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter("answers_requests", "Requests for an answer by status", ["status"], registry=own)
        self.in_flight = Gauge("answers_in_flight", "Questions being answered", registry=own)
        self.queries = Counter("answers_queries", "Sub-queries that were searched", registry=own)
        self.seconds = Histogram("answers_seconds", "Seconds from question to answer", registry=own)

    @contextmanager
    def counted(self) -> Iterator[dict[str, int]]:
        """Counts a request by the `code` that the caller puts into the yielded dict, or by its final exception."""
        begun, status = time.perf_counter(), {"code": 500}
        try:
            with self.in_flight.track_inprogress():
                yield status
        except HTTPException as error:
            status["code"] = error.status_code
            raise
        except asyncio.CancelledError:
            status["code"] = http.GONE
            raise
        finally:
            self.requests.labels(status["code"]).inc()
            if status["code"] == 200:  # fast refusals would distort the latency
                self.seconds.observe(time.perf_counter() - begun)


class Events:
    """The events of one question, passed from the answerer's thread to this event loop. `cancel` ends it.

    Raises `HTTPException` 422 for a question that is not accepted.
    """

    def __init__(self, answerer: Answerer, asking: Asking):
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, event)

        try:
            self.cancel = answerer.ask(asking.question, listen, asking.temperature, asking.seed)
        except UserError as error:
            raise HTTPException(422, str(error)) from None

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._queue.get()
            yield event
            if event.kind in ("end", "error"):
                return


class Streamed(StreamingResponse):
    """A stream that releases its resources however it ends, even if it never starts."""

    def __init__(self, content: AsyncIterator[bytes], resources: ExitStack, status: dict[str, int]):
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._resources, self._status = resources, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            await send(message)
            started = True

        with self._resources:
            try:
                await super().__call__(scope, receive, sending)
            except asyncio.CancelledError:  # the server is stopping, and the grace period of this request is over
                if not started:
                    raise
                self._status["code"] = 503
                await send({"type": "http.response.body", "body": _ended_by(STOPPING), "more_body": False})


def make_app(
    answerer: Answerer,
    model: str,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    token: str | None = None,
    examples: tuple[str, ...] = (),
    hosts: tuple[str, ...] = http.LOOPBACK,
) -> Starlette:
    """The ASGI application.

    Args:
      model: the name of the policy that clients see.
      token: the bearer token that /v1/* and /metrics require; None: no authentication.
      examples: questions that the page offers.
      hosts: without a token, the host names that clients may use; empty: any.
    """
    metrics, requests = Metrics(), http.Room("questions", limits.requests)

    about_model = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "psearch_jax"}
    authorise = partial(http.authorise, token=token, hosts=hosts)

    async def completions(request: Request) -> Response:
        authorise(request)
        with ExitStack() as resources:
            status = resources.enter_context(metrics.counted())
            resources.enter_context(requests.take(1))
            asking = read(http.json_object(await http.body_of(request, limits), "messages"), limits)
            events = Events(answerer, asking)
            resources.callback(events.cancel)
            about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
            if asking.stream:
                status["code"] = http.GONE  # until the answer is complete
                return Streamed(_stream(about, asking, events, metrics, status), resources.pop_all(), status)
            try:
                content = await http.while_there(request, _complete(about, asking, events, metrics))
            except asyncio.CancelledError:  # the server is stopping, and the grace period of this request is over
                status["code"], request.scope["hurried"] = 503, True
                return JSONResponse(_error(STOPPING, 503), 503)
            status["code"] = 200
            return Response(json.dumps(content), media_type="application/json")  # ASCII escapes: lone surrogates too

    async def models(request: Request) -> Response:
        authorise(request)
        return JSONResponse({"object": "list", "data": [about_model]})

    async def one_model(request: Request) -> Response:
        authorise(request)
        if request.path_params["id"] != model:
            raise HTTPException(404, f"model {request.path_params['id']!r} found, accepted: {model!r}")
        return JSONResponse(about_model)

    async def health(_: Request) -> Response:
        healthy = answerer.healthy
        return JSONResponse({"status": "ok" if healthy else "answers fail"}, 200 if healthy else 503)

    async def expose(request: Request) -> Response:
        authorise(request)
        return PlainTextResponse(generate_latest(metrics.registry))

    async def page(request: Request) -> Response:
        name = request.url.path.strip("/") or "page.html"
        headers = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(PAGE[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    async def about_page(_: Request) -> Response:
        return JSONResponse({"model": model, "examples": list(examples), "token": token is not None})

    async def described(_: Request) -> Response:
        return JSONResponse(description(limits.question_chars, token is not None))

    routes = [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", one_model),
        Route("/health", health),
        Route("/metrics", expose),
        Route("/openapi.json", described),
        Route("/page.json", about_page),
        *(Route(f"/{name}".replace("/page.html", "/"), page) for name in PAGE),
    ]
    app = Starlette(routes=routes, middleware=http.middleware(limits), exception_handlers=HANDLERS)
    app.state.open_to_all = token is None
    return app


def read(asked: Mapping[str, Any], limits: Limits) -> Asking:
    """Parses a request. Raises `HTTPException` 422 that names the field."""
    messages = asked.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise HTTPException(422, "messages: expected a list of objects with role and content")
    asked_last = [one for one in messages if one.get("role") == "user"][-1:]
    if not asked_last:
        raise HTTPException(422, "messages: expected at least one of role user")
    question = _question(asked_last[0].get("content"), limits)
    stream, temperature, seed, n = (asked.get(name) for name in ("stream", "temperature", "seed", "n"))
    if not isinstance(stream, bool | None):
        raise HTTPException(422, "stream: expected true or false")
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (number and 0 <= temperature <= MAX_TEMPERATURE):  # NaN fails the comparison
        raise HTTPException(422, f"temperature: expected a number from 0 to {MAX_TEMPERATURE:g}")
    seed = http.integer_if_whole(seed)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) > MAX_SEED):
        raise HTTPException(422, "seed: expected a whole number of 64 bits")
    if n is not None and (isinstance(n, bool) or n != 1):
        raise HTTPException(422, "n: expected 1, one answer to a request")
    return Asking(question, bool(stream), float(temperature or 0), seed or 0)


def _question(content: Any, limits: Limits) -> str:
    """The question in a message's content."""
    if isinstance(content, list):  # content parts, of which only text counts
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [text for text in (part.get("text") for part in parts) if isinstance(text, str)]
        content = " ".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str) or not content.strip():
        raise HTTPException(422, "messages: expected a text as the content of the last one of role user")
    if len(content) > limits.question_chars:
        length = f"messages: found a question of {len(content)} characters"
        raise HTTPException(422, f"{length}, accepted: at most {limits.question_chars}")
    if any("\ud800" <= letter <= "\udfff" for letter in content):
        raise HTTPException(422, "messages: found half a surrogate pair, accepted: text")
    return content.strip()


async def _complete(about: dict[str, Any], asking: Asking, events: Events, metrics: Metrics) -> dict[str, Any]:
    """The complete answer as one JSON object."""
    summary = await _summary(events, metrics)
    if summary.trajectory is None:
        raise HTTPException(503, summary.error)
    message = {
        "role": "assistant",
        "content": summary.trajectory.answer or "",
        "reasoning_content": "".join(turn.text for turn in summary.trajectory.turns),
    }
    choice = {"index": 0, "message": message, "finish_reason": _reason(summary.trajectory)}
    more = {"usage": _usage(summary.trajectory), "psearch": as_json(asking.question, summary)}
    return {**about, "object": "chat.completion", "choices": [choice], **more}


async def _summary(events: Events, metrics: Metrics) -> AnswerSummary:
    summary = AnswerSummary()
    async for event in events:
        summary.add(event)
        if event.kind == "search":
            metrics.queries.inc(len(event.queries))
    return summary


async def _stream(
    about: dict[str, Any], asking: Asking, events: Events, metrics: Metrics, status: dict[str, int]
) -> AsyncIterator[bytes]:
    """The answer as server-sent events, each a chunk. Sets the `code` in `status` at its end."""

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        content = {**about, "object": "chat.completion.chunk", "choices": [choice], **more}
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    summary = AnswerSummary()
    yield chunk({"role": "assistant"})
    async for event in events:
        summary.add(event)
        if event.kind == "text":
            yield chunk({"reasoning_content": event.text})
        elif event.kind == "search":
            metrics.queries.inc(len(event.queries))
            yield chunk({}, psearch={"queries": list(event.queries)})
        elif event.kind == "passages":
            yield chunk({}, psearch={"passages": rankings(event.passages), "seconds": round(event.seconds, 4)})
    if summary.trajectory is None:
        status["code"] = 503
        yield _ended_by(summary.error)
    else:
        yield chunk({"content": summary.trajectory.answer or ""})
        more = {"usage": _usage(summary.trajectory), "psearch": as_json(asking.question, summary)}
        yield chunk({}, _reason(summary.trajectory), **more)
        status["code"] = 200
        yield DONE


def _ended_by(error: str) -> bytes:
    """The last events of a stream without an answer."""
    return b"data: " + json.dumps(_error(error, 503)).encode() + b"\n\n" + DONE


def _reason(trajectory: Trajectory) -> str:
    return "stop" if trajectory.status in ("answered", "eos") else "length"


def _usage(trajectory: Trajectory) -> dict[str, int]:
    """Token counts; passages count as prompt tokens."""
    sampled, total = int(trajectory.mask.sum()), len(trajectory.ids)
    return {"prompt_tokens": total - sampled, "completion_tokens": sampled, "total_tokens": total}


def _error(message: str, code: int) -> dict[str, Any]:
    kind = "server_error" if code >= 500 else "authentication_error" if code == 401 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code}}


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(_error(error.detail, error.status_code), error.status_code, error.headers)


async def _internal_error(_: Request, error: Exception) -> Response:  # uvicorn logs the error
    return JSONResponse(_error("internal server error; see the server's log", 500), 500)


HANDLERS = {HTTPException: _http_error, Exception: _internal_error}

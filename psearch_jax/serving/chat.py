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
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from psearch_jax.serving.answerer import Answerer, Event
from psearch_jax.serving.api import OPERATIONS, ChatRequest, Error
from psearch_jax.serving.console import AnswerSummary, as_json, rankings
from psearch_jax.types import Trajectory, UserError
from retrieval.remote import http
from retrieval.remote.openapi import document

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


class Metrics:
    """The server's Prometheus metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("answers_requests", "Requests for an answer by status", ["status"], registry=registry)
        self.in_flight = Gauge("answers_in_flight", "Questions being answered", registry=registry)
        self.queries = Counter("answers_queries", "Sub-queries that were searched", registry=registry)
        self.seconds = Histogram("answers_seconds", "Seconds from question to answer", registry=registry)

    def record(self, code: int, started: float) -> None:
        """Counts a request that ended with the status `code`."""
        self.requests.labels(code).inc()
        if code == 200:  # fast refusals would distort the latency
            self.seconds.observe(time.perf_counter() - started)


class Events:
    """The events of one question, passed from the answerer's thread to this event loop. `close` ends it.

    Raises `HTTPException` 422 for a question that is not accepted.
    """

    def __init__(self, answerer: Answerer, asked: ChatRequest):
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, event)

        try:
            self.close = answerer.ask(asked.question, listen, asked.temperature or 0.0, asked.seed or 0)
        except UserError as error:
            raise HTTPException(422, str(error)) from None

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._queue.get()
            yield event
            if event.kind in ("end", "error"):
                return


class EventStream(StreamingResponse):
    """A stream that ends with an error event when the server stops."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # the grace period of this request is over
            content = _event(_error(STOPPING, 503)) + DONE
            await send({"type": "http.response.body", "body": content, "more_body": False})


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
    metrics, requests = Metrics(), http.Capacity("questions", limits.requests)
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "psearch_jax"}

    async def completions(request: Request) -> Response:
        http.authorise(request, token, hosts)
        started = time.perf_counter()
        try:
            with requests.take(1):
                asked = http.parse(ChatRequest, await http.read_body(request, limits))
                events = Events(answerer, asked)
                about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
                if not asked.stream:
                    with metrics.in_flight.track_inprogress(), closing(events):
                        content = await http.run_while_connected(request, _complete(about, asked, events, metrics))
                    metrics.record(200, started)
                    # ASCII escapes: a passage may contain half a surrogate pair.
                    return Response(json.dumps(content), media_type="application/json")
        except HTTPException as error:
            metrics.record(error.status_code, started)
            raise
        except asyncio.CancelledError:  # the server is stopping, and the grace period of this request is over
            metrics.record(503, started)
            return JSONResponse(_error(STOPPING, 503), 503)
        content = stream(_chunks(about, asked, events, metrics), events, started)
        return EventStream(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def stream(chunks: AsyncIterator[bytes], events: Events, started: float) -> AsyncIterator[bytes]:
        """The chunks, as long as the client receives them; counts the request."""
        code = http.GONE
        with closing(events):
            try:
                with requests.take(1), metrics.in_flight.track_inprogress():
                    async for chunk in chunks:
                        yield chunk
                code = 200
            except HTTPException as error:  # busy, or without an answer
                code = error.status_code
                yield _event(_error(error.detail, code)) + DONE
            finally:
                metrics.record(code, started)

    async def models(request: Request) -> Response:
        http.authorise(request, token, hosts)
        return JSONResponse({"object": "list", "data": [card]})

    async def one_model(request: Request) -> Response:
        http.authorise(request, token, hosts)
        if request.path_params["id"] != model:
            raise HTTPException(404, f"model {request.path_params['id']!r} found, accepted: {model!r}")
        return JSONResponse(card)

    async def health(_: Request) -> Response:
        healthy = answerer.healthy
        return JSONResponse({"status": "ok" if healthy else "answers fail"}, 200 if healthy else 503)

    async def expose(request: Request) -> Response:
        http.authorise(request, token, hosts)
        return PlainTextResponse(generate_latest(metrics.registry))

    async def page(request: Request) -> Response:
        name = request.url.path.strip("/") or "page.html"
        headers = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(PAGE[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    async def about_page(_: Request) -> Response:
        return JSONResponse({"model": model, "examples": list(examples), "token": token is not None})

    async def described(_: Request) -> Response:
        return JSONResponse(document("psearch_jax", OPERATIONS, Error, token is not None))

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
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse, Exception: _fail})
    app.state.open_to_all = token is None
    return app


async def _complete(about: dict[str, Any], asked: ChatRequest, events: Events, metrics: Metrics) -> dict[str, Any]:
    """The complete answer as one JSON object."""
    summary = AnswerSummary()
    async for event in events:
        summary.add(event)
        metrics.queries.inc(len(event.queries) if event.kind == "search" else 0)
    if summary.trajectory is None:
        raise HTTPException(503, summary.error)
    message = {
        "role": "assistant",
        "content": summary.trajectory.answer or "",
        "reasoning_content": "".join(turn.text for turn in summary.trajectory.turns),
    }
    choice = {"index": 0, "message": message, "finish_reason": _reason(summary.trajectory)}
    more = {"usage": _usage(summary.trajectory), "psearch": as_json(asked.question, summary)}
    return {**about, "object": "chat.completion", "choices": [choice], **more}


async def _chunks(about: dict[str, Any], asked: ChatRequest, events: Events, metrics: Metrics) -> AsyncIterator[bytes]:
    """The answer as server-sent events, each a chunk. Raises `HTTPException` 503 without an answer."""

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return _event({**about, "object": "chat.completion.chunk", "choices": [choice], **more})

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
        raise HTTPException(503, summary.error)
    yield chunk({"content": summary.trajectory.answer or ""})
    more = {"usage": _usage(summary.trajectory), "psearch": as_json(asked.question, summary)}
    yield chunk({}, _reason(summary.trajectory), **more) + DONE


def _event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _reason(trajectory: Trajectory) -> str:
    return "stop" if trajectory.status == "answered" else "length"


def _usage(trajectory: Trajectory) -> dict[str, int]:
    """Token counts; passages count as prompt tokens."""
    sampled, total = int(trajectory.mask.sum()), len(trajectory.ids)
    return {"prompt_tokens": total - sampled, "completion_tokens": sampled, "total_tokens": total}


def _error(message: str, code: int) -> dict[str, Any]:
    kind = "server_error" if code >= 500 else "authentication_error" if code == 401 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code}}


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {**await http.drain(request), **(error.headers or {})}
    return JSONResponse(_error(error.detail, error.status_code), error.status_code, headers)


async def _fail(_: Request, error: Exception) -> Response:  # uvicorn logs the error
    return JSONResponse(_error("internal server error; see the server's log", 500), 500)

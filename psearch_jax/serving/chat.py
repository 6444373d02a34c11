"""Serves a policy over HTTP with OpenAI's chat-completions API, and a web page to try it.

POST /v1/chat/completions   answers the last message of role `user`; with `stream` as server-sent events
GET  /v1/models             the policy
GET  /                      a page to ask questions and watch the parallel searches
GET  /health, /metrics      as in the retrieval server

The answer is the message's `content`; the text of all turns is its `reasoning_content`. Fields that OpenAI's format
lacks are under `psearch`: the searches with their passages, and the seconds of each turn. Of the request, `messages`,
`stream`, `temperature`, `seed`, `tools` and `max_completion_tokens` or `max_tokens` (for all turns together) are used,
`n` must be 1, and other fields are ignored. With `tools`, the policy adds one turn to the messages, and the client
runs its calls; without, the server runs those of its own tools.
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

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from psearch_jax.serving.answerer import Answerer, Event
from psearch_jax.serving.api import ChatRequest
from psearch_jax.serving.console import AnswerSummary, as_json, rankings
from psearch_jax.text.dialects import ToolCalls
from psearch_jax.text.tags import THINK_CLOSE
from psearch_jax.text.tool_calls import find_calls
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


class Events:
    """The events of one question, passed from the answerer's thread to this event loop. `close` ends it.

    Raises `HTTPException`: 422 for a question that is not accepted, 503 at the end of the events without an answer.

    Attributes:
      summary: of the events so far.
    """

    def __init__(self, answerer: Answerer, chat: ChatRequest, metrics: http.Metrics):
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._metrics, self.summary, self._stop_ids = metrics, AnswerSummary(), answerer.dialect.tokenizer.stop_ids
        self._one_turn = bool(chat.tools)
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, event)

        try:
            prompt = None
            if chat.tools:
                if not isinstance(answerer.dialect, ToolCalls):
                    raise UserError("tools: found with a policy that writes tags, accepted: none")
                prompt = chat.conversation(answerer.dialect)
            options = chat.temperature or 0.0, chat.seed or 0, prompt, chat.max_completion_tokens or chat.max_tokens
            self.close = answerer.ask(chat.question, listen, *options)
        except UserError as error:
            raise HTTPException(422, str(error)) from None

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._queue.get()
            self.summary.add(event)
            if event.kind == "search":
                self._metrics.queries.inc(len(event.queries))
            if event.kind == "error":
                raise HTTPException(503, event.text)
            yield event
            if event.kind == "end":
                return

    @property
    def trajectory(self) -> Trajectory:
        """The complete answer, after the last event."""
        assert self.summary.trajectory is not None
        return self.summary.trajectory

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of the last turn, if the client runs them, as OpenAI's API writes them."""
        if not self._one_turn or self.trajectory.status == "answered" or not self.trajectory.turns:
            return []
        written = find_calls(self.trajectory.turns[-1].text)
        functions = [{"name": name, "arguments": json.dumps(value, ensure_ascii=False)} for name, value in written]
        return [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function} for function in functions]

    @property
    def content(self) -> str:
        """The answer; of a turn for a client with tools, without an answer, what follows its thought."""
        if self.trajectory.answer is not None or not self._one_turn or not self.trajectory.turns:
            return self.trajectory.answer or ""
        return self.trajectory.turns[-1].text.rpartition(THINK_CLOSE)[2].strip()

    @property
    def finish_reason(self) -> str:
        """`stop`, or `length` without an answer or, for a client with tools, without the end of the message."""
        ended = self._one_turn and int(self.trajectory.ids[-1]) in self._stop_ids
        return "stop" if ended or self.trajectory.status == "answered" else "length"


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
    metrics, requests = http.Metrics("answers"), http.Capacity("questions", limits.requests)
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "psearch_jax"}

    async def completions(request: Request) -> Response:
        http.authorise(request, token, hosts)
        started = time.perf_counter()
        try:
            with requests.take(1):
                chat = http.parse(ChatRequest, await http.read_body(request, limits))
                events = Events(answerer, chat, metrics)
                about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
                if not chat.stream:
                    with metrics.in_flight.track_inprogress(), closing(events):
                        content = await http.run_while_connected(request, _complete(about, chat, events))
                    metrics.record(200, started)
                    # ASCII escapes: a passage may contain half a surrogate pair.
                    return Response(json.dumps(content), media_type="application/json")
        except HTTPException as error:
            metrics.record(error.status_code, started)
            raise
        except asyncio.CancelledError:  # the server is stopping, and the grace period of this request is over
            metrics.record(503, started)
            return JSONResponse(_error(STOPPING, 503), 503)
        content = stream(_chunks(about, chat, events), events, started)
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

    async def health(_: Request) -> Response:
        healthy = answerer.healthy
        return JSONResponse({"status": "ok" if healthy else "answers fail"}, 200 if healthy else 503)

    async def expose(request: Request) -> Response:
        http.authorise(request, token, hosts)
        return metrics.render()

    async def page(request: Request) -> Response:
        name = request.url.path.strip("/") or "page.html"
        headers = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(PAGE[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    async def about_page(_: Request) -> Response:
        return JSONResponse({"model": model, "examples": list(examples), "token": token is not None})

    routes = [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", expose),
        Route("/page.json", about_page),
        *(Route(f"/{name}".replace("/page.html", "/"), page) for name in PAGE),
    ]
    app = Starlette(routes=routes, exception_handlers=http.error_handlers(_error))
    app.state.open_to_all = token is None
    return app


async def _complete(about: dict[str, Any], chat: ChatRequest, events: Events) -> dict[str, Any]:
    """The complete answer as one JSON object."""
    async for _ in events:
        pass
    calls = events.calls
    message = {
        "role": "assistant",
        "content": "" if calls else events.content,
        "reasoning_content": "".join(turn.text for turn in events.trajectory.turns),
        **({"tool_calls": calls} if calls else {}),
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else events.finish_reason}
    return {**about, "object": "chat.completion", "choices": [choice], **_report(chat, events)}


async def _chunks(about: dict[str, Any], chat: ChatRequest, events: Events) -> AsyncIterator[bytes]:
    """The answer as server-sent events, each a chunk."""

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return _event({**about, "object": "chat.completion.chunk", "choices": [choice], **more})

    yield chunk({"role": "assistant"})
    async for event in events:
        if event.kind == "text":
            yield chunk({"reasoning_content": event.text})
        elif event.kind == "search":
            yield chunk({}, psearch={"queries": list(event.queries)})
        elif event.kind == "passages":
            yield chunk({}, psearch={"passages": rankings(event.passages), "seconds": round(event.seconds, 4)})
    calls = events.calls
    for i, call in enumerate(calls):
        yield chunk({"tool_calls": [{"index": i, **call}]})
    if not calls:
        yield chunk({"content": events.content})
    yield chunk({}, "tool_calls" if calls else events.finish_reason, **_report(chat, events)) + DONE


def _event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _report(chat: ChatRequest, events: Events) -> dict[str, Any]:
    """Token counts, where passages count as prompt tokens, and what OpenAI's format lacks."""
    sampled, total = int(events.trajectory.mask.sum()), len(events.trajectory.ids)
    usage = {"prompt_tokens": total - sampled, "completion_tokens": sampled, "total_tokens": total}
    return {"usage": usage, "psearch": as_json(chat.question, events.summary)}


def _error(message: str, code: int) -> dict[str, Any]:
    kind = "server_error" if code >= 500 else "authentication_error" if code == 401 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code}}

"""A retriever behind HTTP, in the form of Search-R1's `/retrieve`, for existing clients and for several hosts.

POST /retrieve   {"queries": [str], "topk": int or null, "return_scores": bool} -> {"result": [[...], ...]}
GET  /health     {"status": "ok", "rows": N}, or with status 503 when searches fail
GET  /info       {"corpus": name or null, "corpus_sha256": digest or null, "rows": N or null}
GET  /metrics    Prometheus text
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval.batcher import Batcher
from retrieval.protocol import CorpusError, Passage, RetrievalError, Retriever

log = logging.getLogger("retrieval")
SILENCE_S = 1.0  # a refused client that sends nothing for this long is not heard out
STALLED_S = 60  # a client that takes nothing of its answer for this long is hung up on
# From these sizes on, a body is read and an answer written in a thread: it would hold up all other clients.
LARGE_BODY_BYTES, LARGE_ANSWER_ROWS = 64 * 2**10, 512
GONE = 499  # the status that is counted for a client that did not wait


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and all together."""

    body_bytes: int = 4 * 2**20
    body_s: float = 30.0  # for the whole body to arrive
    queries: int = 4096
    query_chars: int = 8192
    topk: int = 100
    rows: int = 65_536  # passages in one answer, queries x topk: about 50 MB of 100-word passages
    requests: int = 256  # answered at one time
    rows_at_once: int = 4 * 65_536  # passages in all answers being made
    # What is read and thrown away of a request that is refused, so that its client can read why.
    linger_bytes: int = 64 * 2**20
    linger_s: float = 10.0


class Metrics:
    """What the server counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {"registry": self.registry}
        self.requests = Counter("retriever_requests", "Requests to /retrieve by status", ["status"], **made)
        self.queries = Counter("retriever_queries", "Queries asked", **made)
        self.in_flight = Gauge("retriever_in_flight", "Requests being answered", **made)
        sizes = [2**n for n in range(14)]
        self.batch = Histogram("retriever_batch_queries", "Queries per search", buckets=sizes, **made)
        self.seconds = Histogram("retriever_seconds", "Seconds from request to answer", **made)


class Room:
    """An amount that requests hold together while they are answered."""

    def __init__(self, what: str, most: int):
        self._what, self._most, self._taken = what, most, 0

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Hold `amount`; raises `HTTPException` 503 where it is more than what is left."""
        if self._taken + amount > self._most:
            message = f"busy: at most {self._most} {self._what} are answered at one time; ask again"
            raise HTTPException(503, message, {"Retry-After": "1"})
        self._taken += amount
        try:
            yield
        finally:
            self._taken -= amount


class Lingering:
    """ASGI middleware: hears a client out before it is answered.

    A server that closes a connection on which a body still arrives resets it, and the client never reads why it was
    refused. So what is left of a body is read and thrown away before an answer starts, up to a bound.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, most_s: float):
        self._app, self._most_bytes, self._most_s = app, most_bytes, most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # A client that asks first, by Expect, has nothing on its way until the body is asked for.
        asks_first = any(name == b"expect" for name, _ in scope["headers"])
        heard = begun = False

        async def listen() -> Message:
            nonlocal heard, begun
            begun, message = True, await receive()
            heard = message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        async def drain() -> None:
            left = self._most_bytes
            with suppress(TimeoutError):
                async with asyncio.timeout(self._most_s):
                    while not heard and left > 0:
                        async with asyncio.timeout(SILENCE_S):
                            left -= len((await listen()).get("body", b""))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not heard:
                if (begun or not asks_first) and not scope.get("hurried"):
                    await drain()
                if not heard:
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await self._app(scope, listen, answer)


def make_app(
    retriever: Retriever,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    token: str | None = None,
    default_topk: int = 3,
) -> Starlette:
    """The ASGI application.

    Args:
      token: asked for as a bearer token, except by /health; None: nobody is asked.
      default_topk: for requests that name none.
    """
    about = retriever.describe()
    metrics = Metrics()
    batcher = Batcher(retriever, limits.queries, metrics.batch.observe)
    requests, rows = Room("requests", limits.requests), Room("passages", limits.rows_at_once)

    def authorise(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(
                401, "a bearer token is needed: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
            )

    async def answer(request: Request) -> Response:
        body = await _body(request, limits)
        parse = partial(_parse, body, limits, default_topk)
        queries, topk, with_scores = await asyncio.to_thread(parse) if len(body) > LARGE_BODY_BYTES else parse()
        metrics.queries.inc(len(queries))
        with rows.take(len(queries) * topk):
            try:
                found = await _while_there(request, batcher.search(queries, topk))
            except RetrievalError as error:
                raise HTTPException(503, str(error)) from None
            render = partial(_render, found, with_scores)
            content = await asyncio.to_thread(render) if len(queries) * topk > LARGE_ANSWER_ROWS else render()
        return Response(content, media_type="application/json")

    async def retrieve(request: Request) -> Response:
        authorise(request)
        started = time.perf_counter()
        status = 500
        try:
            with metrics.in_flight.track_inprogress(), requests.take(1):
                response = await answer(request)
            status = response.status_code
            return response
        except HTTPException as error:
            status = error.status_code
            raise
        except asyncio.CancelledError:  # the server stops, and its patience with this request is over
            status, request.scope["hurried"] = 503, True
            return JSONResponse({"detail": "the server is stopping"}, status)
        finally:
            metrics.requests.labels(status).inc()
            metrics.seconds.observe(time.perf_counter() - started)

    async def health(_: Request) -> Response:
        healthy = await batcher.healthy()
        status = {"status": "ok" if healthy else "searches fail", "rows": about["rows"]}
        return JSONResponse(status, 200 if healthy else 503)

    async def info(request: Request) -> Response:
        authorise(request)
        return JSONResponse(about)

    async def expose(request: Request) -> Response:
        authorise(request)
        return PlainTextResponse(generate_latest(metrics.registry))

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)

    async def give_up(_: Request, error: Exception) -> Response:  # uvicorn logs the error
        return JSONResponse({"detail": "an error of the server; its log says which"}, 500)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        searching = asyncio.create_task(batcher.run())
        yield
        searching.cancel()

    routes = [
        Route("/retrieve", retrieve, methods=["POST"]),
        Route("/health", health),
        Route("/info", info),
        Route("/metrics", expose),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Lingering, limits.linger_bytes, limits.linger_s)],
        exception_handlers={HTTPException: refuse, Exception: give_up},
    )
    app.state.batcher, app.state.open_to_all = batcher, token is None
    return app


def serve(app: Starlette, host: str, port: int, ready: str = "serving on {url}", stop_s: int = 20) -> bool:
    """Serve until SIGTERM or SIGINT, then finish what is in flight and return.

    Args:
      port: 0 takes a free one.
      ready: printed on stdout once connections are accepted.
      stop_s: how long what is in flight is waited for.

    Returns:
      False when a search is still running, in a thread that nothing ends but the end of the process.

    Raises:
      CorpusError: the address cannot be bound.
    """
    with listen(host, port) as listener:
        if app.state.open_to_all and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            log.warning("--host=%s without --token_file: whoever reaches this machine may search", host)
        shown = f"[{host}]" if ":" in host else host
        print(ready.format(url=f"http://{shown}:{listener.getsockname()[1]}/retrieve"), flush=True)
        # uvicorn stops in order and then raises the signal again, which would end the program as killed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        config = uvicorn.Config(
            app,
            http="h11",  # the one of uvicorn's two that is always there, so that everybody has the same edges
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=stop_s,
        )
        uvicorn.Server(config).run(sockets=[listener])
    return not app.state.batcher.busy


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections. Raises `CorpusError` when the address cannot be bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; inherited by every connection
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALLED_S))
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise CorpusError(f"--host={host} --port={port}: cannot be bound ({error.strerror})") from None
    return listener


async def _body(request: Request, limits: Limits) -> bytes:
    """The request's body, read no further and no longer than allowed, whatever its headers say."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise HTTPException(413, f"the body is larger than {limits.body_bytes} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive in {limits.body_s:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection was closed in the middle of the body") from None
    return bytes(body)


async def _while_there(request: Request, search: Coroutine[Any, Any, list[list[Passage]]]) -> list[list[Passage]]:
    """What `search` finds; it is cancelled when the client closes its connection. The body must have been read."""

    async def closed() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    searching, leaving = asyncio.ensure_future(search), asyncio.ensure_future(closed())
    try:
        await asyncio.wait((searching, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not searching.done():
            raise HTTPException(GONE, "the client has gone")
        return searching.result()
    finally:
        searching.cancel()
        leaving.cancel()


def _parse(body: bytes, limits: Limits, default_topk: int) -> tuple[list[str], int, bool]:
    """Queries, top-k and whether scores are wanted. Raises `HTTPException` 422 naming the field."""
    try:
        asked: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(422, "the body is not JSON") from None
    if not isinstance(asked, dict):
        raise HTTPException(422, f"the body is a {type(asked).__name__}, expected an object with queries")
    queries, topk, with_scores = asked.get("queries"), asked.get("topk"), asked.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise HTTPException(422, "queries: expected a list of strings")
    if len(queries) > limits.queries:
        raise HTTPException(422, f"queries: found {len(queries)}, accepted: at most {limits.queries}")
    longest = max(map(len, queries), default=0)
    if longest > limits.query_chars:
        raise HTTPException(422, f"queries: one has {longest} characters, accepted: at most {limits.query_chars}")
    topk = default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= limits.topk:
        raise HTTPException(422, f"topk: expected a whole number from 1 to {limits.topk}, or null")
    if len(queries) * topk > limits.rows:
        found = f"{len(queries)} queries x topk {topk} = {len(queries) * topk} passages"
        raise HTTPException(422, f"queries, topk: found {found}, accepted: at most {limits.rows}")
    if not isinstance(with_scores, bool):
        raise HTTPException(422, "return_scores: expected true or false")
    return queries, topk, with_scores


def _render(found: list[list[Passage]], with_scores: bool) -> bytes:
    content = {"result": [[_row(passage, with_scores) for passage in ranking] for ranking in found]}
    try:
        return orjson.dumps(content)
    except TypeError:  # half of a surrogate pair in a passage: JSON's escapes can say it, UTF-8 cannot
        return json.dumps(content).encode()


def _row(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
    return {"document": document, "score": passage.score} if with_score else document

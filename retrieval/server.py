"""A retriever behind HTTP, in the form of Search-R1's `/retrieve`, for existing clients and for several hosts.

    POST /retrieve   {"queries": [str], "topk": int or null, "return_scores": bool} -> {"result": [[...], ...]}
    GET  /health     {"status": "ok", "rows": N}
    GET  /info       {"corpus": name or null, "corpus_sha256": digest or null, "rows": N or null}
    GET  /metrics    Prometheus text

While one search runs, the requests that arrive are gathered and become the next one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from retrieval.protocol import CorpusError, Passage, RetrievalError, Retriever

log = logging.getLogger("retrieval")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body_bytes: int = 4 * 2**20
    queries: int = 4096
    query_chars: int = 8192
    topk: int = 100


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


class Batcher:
    """Turns the calls of many clients into few searches."""

    def __init__(self, retriever: Retriever, metrics: Metrics, most_queries: int):
        self._retriever, self._metrics, self._most = retriever, metrics, most_queries
        self._waiting: list[tuple[list[str], int, asyncio.Future]] = []
        self._arrived = asyncio.Event()

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Wait for the next search and take this call's share of it."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((queries, k, answer))
        self._arrived.set()
        return await answer

    async def run(self) -> None:
        """Search for whatever waits, for ever."""
        while True:
            await self._arrived.wait()
            calls = self._take()
            for k in sorted({k for _, k, _ in calls}):  # another k may look at other candidates
                await self._search([call for call in calls if call[1] == k], k)

    def _take(self) -> list[tuple[list[str], int, asyncio.Future]]:
        """The calls that have waited longest, up to the largest batch."""
        count, total = 0, 0
        while count < len(self._waiting) and (not count or total + len(self._waiting[count][0]) <= self._most):
            total += len(self._waiting[count][0])
            count += 1
        calls, self._waiting = self._waiting[:count], self._waiting[count:]
        if not self._waiting:
            self._arrived.clear()
        return [call for call in calls if not call[2].done()]  # without those whose client has gone

    async def _search(self, calls: Sequence[tuple[list[str], int, asyncio.Future]], k: int) -> None:
        queries = [query for asked, _, _ in calls for query in asked]
        self._metrics.batch.observe(len(queries))
        try:
            found = await asyncio.to_thread(self._retriever.search, queries, k)
        except Exception as error:  # of whatever kind: these clients are told, the next ones are served
            log.error("a search for %d queries failed: %s", len(queries), error)
            for _, _, answer in calls:
                if not answer.done():
                    answer.set_exception(RetrievalError(f"the search failed ({type(error).__name__}: {error})"))
            return
        start = 0
        for asked, _, answer in calls:
            if not answer.done():
                answer.set_result(found[start : start + len(asked)])
            start += len(asked)


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
    batcher = Batcher(retriever, metrics, limits.queries)

    def authorise(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(
                401, "a bearer token is needed: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
            )

    async def answer(request: Request) -> Response:
        authorise(request)
        queries, topk, with_scores = _parse(await _body(request, limits.body_bytes), limits, default_topk)
        metrics.queries.inc(len(queries))
        try:
            found = await batcher.search(queries, topk)
        except RetrievalError as error:
            raise HTTPException(503, " ".join(str(error).split())) from None
        return JSONResponse({"result": [[_row(passage, with_scores) for passage in ranking] for ranking in found]})

    async def retrieve(request: Request) -> Response:
        started = time.perf_counter()
        status = 500
        try:
            with metrics.in_flight.track_inprogress():
                response = await answer(request)
            status = response.status_code
            return response
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            metrics.requests.labels(status).inc()
            metrics.seconds.observe(time.perf_counter() - started)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "rows": about["rows"]})

    async def info(request: Request) -> Response:
        authorise(request)
        return JSONResponse(about)

    async def expose(request: Request) -> Response:
        authorise(request)
        return PlainTextResponse(generate_latest(metrics.registry))

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)

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
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refuse})


def serve(app: Starlette, host: str, port: int, ready: str = "serving on {url}") -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight and return.

    Args:
      port: 0 takes a free one.
      ready: printed on stdout once connections are accepted.

    Raises:
      CorpusError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise CorpusError(f"--host={host} --port={port}: cannot be bound ({error.strerror})") from None
        listener.listen(2048)
        shown = f"[{host}]" if ":" in host else host
        print(ready.format(url=f"http://{shown}:{listener.getsockname()[1]}/retrieve"), flush=True)
        # uvicorn stops in order and then raises the signal again, which would end the program as killed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75)
        uvicorn.Server(config).run(sockets=[listener])


async def _body(request: Request, most: int) -> bytes:
    """The request's body, read no further than allowed, whatever its headers say."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise HTTPException(413, f"the body is larger than {most} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the connection was closed in the middle of the body") from None
    return bytes(body)


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
    if not isinstance(with_scores, bool):
        raise HTTPException(422, "return_scores: expected true or false")
    return queries, topk, with_scores


def _row(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
    return {"document": document, "score": passage.score} if with_score else document

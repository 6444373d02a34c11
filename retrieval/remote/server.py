"""A retriever served over HTTP, in the form of Search-R1's `/retrieve`, for existing clients and for several hosts.

POST /retrieve   {"queries": [str], "topk": int or null, "return_scores": bool} -> {"result": [[...], ...]}
GET  /health     {"status": "ok", "rows": N}, or with status 503 when searches fail
GET  /info       {"corpus": name, "corpus_sha256": digest, "ranking_sha256": digest, "rows": N}, each may be null
GET  /metrics    Prometheus text
GET  /openapi.json  this interface as OpenAPI 3.1
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from retrieval.protocol import Passage, RetrievalError, Retriever
from retrieval.remote import http
from retrieval.remote.batcher import Batcher
from retrieval.remote.openapi import description

# Larger bodies are parsed, and larger answers written, in a thread, so that they do not block other clients.
LARGE_BODY_BYTES, LARGE_ANSWER_ROWS = 64 * 2**10, 512


@dataclass(frozen=True)
class Limits(http.Bounds):
    """Limits on one request, and on all requests together."""

    queries: int = 4096
    query_chars: int = 8192
    topk: int = 100
    rows: int = 65_536  # passages in one answer, queries x topk: about 50 MB of 100-word passages
    rows_at_once: int = 4 * 65_536  # passages in all answers in progress


class Metrics:
    """The server's metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter("retriever_requests", "Requests to /retrieve by status", ["status"], registry=own)
        self.queries = Counter("retriever_queries", "Queries received", registry=own)
        self.in_flight = Gauge("retriever_in_flight", "Requests in flight", registry=own)
        sizes = [2**n for n in range(14)]
        self.batch = Histogram("retriever_batch_queries", "Queries per search", buckets=sizes, registry=own)
        self.seconds = Histogram("retriever_seconds", "Seconds from request to answer", registry=own)


def make_app(
    retriever: Retriever,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    token: str | None = None,
    default_topk: int = 3,
    hosts: tuple[str, ...] = http.LOOPBACK,
) -> Starlette:
    """The ASGI application.

    Args:
      token: the bearer token that all paths but /health and /openapi.json require; None: none is required.
      default_topk: for requests without `topk`.
      hosts: without a token, the host names that clients may use; empty: any.
    """
    about = retriever.describe()
    authorise = partial(http.authorise, token=token, hosts=hosts)
    metrics = Metrics()
    batcher = Batcher(retriever, limits.queries, metrics.batch.observe)
    requests, rows = http.Room("requests", limits.requests), http.Room("passages", limits.rows_at_once)

    async def answer(request: Request) -> Response:
        body = await http.body_of(request, limits)
        parse = partial(_parse, body, limits, default_topk)
        queries, topk, with_scores = await asyncio.to_thread(parse) if len(body) > LARGE_BODY_BYTES else parse()
        metrics.queries.inc(len(queries))
        with rows.take(len(queries) * topk):
            try:
                rankings = await http.while_there(request, batcher.search(queries, topk))
            except RetrievalError as error:
                raise HTTPException(503, str(error)) from None
            render = partial(_render, rankings, with_scores)
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
        except asyncio.CancelledError:  # the server is stopping and no longer waits for this request
            status = 503
            return http.stopping(request)
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

    async def described(_: Request) -> Response:
        return JSONResponse(
            description(limits.queries, limits.query_chars, limits.topk, limits.rows, token is not None)
        )

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
        Route("/openapi.json", described),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=http.middleware(limits),
        exception_handlers=http.HANDLERS,
    )
    app.state.batcher, app.state.open_to_all = batcher, token is None
    return app


def serve(app: Starlette, host: str, port: int, ready: str = "serving on {url}", stop_s: int = 20) -> bool:
    """As `http.serve`; `{url}` is the address of /retrieve.

    Returns:
      False when a search is still running in its thread, which only the end of the process stops.
    """
    http.serve(app, host, port, ready, "/retrieve", "search", stop_s)
    return not app.state.batcher.busy


def _parse(body: bytes, limits: Limits, default_topk: int) -> tuple[list[str], int, bool]:
    """Queries, top-k and whether to return scores. Raises `HTTPException` 422 naming the field."""
    content = http.json_object(body, "queries")
    queries, topk, with_scores = content.get("queries"), content.get("topk"), content.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise HTTPException(422, "queries: expected a list of strings")
    if len(queries) > limits.queries:
        raise HTTPException(422, f"queries: found {len(queries)}, accepted: at most {limits.queries}")
    longest = max(map(len, queries), default=0)
    if longest > limits.query_chars:
        raise HTTPException(422, f"queries: one has {longest} characters, accepted: at most {limits.query_chars}")
    topk = default_topk if topk is None else http.integer_if_whole(topk)
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= limits.topk:
        raise HTTPException(422, f"topk: expected an integer from 1 to {limits.topk}, or null")
    if len(queries) * topk > limits.rows:
        product = f"{len(queries)} queries x topk {topk} = {len(queries) * topk} passages"
        raise HTTPException(422, f"queries, topk: found {product}, accepted: at most {limits.rows}")
    if not isinstance(with_scores, bool):
        raise HTTPException(422, "return_scores: expected true or false")
    return queries, topk, with_scores


def _render(rankings: list[list[Passage]], with_scores: bool) -> bytes:
    content = {"result": [[_row(passage, with_scores) for passage in ranking] for ranking in rankings]}
    try:
        return orjson.dumps(content)
    except TypeError:  # a lone surrogate in a passage: UTF-8 cannot encode it, but JSON can escape it
        return json.dumps(content).encode()


def _row(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
    return {"document": document, "score": passage.score} if with_score else document

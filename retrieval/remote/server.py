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
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from retrieval.protocol import Passage, RetrievalError, Retriever
from retrieval.remote import http
from retrieval.remote.batcher import Batcher
from retrieval.remote.openapi import Operation, document

MAX_QUERIES, MAX_QUERY_CHARS, MAX_TOPK = 4096, 8192, 100
# Larger bodies are parsed, and larger answers written, in a thread, so that they do not block other clients.
LARGE_BODY_BYTES, LARGE_ANSWER_ROWS = 64 * 2**10, 512


@dataclass(frozen=True)
class Limits(http.Bounds):
    """Limits on the passages in one answer, and in all answers in progress."""

    rows: int = 65_536  # queries x topk: about 50 MB of 100-word passages
    rows_at_once: int = 4 * 65_536


class RetrieveRequest(BaseModel):
    """The body of a request; other fields are ignored."""

    model_config = ConfigDict(strict=True)

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(max_length=MAX_QUERIES)
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK), BeforeValidator(http.integer_if_whole)] | None = None
    return_scores: bool = False


class Document(BaseModel):
    """A passage: its title in quotes on the first line, then its text."""

    id: str
    contents: str


class ScoredDocument(BaseModel):
    """A passage with its score."""

    document: Document
    score: float


class RetrieveAnswer(BaseModel):
    """One ranking per query, with scores if they were asked for."""

    result: list[list[ScoredDocument | Document]]


class Health(BaseModel):
    """Whether searches work."""

    status: str
    rows: int | None


class Info(BaseModel):
    """What is searched; see `Retriever.describe`."""

    corpus: str | None
    corpus_sha256: str | None
    ranking_sha256: str | None
    rows: int | None


class Refusal(BaseModel):
    """The answer to a request that is refused: one line that says why."""

    detail: str


OPERATIONS = (
    Operation("post", "/retrieve", RetrieveAnswer, RetrieveRequest, refusals=(400, 403, 408, 413, 422, 503)),
    Operation("get", "/info", Info, refusals=(403,)),
    Operation("get", "/health", Health, failure=Health, open=True),
    Operation("get", "/metrics", None, refusals=(403,)),
)


class Metrics:
    """The server's metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("retriever_requests", "Requests to /retrieve by status", ["status"], registry=registry)
        self.queries = Counter("retriever_queries", "Queries received", registry=registry)
        self.in_flight = Gauge("retriever_in_flight", "Requests in flight", registry=registry)
        sizes = [2**n for n in range(14)]
        self.batch = Histogram("retriever_batch_queries", "Queries per search", buckets=sizes, registry=registry)
        self.seconds = Histogram("retriever_seconds", "Seconds from request to answer", registry=registry)


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
    metrics = Metrics()
    batcher = Batcher(retriever, MAX_QUERIES, metrics.batch.observe)
    requests, rows = http.Capacity("requests", limits.requests), http.Capacity("passages", limits.rows_at_once)

    async def answer(request: Request) -> Response:
        body = await http.read_body(request, limits)
        if len(body) > LARGE_BODY_BYTES:
            asked = await asyncio.to_thread(http.parse, RetrieveRequest, body)
        else:
            asked = http.parse(RetrieveRequest, body)
        topk = asked.topk or default_topk
        passages = len(asked.queries) * topk
        if passages > limits.rows:
            raise HTTPException(422, f"queries, topk: found {passages} passages, accepted: at most {limits.rows}")
        metrics.queries.inc(len(asked.queries))
        with rows.take(passages):
            try:
                rankings = await http.run_while_connected(request, batcher.search(asked.queries, topk))
            except RetrievalError as error:
                raise HTTPException(503, str(error)) from None
            if passages > LARGE_ANSWER_ROWS:
                content = await asyncio.to_thread(_render, rankings, asked.return_scores)
            else:
                content = _render(rankings, asked.return_scores)
        return Response(content, media_type="application/json")

    async def retrieve(request: Request) -> Response:
        http.authorise(request, token, hosts)
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
            return JSONResponse({"detail": "the server is stopping"}, 503)
        finally:
            metrics.requests.labels(status).inc()
            metrics.seconds.observe(time.perf_counter() - started)

    async def health(_: Request) -> Response:
        healthy = await batcher.healthy()
        status = {"status": "ok" if healthy else "searches fail", "rows": about["rows"]}
        return JSONResponse(status, 200 if healthy else 503)

    async def info(request: Request) -> Response:
        http.authorise(request, token, hosts)
        return JSONResponse(about)

    async def expose(request: Request) -> Response:
        http.authorise(request, token, hosts)
        return PlainTextResponse(generate_latest(metrics.registry))

    async def described(_: Request) -> Response:
        return JSONResponse(document("psearch_jax retrieval", OPERATIONS, Refusal, token is not None))

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
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=http.HANDLERS)
    app.state.batcher, app.state.open_to_all = batcher, token is None
    return app


def serve(listener: socket.socket, app: Starlette, host: str, ready: str, stop_s: int = 20) -> bool:
    """As `http.serve`; `{url}` is the address of /retrieve.

    Returns:
      False when a search is still running in its thread, which only the end of the process stops.
    """
    http.serve(listener, app, host, ready, "/retrieve", "search", stop_s)
    return not app.state.batcher.busy


def _render(rankings: list[list[Passage]], with_scores: bool) -> bytes:
    # ASCII escapes: a corpus may contain half a surrogate pair, which UTF-8 cannot encode.
    return json.dumps({"result": [[_row(passage, with_scores) for passage in r] for r in rankings]}).encode()


def _row(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
    return {"document": document, "score": passage.score} if with_score else document

"""A retriever served over HTTP, in the form of Search-R1's `/retrieve`, for existing clients and for several hosts.

POST /retrieve   {"queries": [str], "topk": int or null, "return_scores": bool} -> {"result": [[...], ...]}
GET  /health     {"status": "ok", "rows": N}, or with status 503 when searches fail
GET  /info       {"corpus": name, "corpus_sha256": digest, "ranking_sha256": digest, "rows": N}, each may be null
GET  /metrics    Prometheus text
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

from prometheus_client import Histogram
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrieval.protocol import Passage, RetrievalError, Retriever
from retrieval.remote import http
from retrieval.remote.batcher import Batcher

MAX_QUERIES, MAX_QUERY_CHARS, MAX_TOPK = 4096, 8192, 100
DEFAULT_TOPK = 3


@dataclass(frozen=True)
class Limits(http.Bounds):
    """Limits on the passages in one answer, and in all answers in progress."""

    rows: int = 65_536  # queries x topk: about 50 MB of 100-word passages
    rows_at_once: int = 4 * 65_536


class RetrieveRequest(BaseModel):
    """The body of a request; other fields are ignored."""

    model_config = ConfigDict(strict=True)

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(max_length=MAX_QUERIES)
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None  # None: DEFAULT_TOPK
    return_scores: bool = False


def make_app(
    retriever: Retriever,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    token: str | None = None,
    hosts: tuple[str, ...] = http.LOOPBACK,
) -> Starlette:
    """The ASGI application.

    Args:
      token: the bearer token that all paths but /health require; None: none is required.
      hosts: without a token, the host names that clients may use; empty: any.
    """
    about = retriever.describe()
    metrics = http.Metrics("retriever")
    sizes = [2**n for n in range(14)]
    batches = Histogram("retriever_batch_queries", "Queries per search", buckets=sizes, registry=metrics.registry)
    batcher = Batcher(retriever, MAX_QUERIES, batches.observe)
    requests, rows = http.Capacity("requests", limits.requests), http.Capacity("passages", limits.rows_at_once)

    async def answer(request: Request) -> Response:
        # In threads, so that long requests and answers do not block other clients.
        query = await asyncio.to_thread(http.parse, RetrieveRequest, await http.read_body(request, limits))
        topk = query.topk or DEFAULT_TOPK
        passages = len(query.queries) * topk
        if passages > limits.rows:
            raise HTTPException(422, f"queries, topk: found {passages} passages, accepted: at most {limits.rows}")
        metrics.queries.inc(len(query.queries))
        with rows.take(passages):
            try:
                rankings = await http.run_while_connected(request, batcher.search(query.queries, topk))
            except RetrievalError as error:
                raise HTTPException(503, str(error)) from None
            content = await asyncio.to_thread(_render, rankings, query.return_scores)
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
            metrics.record(status, started)

    async def health(_: Request) -> Response:
        healthy = await batcher.healthy()
        status = {"status": "ok" if healthy else "searches fail", "rows": about["rows"]}
        return JSONResponse(status, 200 if healthy else 503)

    async def info(request: Request) -> Response:
        http.authorise(request, token, hosts)
        return JSONResponse(about)

    async def expose(request: Request) -> Response:
        http.authorise(request, token, hosts)
        return metrics.render()

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
        exception_handlers=http.error_handlers(lambda message, _: {"detail": message}),
    )
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

"""What all servers here share: limits, bearer tokens, host names, reading requests, errors, and shutdown."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from retrieval.protocol import CorpusError

log = logging.getLogger("retrieval")
HEAD_S = 30.0  # close a connection on which a request's headers take longer than this
STALLED_S = 60  # close the connection of a client that receives nothing of its answer for this long
# How much of a refused request is read and discarded, so that its client can read the reason.
LINGER_BYTES, LINGER_S = 64 * 2**20, 5.0
GONE = 499  # the status counted for a client that disconnected
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
Fields = TypeVar("Fields", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """Limits on the requests to any server."""

    body_bytes: int = 4 * 2**20
    body_s: float = 30.0  # for the complete body to arrive
    requests: int = 256  # answered at the same time


class Capacity:
    """A limit on the total of the amounts that concurrent requests take."""

    def __init__(self, what: str, most: int):
        self._what, self._most, self._taken = what, most, 0

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Hold `amount` in the context; raises `HTTPException` 503 if less is left."""
        if self._taken + amount > self._most:
            message = f"busy: at most {self._most} {self._what} are answered at one time; ask again"
            raise HTTPException(503, message, {"Retry-After": "1"})
        self._taken += amount
        try:
            yield
        finally:
            self._taken -= amount


class Metrics:
    """A server's Prometheus metrics, in their own registry."""

    def __init__(self, prefix: str):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(f"{prefix}_requests", "Requests by status", ["status"], registry=registry)
        self.in_flight = Gauge(f"{prefix}_in_flight", "Requests in flight", registry=registry)
        self.queries = Counter(f"{prefix}_queries", "Queries received or searched", registry=registry)
        self.seconds = Histogram(f"{prefix}_seconds", "Seconds from request to answer", registry=registry)

    def record(self, status: int, started: float) -> None:
        """Count a request of `time.perf_counter() == started` that ended with `status`."""
        self.requests.labels(status).inc()
        if status == 200:  # fast refusals would distort the latency
            self.seconds.observe(time.perf_counter() - started)

    def render(self) -> Response:
        """The answer of /metrics."""
        return PlainTextResponse(generate_latest(self.registry))


class TimedHeads(H11Protocol):
    """uvicorn's HTTP protocol, which would wait without limit for the headers of a request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are complete
            self._stop_timer()
        elif self._timer is None:  # not at every byte: a client that sends one from time to time would stay for ever
            self._timer = self.loop.call_later(HEAD_S, self._close)

    def _close(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def authorise(request: Request, token: str | None, hosts: Sequence[str]) -> None:
    """Raise `HTTPException` 401 unless the request has the bearer token.

    Without a token (None), refuse with 403 the page of another site in a user's browser instead: it could otherwise
    use a server on the user's machine. With a host name of its own that resolves to that machine (DNS rebinding) it
    could also read the answers.

    Args:
      hosts: without a token, those accepted in the header Host, with any port; empty: all.
    """
    if token is not None:
        header = request.headers.get("authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
            message = "a bearer token is needed: Authorization: Bearer TOKEN"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        return
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if hosts and re.sub(r":\d+$", "", host) not in hosts:
        raise HTTPException(403, f"called by the name {host[:80]}, accepted: {', '.join(hosts)}")
    with suppress(ValueError):  # brackets that do not enclose an address
        if origin is None or urlsplit(origin).netloc == host:
            return
    raise HTTPException(403, "asked by a page of another site")


def host_names(host: str) -> tuple[str, ...]:
    """The `hosts` of `authorise` for a server that listens on the address `host`."""
    return () if host in ("0.0.0.0", "::") else (*LOOPBACK, f"[{host}]" if ":" in host else host)


async def read_body(request: Request, limits: Bounds) -> bytes:
    """The request's body, limited in size and time whatever its headers say."""
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
    request.scope["body_complete"] = True
    return bytes(body)


def parse(model: type[Fields], body: bytes) -> Fields:
    """The fields of a JSON object. Raises `HTTPException` 422 naming the first wrong field and what is accepted."""
    try:
        return model.model_validate_json(body)
    except ValidationError as errors:
        error = errors.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, error["loc"])) or "the body"
        # The message of a model's own validator names the field.
        reason = error.get("ctx", {}).get("error") if error["type"] == "value_error" else None
        raise HTTPException(422, str(reason) if reason else f"{field}: {error['msg']}") from None


async def drain(request: Request) -> dict[str, str]:
    """Read and discard the rest of a refused request's body, up to a limit; returns the answer's headers.

    Closing a connection on which a body still arrives resets it, and the client never reads why it was refused.
    """
    left = LINGER_BYTES
    if request.scope.get("body_complete"):
        return {}
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0 and "expect" not in request.headers:  # Expect: the client waits to be asked for the body
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return {}
    return {"Connection": "close"}


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it when the client disconnects. The body must have been read before."""

    async def closed() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(closed())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(GONE, "the client has gone")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def error_handlers(render: Callable[[str, int], dict[str, Any]]) -> dict[Any, Any]:
    """Starlette's exception handlers; `render` makes the JSON object of a message and a status."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = {**await drain(request), **(error.headers or {})}
        return JSONResponse(render(error.detail, error.status_code), error.status_code, headers)

    async def fail(_: Request, error: Exception) -> Response:  # uvicorn logs the error
        return JSONResponse(render("internal server error; see the server's log", 500), 500)

    return {HTTPException: refuse, Exception: fail}


def serve(
    listener: socket.socket, app: Starlette, host: str, ready: str, path: str, may: str, stop_s: int = 20
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight and return.

    Args:
      listener: from `listen`: binding before a model loads for minutes reports a used port at once.
      app: `app.state.open_to_all` is whether it requires no token.
      ready: printed on stdout once connections are accepted, with `{url}` replaced by the address of `path`.
      may: what anyone can do with a server without a token, for the warning.
      stop_s: how long to wait for requests in flight.
    """
    if app.state.open_to_all and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        log.warning("--host=%s without --token_file: whoever reaches this machine may %s", host, may)
    config = uvicorn.Config(
        app,
        http=TimedHeads,  # h11: always installed, unlike httptools, so that edge cases behave the same everywhere
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=stop_s,
    )
    server = uvicorn.Server(config)
    # uvicorn shuts down and then raises the signal again, which would kill the process. These handlers prevent that,
    # and also handle a signal that arrives before uvicorn installs its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    shown = f"[{host}]" if ":" in host else host
    print(ready.replace("{url}", f"http://{shown}:{listener.getsockname()[1]}{path}"), flush=True)
    server.run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections; port 0 takes a free one. Raises `CorpusError` when it cannot be bound."""
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

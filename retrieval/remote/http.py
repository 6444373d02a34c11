"""What all servers here share: limits, bearer tokens, reading the rest of refused requests, errors, and shutdown."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from retrieval.protocol import CorpusError

log = logging.getLogger("retrieval")
SILENCE_S = 1.0  # stop reading a refused client's body after this long without data
HEAD_S = 30.0  # close a connection on which a request's headers take longer than this
STALLED_S = 60  # close the connection of a client that receives nothing of its answer for this long
GONE = 499  # the status counted for a client that disconnected
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """Limits on the requests to any server."""

    body_bytes: int = 4 * 2**20
    body_s: float = 30.0  # for the complete body to arrive
    requests: int = 256  # answered at the same time
    # How much of a refused request is read and discarded, so that its client can read the reason.
    linger_bytes: int = 64 * 2**20
    linger_s: float = 10.0


class Room:
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


class Lingering:
    """ASGI middleware: reads the rest of a request's body before the answer starts.

    Closing a connection on which a body still arrives resets it, and the client never reads why it was refused. So the
    rest of the body is read and discarded first, up to a limit.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, most_s: float):
        self._app, self._most_bytes, self._most_s = app, most_bytes, most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # A client that sends Expect sends no body until the server asks for it.
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


class TimedHeads(H11Protocol):
    """uvicorn's HTTP protocol, which would wait without limit for the headers of a request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are complete
            self._unwatch()
        elif self._late is None:  # not at every byte: a client that sends one from time to time would stay for ever
            self._late = self.loop.call_later(HEAD_S, self._close)

    def _close(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def middleware(bounds: Bounds) -> list[Middleware]:
    """The middleware of every application here."""
    return [Middleware(Lingering, bounds.linger_bytes, bounds.linger_s)]


def authorise(request: Request, token: str | None, hosts: Sequence[str]) -> None:
    """Raise `HTTPException` 401 unless the request has the bearer token.

    Without a token (None), refuse the pages of other sites instead; `hosts` as for `refuse_foreign_pages`.
    """
    if token is None:
        return refuse_foreign_pages(request, hosts)
    header = request.headers.get("authorization", "")
    if not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
        message = "a bearer token is needed: Authorization: Bearer TOKEN"
        raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


def refuse_foreign_pages(request: Request, hosts: Sequence[str]) -> None:
    """Raise `HTTPException` 403 for requests from another site's page in a user's browser.

    Such a page could otherwise use a server without a token on the user's machine. With a host name of its own that
    resolves to that machine (DNS rebinding) it could also read the answers.

    Args:
      hosts: accepted in the header Host, with any port; empty: all.
    """
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if hosts and re.sub(r":\d+$", "", host) not in hosts:
        raise HTTPException(403, f"called by the name {host[:80]}, accepted: {', '.join(hosts)}")
    if origin is not None and _host_of(origin) != host:
        raise HTTPException(403, "asked by a page of another site")


def names_of(host: str) -> tuple[str, ...]:
    """The `hosts` of `refuse_foreign_pages` for a server that listens on the address `host`."""
    return () if host in ("0.0.0.0", "::") else (*LOOPBACK, f"[{host}]" if ":" in host else host)


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets that do not enclose an address
        return None


def stopping(request: Request) -> Response:
    """The answer to a client while the server shuts down; the rest of its body is not read."""
    request.scope["hurried"] = True
    return JSONResponse({"detail": "the server is stopping"}, 503)


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _give_up(_: Request, error: Exception) -> Response:  # uvicorn logs the error
    return JSONResponse({"detail": "an error of the server; its log says which"}, 500)


HANDLERS = {HTTPException: _refuse, Exception: _give_up}


def serve(app: Starlette, host: str, port: int, ready: str, path: str, may: str, stop_s: int = 20) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight and return.

    Args:
      app: `app.state.open_to_all` is whether it requires no token.
      port: 0 takes a free one.
      ready: printed on stdout once connections are accepted, with `{url}` replaced by the address of `path`.
      may: what anyone can do with a server without a token, for the warning.
      stop_s: how long to wait for requests in flight.

    Raises:
      CorpusError: the address cannot be bound.
    """
    with listen(host, port) as listener:
        serve_on(listener, app, host, ready, path, may, stop_s)


def serve_on(
    listener: socket.socket, app: Starlette, host: str, ready: str, path: str, may: str, stop_s: int = 20
) -> None:
    """As `serve`, on a bound socket: binding before a model loads for minutes reports a used port at once."""
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


async def body_of(request: Request, limits: Bounds) -> bytes:
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
    return bytes(body)


async def while_there(request: Request, search: Coroutine[Any, Any, T]) -> T:
    """Return the result of `search`; cancel it when the client disconnects. The body must have been read before."""

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


def integer_if_whole(value: Any) -> Any:
    """Convert a float with an integer value to int, since JSON clients may send 3.0; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_object(body: bytes, field: str) -> dict[str, Any]:
    """Parse a body that contains a JSON object. Raises `HTTPException` 422, with `field` named as a required field."""
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(422, "the body is not JSON") from None
    if not isinstance(content, dict):
        raise HTTPException(422, f"the body is a {type(content).__name__}, expected an object with {field}")
    return content

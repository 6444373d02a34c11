"""What the servers here have in common: bounds, tokens, who is heard out, how they are refused, and how they stop."""

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

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval.protocol import CorpusError

log = logging.getLogger("retrieval")
SILENCE_S = 1.0  # a refused client that sends nothing for this long is not heard out
STALLED_S = 60  # a client that takes nothing of its answer for this long is hung up on
GONE = 499  # the status that is counted for a client that did not wait
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """What a request may take of any server."""

    body_bytes: int = 4 * 2**20
    body_s: float = 30.0  # for the whole body to arrive
    requests: int = 256  # answered at one time
    # What is read and thrown away of a request that is refused, so that its client can read why.
    linger_bytes: int = 64 * 2**20
    linger_s: float = 10.0


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


def middleware(bounds: Bounds) -> list[Middleware]:
    """What stands around an application."""
    return [Middleware(Lingering, bounds.linger_bytes, bounds.linger_s)]


def authorise(request: Request, token: str | None) -> None:
    """Raises `HTTPException` 401 without the bearer token that is asked for; None: nobody is asked."""
    given = request.headers.get("authorization", "")
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        message = "a bearer token is needed: Authorization: Bearer TOKEN"
        raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


def refuse_foreign_pages(request: Request, hosts: Sequence[str]) -> None:
    """Raises `HTTPException` 403 for what a page of another site asks in its reader's browser.

    Without a token, such a page could use a server on its reader's machine, and by a name that it lets point there
    (DNS rebinding) also read what it answers.

    Args:
      hosts: accepted in the header Host, whatever the port; empty: all.
    """
    called = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if hosts and re.sub(r":\d+$", "", called) not in hosts:
        raise HTTPException(403, f"called by the name {called[:80]}, accepted: {', '.join(hosts)}")
    if origin is not None and urlsplit(origin).netloc != called:
        raise HTTPException(403, "asked by a page of another site")


def stopping(request: Request) -> Response:
    """What a client is told whom the server cannot answer any more; its body is not heard out."""
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
      app: `app.state.open_to_all` says whether it asks for no token.
      port: 0 takes a free one.
      ready: printed on stdout once connections are accepted, with the address of `path` in place of `{url}`.
      may: what whoever reaches an open server may do.
      stop_s: how long what is in flight is waited for.

    Raises:
      CorpusError: the address cannot be bound.
    """
    with listen(host, port) as listener:
        serve_on(listener, app, host, ready, path, may, stop_s)


def serve_on(
    listener: socket.socket, app: Starlette, host: str, ready: str, path: str, may: str, stop_s: int = 20
) -> None:
    """As `serve`, on a socket that was bound before, so that what takes minutes to load need not be loaded in vain."""
    if app.state.open_to_all and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        log.warning("--host=%s without --token_file: whoever reaches this machine may %s", host, may)
    config = uvicorn.Config(
        app,
        http="h11",  # the one of uvicorn's two that is always there, so that everybody has the same edges
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=stop_s,
    )
    server = uvicorn.Server(config)
    # uvicorn stops in order and then raises the signal again, which would end the program as killed. One that comes
    # before uvicorn listens for it counts, too.
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


async def while_there(request: Request, search: Coroutine[Any, Any, T]) -> T:
    """What `search` returns; it is cancelled when the client closes its connection. The body must have been read."""

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


def whole(value: Any) -> Any:
    """A whole number that came as 3.0, since JSON knows one kind of number, as an integer; all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_object(body: bytes, field: str) -> dict[str, Any]:
    """The object that a body holds. Raises `HTTPException` 422; `field` is one that it should have."""
    try:
        asked: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(422, "the body is not JSON") from None
    if not isinstance(asked, dict):
        raise HTTPException(422, f"the body is a {type(asked).__name__}, expected an object with {field}")
    return asked

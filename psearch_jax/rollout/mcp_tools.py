"""The tools of an MCP server (Model Context Protocol), by the official SDK; needs the extra `mcp`.

A thread of its own keeps the connection. After a failure, as when the server was killed, the calls of that batch fail,
and the next batch connects again. A call that fails otherwise, or has no response, fails alone.
"""

from __future__ import annotations

import asyncio
import functools
import shlex
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from psearch_jax.rollout.tools import Arguments, Tool, failure, late
from psearch_jax.types import UserError, first_line

OPENING_S = 30.0  # to start a server and list its tools
CANCELLING_S = 5.0  # to tell a server that its response is no longer awaited


def open_server(target: str, timeout_s: float) -> list[Tool]:
    """The tools of a server at a URL, or of one that a command line starts.

    Args:
      timeout_s: of a call.

    Raises:
      UserError: the SDK is not installed, or the server does not list its tools.
    """
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise UserError(
            f"config.rollout.tools=mcp:{target}: the package mcp is not installed; accepted after `pip install "
            "'psearch-jax[mcp]'`"
        ) from error
    is_url = target.startswith(("http://", "https://"))
    try:
        command = [] if is_url else shlex.split(target)
        connection = _Connection(target if is_url else StdioServerParameters(command=command[0], args=command[1:]))
        listed = connection.submit(_list_tools).result(OPENING_S)
    except Exception as error:
        raise UserError(
            f"config.rollout.tools=mcp:{target}: its tools could not be listed ({type(error).__name__}: "
            f"{first_line(error)}), accepted: a URL or a command of an MCP server"
        ) from error

    def make_batch(name: str) -> Callable[[Sequence[Arguments]], list[str]]:
        def batch(calls: Sequence[Arguments]) -> list[str]:
            return connection.submit(functools.partial(_call, name=name, calls=calls, timeout_s=timeout_s)).result()

        return batch

    return [
        Tool(t.name, t.description or "", t.input_schema, make_batch(t.name), timeout_s=timeout_s + CANCELLING_S)
        for t in listed
    ]


async def _list_tools(client: Any) -> Sequence[Any]:
    return (await client.list_tools()).tools


async def _call(client: Any, name: str, calls: Sequence[Arguments], timeout_s: float) -> list[str]:
    """Calls a tool for all arguments at once. Raises if the connection is lost."""
    from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    async def call(arguments: Arguments) -> str:
        try:
            return _text(await client.call_tool(name, dict(arguments), read_timeout_seconds=timeout_s))
        except Exception as error:
            code = getattr(error, "code", None)  # of the protocol; without one, the transport failed
            if code in (None, CONNECTION_CLOSED):
                raise
            return late(timeout_s) if code == REQUEST_TIMEOUT else failure(first_line(error))

    results = await asyncio.gather(*map(call, calls), return_exceptions=True)
    if lost := [result for result in results if isinstance(result, BaseException)]:
        raise lost[0]
    return results


def _text(result: Any) -> str:
    text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
    return failure(text) if result.is_error else text


class _Connection:
    """Runs coroutines on a client of a server, one after another, in a thread with an event loop."""

    def __init__(self, server: Any):
        self._server, self._loop = server, asyncio.new_event_loop()
        self._requests: asyncio.Queue[tuple[Callable[[Any], Awaitable[Any]], Future]] = asyncio.Queue()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), name="mcp", daemon=True).start()

    def submit(self, request: Callable[[Any], Awaitable[Any]]) -> Future:
        """Runs `request(client)` when the requests before it are done."""
        future: Future = Future()
        self._loop.call_soon_threadsafe(self._requests.put_nowait, (request, future))
        return future

    async def _serve(self) -> None:
        from mcp import Client

        while True:
            request, future = await self._requests.get()
            try:
                async with Client(self._server) as client:
                    while True:
                        future.set_result(await request(client))
                        request, future = await self._requests.get()
            except BaseException as error:  # connecting, or the request; a new connection follows
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                if not future.done():
                    future.set_exception(ConnectionError(f"{type(error).__name__}: {first_line(error)}"))

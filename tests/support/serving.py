"""Serves an application over real HTTP on loopback."""

from __future__ import annotations

import json
import socket
import threading

import urllib3
import uvicorn

from retrieval.remote.http import TimedHeads, listen

HTTP = urllib3.PoolManager(retries=False)


class Running:
    """Serves an application on a free port, in a thread of this process; a stop cuts requests after five seconds."""

    def __init__(self, app):
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(app, http=TimedHeads, log_level="error", timeout_graceful_shutdown=5)
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def raw(self, body: bytes, length: int | None = None, path: str = "/retrieve") -> socket.socket:
        """A connection that has sent `body`, with a Content-Length of `length`."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        length = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def post(self, body, path: str = "/retrieve", **headers) -> urllib3.BaseHTTPResponse:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return HTTP.request("POST", self.url + path, body=data, headers=headers)

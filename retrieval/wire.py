"""One HTTP request whose time-out counts all of it, and what an answer of `/retrieve` has to look like."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from retrieval.corpus import read_contents
from retrieval.protocol import Passage

CONNECT_S = 10.0
ANSWER_BYTES = 2**30  # read at most: a server gone wrong may send for ever
UNTOLD: dict[str, Any] = {"corpus": None, "corpus_sha256": None, "rows": None}
_TOLD = {"corpus": str, "corpus_sha256": str, "rows": int}


class Wire:
    """Sends requests over connections that are kept. Any number of threads may use one."""

    def __init__(self, servers: int, timeout_s: float, token: str | None, headers: Mapping[str, str] | None = None):
        """`servers`: how many addresses will be asked; `headers`: sent with every request."""
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)  # of each read
        self._pool = urllib3.PoolManager(max(servers, 10), timeout=timeout, retries=False, maxsize=64, block=False)
        self._pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}

    def request(self, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        """The status and the body of the answer.

        Raises `OSError` saying what went wrong, uncut, `TimeoutError` among them: after `timeout_s` in all.
        """
        with _Deadline(self._timeout_s) as deadline:
            try:
                status, data = self._exchange(method, url, body)
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                if not deadline.passed:
                    raise ConnectionError(f"{type(error).__name__}: {error}") from None
        if deadline.passed:  # whatever was read by then: a body without a length may have been cut
            raise TimeoutError(f"Timeout: no whole answer in {self._timeout_s:g} s")
        return status, data

    def _exchange(self, method: str, url: str, body: bytes | None) -> tuple[int, bytes]:
        answer = self._pool.request(method, url, body=body, headers=self._headers, preload_content=False)
        try:
            data = bytearray()
            for chunk in answer.stream(2**20):
                data += chunk
                if len(data) > ANSWER_BYTES:
                    raise ValueError(f"an answer of more than {ANSWER_BYTES} bytes")
        except BaseException:
            answer.close()
            raise
        answer.release_conn()
        return answer.status, bytes(data)


class _Deadline:
    """Ends this thread's request at a moment, wherever it is.

    A socket's time-out counts from byte to byte, so that an answer may drip for ever. At the deadline another thread
    shuts the socket down, and the reading one finds its end.
    """

    of_thread = threading.local()

    def __init__(self, seconds: float):
        self.passed = self._over = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._pass)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self.of_thread.deadline = self
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # from here on the socket may be another request's
            self._over = True
        self._timer.cancel()
        self.of_thread.deadline = None

    def watch(self, used: socket.socket) -> None:
        with self._lock:
            self._socket = used
            if self.passed:
                raise TimeoutError

    def _pass(self) -> None:
        with self._lock:
            if self._over:
                return
            self.passed = True
            if self._socket is not None:
                with suppress(OSError):  # closed already
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, which is not for two threads


class _Watched:
    """Of a connection: shows its socket to the deadline of the request that it carries."""

    def connect(self) -> None:
        super().connect()
        _Deadline.of_thread.deadline.watch(self.sock)

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:  # kept from an earlier request
            _Deadline.of_thread.deadline.watch(self.sock)
        super().request(*args, **kwargs)


class _Connection(_Watched, HTTPConnection):
    pass


class _SecureConnection(_Watched, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def read_rankings(data: bytes, expected: int, k: int) -> list[list[Passage]]:
    """The passages of an answer to `expected` queries, at most `k` each. Raises `ValueError` naming what is wrong."""
    result = _field(_object(data), "result", list)
    if len(result) != expected:
        raise ValueError(f"{len(result)} rankings for {expected} queries")
    return [[_passage(row) for row in _of_type(ranking, "a ranking", list)[:k]] for ranking in result]


def read_description(data: bytes) -> dict[str, Any]:
    """What a server says of itself, see `Retriever.describe`. Raises `ValueError` naming what is wrong."""
    told = _object(data)
    return {name: None if told.get(name) is None else _field(told, name, type_) for name, type_ in _TOLD.items()}


def line(text: str) -> str:
    """`text` cut and on one line."""
    return " ".join(text[:200].split())


def _object(data: bytes) -> dict[str, Any]:
    try:
        try:
            content = orjson.loads(data)
        except orjson.JSONDecodeError:  # half surrogates, which JSON's escapes can say
            content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({line(str(error))})") from None
    return _of_type(content, "the answer", dict)


def _passage(row: Any) -> Passage:
    document = _field(_of_type(row, "a result", dict), "document", dict)
    id_ = _field(document, "id", (str, int))
    score = _field(row, "score", (int, float))
    try:
        finite = math.isfinite(score)
    except OverflowError:  # an integer beyond every float
        finite = False
    if not finite:
        raise ValueError(f"field score is {line(str(score)[:40])}, expected a finite number")
    return read_contents(str(id_), _field(document, "contents", str), float(score))


def _field(content: dict[str, Any], name: str, type_: Any) -> Any:
    if name not in content:
        raise ValueError(f"field {name} is missing")
    return _of_type(content[name], f"field {name}", type_)


def _of_type(value: Any, what: str, type_: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, type_):
        names = " or ".join(t.__name__ for t in (type_ if isinstance(type_, tuple) else (type_,)))
        raise ValueError(f"{what} is of type {type(value).__name__}, expected {names}")
    return value

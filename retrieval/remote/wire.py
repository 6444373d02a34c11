"""HTTP requests with a time-out on the complete answer, and parsing of the answers of `/retrieve` and `/info`."""

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
from retrieval.protocol import Passage, text_sha256

CONNECT_S = 10.0
ANSWER_BYTES = 2**30  # the most that is read: a faulty server may send forever
_TOLD = {"corpus": str, "corpus_sha256": str, "ranking_sha256": str, "rows": int}
NO_DESCRIPTION: dict[str, Any] = dict.fromkeys(_TOLD)


class Wire:
    """Sends requests over persistent connections. Any number of threads may use one."""

    def __init__(self, servers: int, timeout_s: float, token: str | None, headers: Mapping[str, str] | None = None):
        """`servers`: the number of addresses to contact; `headers`: sent with every request."""
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)  # `read` limits each read
        self._pool = urllib3.PoolManager(max(servers, 10), timeout=timeout, retries=False, maxsize=64, block=False)
        self._pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}

    def request(self, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        """The status and the body of the answer.

        Raises `OSError` with the full reason; `TimeoutError`, a subclass, after a total of `timeout_s`.
        """
        with _Deadline(self._timeout_s) as deadline:
            try:
                status, data = self._exchange(method, url, body)
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                if not deadline.passed:
                    raise ConnectionError(f"{type(error).__name__}: {error}") from None
        if deadline.passed:  # even if a body was read: one without a length may be truncated
            raise TimeoutError(f"Timeout: no complete answer in {self._timeout_s:g} s")
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
    """Ends this thread's request after `seconds`, at any stage.

    A socket's time-out applies to each read, so a slow answer could take forever. At the deadline a timer thread shuts
    down the socket, which ends the read.
    """

    per_thread = threading.local()

    def __init__(self, seconds: float):
        self.passed = self._over = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._pass)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self.per_thread.deadline = self
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # afterwards the socket may belong to another request
            self._over = True
        self._timer.cancel()
        self.per_thread.deadline = None

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
                with suppress(OSError):  # already closed
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # bypasses TLS, which is not thread-safe


class _Connection(HTTPConnection):
    """Passes its socket to the deadline of the current request."""

    def connect(self) -> None:
        super().connect()
        _Deadline.per_thread.deadline.watch(self.sock)

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:  # open since an earlier request
            _Deadline.per_thread.deadline.watch(self.sock)
        super().request(*args, **kwargs)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def read_rankings(data: bytes, expected: int, k: int) -> list[list[Passage]]:
    """The passages in an answer to `expected` queries, at most `k` each. Raises `ValueError` naming the fault."""
    result = _field(_object(data), "result", list)
    if len(result) != expected:
        raise ValueError(f"{len(result)} rankings for {expected} queries")
    return [[_passage(row) for row in _of_type(ranking, "a ranking", list)[:k]] for ranking in result]


def read_description(data: bytes) -> dict[str, Any]:
    """Parse an answer of /info; see `Retriever.describe`. Raises `ValueError` naming the fault."""
    content = _object(data)
    return {name: None if content.get(name) is None else _field(content, name, type_) for name, type_ in _TOLD.items()}


def line(text: str) -> str:
    """The first 200 characters of `text` on one line."""
    return " ".join(text[:200].split())


def _object(data: bytes) -> dict[str, Any]:
    try:
        try:
            content = orjson.loads(data)
        except orjson.JSONDecodeError:  # escaped lone surrogates, which orjson refuses
            content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({line(str(error))})") from None
    return _of_type(content, "the answer", dict)


def _passage(row: Any) -> Passage:
    document = _field(_of_type(row, "a result", dict), "document", dict)
    contents = _field(document, "contents", str)
    # The servers of Search-R1 that ask a search engine on the web send neither id nor score.
    id_ = _field(document, "id", (str, int)) if "id" in document else text_sha256(contents)
    score = _field(row, "score", (int, float)) if "score" in row else 0.0
    try:
        finite = math.isfinite(score)
    except OverflowError:  # an integer too large for a float
        finite = False
    if not finite:
        raise ValueError(f"field score is {line(str(score)[:40])}, expected a finite number")
    return read_contents(str(id_), contents, float(score))


def _field(content: dict[str, Any], name: str, type_: Any) -> Any:
    if name not in content:
        raise ValueError(f"field {name} is missing")
    return _of_type(content[name], f"field {name}", type_)


def _of_type(value: Any, what: str, type_: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, type_):
        names = " or ".join(t.__name__ for t in (type_ if isinstance(type_, tuple) else (type_,)))
        raise ValueError(f"{what} is of type {type(value).__name__}, expected {names}")
    return value

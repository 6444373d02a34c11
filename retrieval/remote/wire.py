"""HTTP requests with a time-out on the complete answer, and parsing of the answers of `/retrieve` and `/info`."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import urllib3

from retrieval.corpus import read_contents
from retrieval.protocol import Passage, text_sha256

CONNECT_S = 10.0
ANSWER_BYTES = 2**30  # the most that is received: a faulty server may send forever
DESCRIPTION_FIELDS = {"corpus": str, "corpus_sha256": str, "ranking_sha256": str, "rows": int}
NO_DESCRIPTION: dict[str, Any] = dict.fromkeys(DESCRIPTION_FIELDS)


class Wire:
    """Sends requests over persistent connections. Any number of threads may use one."""

    def __init__(self, servers: int, timeout_s: float, token: str | None):
        """`servers`: the number of addresses to contact."""
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)  # `read` limits each read
        self._pool = urllib3.PoolManager(max(servers, 10), timeout=timeout, retries=False, maxsize=64)

    def request(self, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        """The status and the body of the answer.

        Raises `OSError` with the full reason; `TimeoutError`, a subclass, if the body is not complete after
        `timeout_s`, noticed at the next bytes or after as long without any.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            answer = self._pool.request(method, url, body=body, headers=self._headers, preload_content=False)
            data = bytearray()
            try:
                while chunk := answer.read1(2**20):
                    data += chunk
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    if len(data) > ANSWER_BYTES:
                        raise ValueError(f"an answer of more than {ANSWER_BYTES} bytes")
            except BaseException:
                answer.close()
                raise
            answer.release_conn()
        except (TimeoutError, urllib3.exceptions.ReadTimeoutError):
            raise TimeoutError(f"Timeout: no complete answer in {self._timeout_s:g} s") from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from None
        return answer.status, bytes(data)


def read_rankings(data: bytes, expected: int, k: int) -> list[list[Passage]]:
    """The passages in an answer to `expected` queries, at most `k` each. Raises `ValueError` naming the fault."""
    result = _field(_object(data), "result", list)
    if len(result) != expected:
        raise ValueError(f"{len(result)} rankings for {expected} queries")
    return [[_passage(row) for row in _of_type(ranking, "a ranking", list)[:k]] for ranking in result]


def read_description(data: bytes) -> dict[str, Any]:
    """Parse an answer of /info; see `Retriever.describe`. Raises `ValueError` naming the fault."""
    content = _object(data)
    return {
        name: None if content.get(name) is None else _field(content, name, type_)
        for name, type_ in DESCRIPTION_FIELDS.items()
    }


def first_line(text: str) -> str:
    """The first 200 characters of `text` on one line."""
    return " ".join(text[:200].split())


def _object(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({first_line(str(error))})") from None
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
        raise ValueError(f"field score is {first_line(str(score)[:40])}, expected a finite number")
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

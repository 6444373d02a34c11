"""HTTP requests with a time-out on the complete answer, and parsing of the answers of `/retrieve` and `/info`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import urllib3
from pydantic import BaseModel, BeforeValidator, ConfigDict, FiniteFloat, ValidationError

from retrieval.corpus import read_contents
from retrieval.protocol import Passage, as_utf8, text_sha256

CONNECT_S = 10.0
ANSWER_BYTES = 2**30  # the most that is received: a faulty server may send forever
# Half of a surrogate pair, which JSON can contain but pydantic refuses, becomes a question mark.
Text = Annotated[str, BeforeValidator(lambda value: as_utf8(value) if isinstance(value, str) else value)]


class Strict(BaseModel):
    """Converts no values to other types."""

    model_config = ConfigDict(strict=True)


class Document(Strict):
    """A passage: its title in quotes on the first line, then its text.

    The servers of Search-R1 that ask a search engine on the web send neither id nor score.
    """

    contents: Text
    id: Text | int | None = None


class Result(Strict):
    """A document with its score."""

    document: Document
    score: FiniteFloat = 0.0


class Answer(Strict):
    """The answer of /retrieve: a ranking per query."""

    result: list[list[Result]]


class Description(Strict):
    """The answer of /info; see `Retriever.describe`. Servers of other projects have none."""

    corpus: Text | None = None
    corpus_sha256: Text | None = None
    ranking_sha256: Text | None = None
    rows: int | None = None


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
    result = _parse(Answer, data).result
    if len(result) != expected:
        raise ValueError(f"{len(result)} rankings for {expected} queries")
    return [[_to_passage(row) for row in ranking[:k]] for ranking in result]


def read_description(data: bytes) -> dict[str, Any]:
    """Parse an answer of /info; see `Retriever.describe`. Raises `ValueError` naming the fault."""
    return _parse(Description, data).model_dump()


def first_line(text: str) -> str:
    """The first 200 characters of `text` on one line."""
    return " ".join(text[:200].split())


def _parse(model: Any, data: bytes) -> Any:
    try:
        return model.model_validate(json.loads(data))
    except ValidationError as errors:
        error = errors.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, error["loc"])) or "the answer"
        raise ValueError(f"field {field}: {error['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({first_line(str(error))})") from None


def _to_passage(row: Result) -> Passage:
    document = row.document
    id_ = text_sha256(document.contents) if document.id is None else str(document.id)
    return read_contents(id_, document.contents, row.score)

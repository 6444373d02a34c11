"""Retrievers behind Search-R1's `/retrieve`: replicas in turn, patience while all fail, one named error at the end."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3

from retrieval.corpus import read_contents
from retrieval.protocol import Passage, RetrievalError, Retriever

log = logging.getLogger("retrieval")
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
# Half of what the server takes in one request.
QUERIES_PER_REQUEST, BYTES_PER_REQUEST = 2048, 2 * 2**20
QUERY_CHARS = 8192  # what the server takes; a policy may write anything, and a longer query must not end its run
CONNECT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 15.0


class HttpRetriever:
    """Implements `Retriever` over HTTP. Any number of threads may use one."""

    def __init__(
        self, urls: str | Sequence[str], timeout_s: float = 60.0, patience_s: float = 300.0, token: str | None = None
    ):
        """Name the servers; nothing is sent yet.

        Args:
          urls: of replicas of one index, like http://127.0.0.1:8000/retrieve; when one fails the next is asked.
          timeout_s: for an answer.
          patience_s: how long one search may go on failing, with longer and longer waits, before it is given up.
          token: sent as a bearer token.
        """
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        self._current = 0  # the replica that answered last
        self._patience_s = patience_s
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)
        self._pool = urllib3.PoolManager(timeout=timeout, retries=False, maxsize=64, block=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most `k` passages per query, best first; an empty query gives an empty list and is not sent.

        Raises:
          RetrievalError: refused, or no server answered in time and in form for `patience_s`.
        """
        cleaned = [" ".join(query.split())[:QUERY_CHARS] for query in queries]
        sent = list(dict.fromkeys(filter(None, cleaned)))
        found: dict[str, list[Passage]] = {}
        for part in _requests(sent):
            found |= zip(part, self._ask(part, k), strict=True)
        return [list(found.get(query, ())) for query in cleaned]

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`. Raises `RetrievalError` when no replica answers, or when two differ."""
        answers, cause = [], ""
        for url in self._urls:
            about = url.rsplit("/", 1)[0] + "/info"
            try:
                answer = self._pool.request("GET", about, headers=self._headers)
                if answer.status in (404, 405, 501):  # another project's server
                    answers.append(UNKNOWN)
                elif answer.status == 200:
                    told = json.loads(answer.data)
                    answers.append({name: told[name] for name in UNKNOWN})
                else:
                    cause = f"{about}: status {answer.status} ({_line(answer.data)})"
            except (urllib3.exceptions.HTTPError, ValueError, TypeError, KeyError, RecursionError) as error:
                cause = f"{about}: {type(error).__name__}: {_line(str(error).encode())}"
        if not answers:
            raise RetrievalError(cause)
        for other in answers[1:]:
            if other != answers[0]:
                raise RetrievalError(f"{', '.join(self._urls)}: replicas of different corpora: {answers[0]}, {other}")
        return answers[0]

    def _ask(self, queries: list[str], k: int) -> list[list[Passage]]:
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True})
        failures, deadline = 0, 0.0
        while True:
            url = self._urls[self._current]
            try:
                answer = self._pool.request("POST", url, body=body, headers=self._headers)
                if answer.status == 200:
                    passages = _read(answer.data, len(queries), k)
                    if failures:
                        log.warning("%s answers; going on", url)
                    return passages
                cause = f"status {answer.status} ({_line(answer.data)})"
                if answer.status not in RETRIED_STATUS:
                    raise RetrievalError(f"{url}: refused with {cause}")
            except urllib3.exceptions.HTTPError as error:
                cause = f"{type(error).__name__}: {_line(str(error).encode())}"
            except ValueError as error:
                cause = f"not an answer of the /retrieve form: {error}"
            if not failures:
                deadline = time.monotonic() + self._patience_s
                log.warning("%s: %s; trying for up to %.0f s", url, cause, self._patience_s)
            failures += 1
            self._current = (self._current + 1) % len(self._urls)
            left = deadline - time.monotonic()
            if left <= 0:
                raise RetrievalError(f"{', '.join(self._urls)}: no answer in {self._patience_s:.0f} s; last: {cause}")
            rounds, position = divmod(failures, len(self._urls))
            if (
                position == 0
            ):  # all replicas failed: wait; a random share, so that many clients do not come back as one
                time.sleep(min(left, random.random() * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(rounds, 10))))


UNKNOWN: dict[str, Any] = {"corpus": None, "corpus_sha256": None, "rows": None}


class ShardedRetriever:
    """Implements `Retriever` over parts of one corpus, each behind a retriever of its own, merged by score."""

    def __init__(self, parts: Iterable[Retriever]):
        """`parts` in the order of the corpus: at equal scores the earlier part comes first."""
        self._parts = list(parts)
        self._threads = ThreadPoolExecutor(len(self._parts))

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `Retriever.search`; the parts are asked at the same time."""
        answers = list(self._threads.map(lambda part: part.search(queries, k), self._parts))
        merged = []
        for rankings in zip(*answers, strict=True):
            passages = [passage for ranking in rankings for passage in ranking]
            merged.append(sorted(passages, key=lambda passage: -passage.score)[:k])  # stable: ties keep their order
        return merged

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`: names and digests of all parts, separated by "|", and the sum of rows."""
        parts = [part.describe() for part in self._parts]

        def joined(name: str) -> str | None:
            values = [part[name] for part in parts]
            return None if None in values else "|".join(values)

        rows = [part["rows"] for part in parts]
        total = None if None in rows else sum(rows)
        return {"corpus": joined("corpus"), "corpus_sha256": joined("corpus_sha256"), "rows": total}


def connect(addresses: str, timeout_s: float = 60.0, patience_s: float = 300.0, token: str | None = None) -> Retriever:
    """The retriever behind `addresses`: "," separates replicas of one index, "|" the parts of a sharded corpus."""
    parts = [
        HttpRetriever([url.strip() for url in part.split(",")], timeout_s, patience_s, token)
        for part in addresses.split("|")
    ]
    return parts[0] if len(parts) == 1 else ShardedRetriever(parts)


def _requests(queries: Sequence[str]) -> Iterator[list[str]]:
    """Cut into requests that a server accepts."""
    part: list[str] = []
    size = 0
    for query in queries:
        needed = len(json.dumps(query))
        if part and (len(part) == QUERIES_PER_REQUEST or size + needed > BYTES_PER_REQUEST):
            yield part
            part, size = [], 0
        part.append(query)
        size += needed
    if part:
        yield part


def _read(data: bytes, expected: int, k: int) -> list[list[Passage]]:
    """The rankings of an answer. Raises `ValueError` when it is of another form."""
    try:
        rankings = [[_passage(row) for row in ranking][:k] for ranking in json.loads(data)["result"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if len(rankings) != expected:
        raise ValueError(f"{len(rankings)} rankings for {expected} queries")
    return rankings


def _passage(row: dict[str, Any]) -> Passage:
    document = row["document"]
    return read_contents(str(document["id"]), document["contents"], float(row["score"]))


def _line(data: bytes) -> str:
    return " ".join(data[:200].decode("utf-8", "replace").split())

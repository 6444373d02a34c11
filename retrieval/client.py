"""Retrievers behind Search-R1's `/retrieve`: load over replicas, patience while all fail, one error at the end."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from retrieval.protocol import Passage, RetrievalError, Retriever
from retrieval.wire import UNTOLD, Wire, line, read_description, read_rankings

log = logging.getLogger("retrieval")
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
WITHOUT_INFO = (400, 404, 405, 501)  # what a server of another project answers to GET /info
# Half of what this project's server takes in one request, and all the passages that it gives in one answer.
QUERIES_PER_REQUEST, BYTES_PER_REQUEST, ROWS_PER_REQUEST = 2048, 2 * 2**20, 65_536
LEAST_SHARE = 32  # queries: a batch is not cut finer for the sake of another replica
QUERY_CHARS = 8192  # what the server takes; a policy may write anything, and a longer query must not end its run
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 15.0
LONGEST_REST_S = 120.0  # of a replica that goes on failing while others answer
T = TypeVar("T")


@dataclass(eq=False)
class Replica:
    """One address, and what this client knows of it."""

    url: str
    load: int = 0  # queries that it is answering for this client
    failures: int = 0  # in a row
    rests_until: float = 0.0  # by the monotonic clock: not asked before, as long as another one is up
    # At first a random number below 0: clients that start together do not all begin with the same replica.
    last_asked: float = field(default_factory=lambda: -random.random())

    @property
    def info(self) -> str:
        return self.url.rsplit("/", 1)[0] + "/info"


class HttpRetriever:
    """Implements `Retriever` over HTTP. Any number of threads may use one."""

    def __init__(
        self, urls: str | Sequence[str], timeout_s: float = 60.0, patience_s: float = 300.0, token: str | None = None
    ):
        """Name the servers; nothing is sent yet.

        Args:
          urls: of replicas of one index, like http://127.0.0.1:8000/retrieve. A batch is cut into a share for each; a
            share goes to the one with the least to do, and to the next one when that fails.
          timeout_s: for a whole answer.
          patience_s: how long one search may go on failing, with longer and longer waits, before it is given up.
          token: sent as a bearer token.
        """
        self._replicas = [Replica(url) for url in ([urls] if isinstance(urls, str) else urls)]
        self._lock = threading.Lock()  # of what is known of the replicas
        self._patience_s = patience_s
        self._wire = Wire(len(self._replicas), timeout_s, token)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most `k` passages per query, best first; an empty query gives an empty list and is not sent.

        Raises:
          RetrievalError: refused, or no server answered in time and in form for `patience_s`.
        """
        cleaned = [" ".join(query.split())[:QUERY_CHARS] for query in queries]
        sent = list(dict.fromkeys(filter(None, cleaned)))
        share = max(LEAST_SHARE, -(-len(sent) // len(self._replicas)))
        parts = list(_requests(sent, min(QUERIES_PER_REQUEST, max(1, ROWS_PER_REQUEST // max(1, k)), share)))
        given_up = threading.Event()
        workers = min(len(parts), len(self._replicas))
        if workers > 1:
            pool = ThreadPoolExecutor(workers)
            try:
                answers = list(pool.map(lambda part: self._ask(part, k, given_up), parts))
            finally:
                given_up.set()  # when one part failed for good, the others are not waited for
                pool.shutdown(wait=False, cancel_futures=True)
        else:
            answers = [self._ask(part, k, given_up) for part in parts]
        found = {
            query: ranking
            for part, answer in zip(parts, answers, strict=True)
            for query, ranking in zip(part, answer, strict=True)
        }
        return [list(found.get(query, ())) for query in cleaned]

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`. Raises `RetrievalError` also when two replicas hold different corpora."""

        def ask(replica: Replica) -> dict[str, Any]:
            status, data = self._wire.request("GET", replica.info)
            if status in WITHOUT_INFO:
                return UNTOLD
            _refuse(replica.info, status, data)
            return read_description(data)

        told = self._patiently(ask, 1, threading.Event())
        for replica in self._replicas:
            try:
                other = ask(replica)
            except (OSError, ValueError):
                continue  # it is down, and will be told apart when it is up and asked
            if other != told:
                raise RetrievalError(f"{self._urls()}: replicas of different corpora: {told} and {other}")
        return dict(told)

    def _ask(self, queries: list[str], k: int, given_up: threading.Event) -> list[list[Passage]]:
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()

        def ask(replica: Replica) -> list[list[Passage]]:
            status, data = self._wire.request("POST", replica.url, body)
            _refuse(replica.url, status, data)
            try:
                return read_rankings(data, len(queries), k)
            except ValueError as error:
                raise ValueError(f"not an answer of the /retrieve form: {error}") from None

        return self._patiently(ask, len(queries), given_up)

    def _patiently(self, ask: Callable[[Replica], T], size: int, given_up: threading.Event) -> T:
        """What `ask` gets from one replica or another, which it loads with `size` queries.

        A failure is an `OSError` or a `ValueError`. Raises `RetrievalError` after `patience_s` of them.
        """
        failures = waits = 0
        deadline = 0.0
        while True:
            replica = self._take(size, waiting=failures == 0)
            if replica is None:  # all rest: wait; a random share, so that many clients do not come back as one
                waits += 1
                pause = random.random() * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(waits, 10))
                given_up.wait(min(pause, max(0.0, deadline - time.monotonic())))
                replica = self._take(size, waiting=True)
            try:
                answer = ask(replica)
            except (OSError, ValueError) as error:
                self._give(replica, size, failed=True)
                cause = f"{replica.url}: {line(str(error))}"
            except BaseException:
                self._give(replica, size, failed=False)
                raise
            else:
                self._give(replica, size, failed=False)
                if failures:
                    log.warning("%s answers; going on", replica.url)
                return answer
            if not failures:
                deadline = time.monotonic() + self._patience_s
                log.warning("%s; trying for up to %.0f s", cause, self._patience_s)
            failures += 1
            if given_up.is_set() or time.monotonic() >= deadline:
                raise RetrievalError(f"{self._urls()}: no answer in {self._patience_s:.0f} s; last: {cause}")

    def _take(self, size: int, waiting: bool) -> Replica | None:
        """The replica with the least to do, and of those the one asked longest ago; None when all rest.

        With `waiting` it is then the one whose rest ends first.
        """
        with self._lock:
            now = time.monotonic()
            awake = [replica for replica in self._replicas if replica.rests_until <= now]
            if not awake and not waiting:
                return None
            if awake:
                taken = min(awake, key=lambda replica: (replica.load, replica.last_asked))
            else:
                taken = min(self._replicas, key=lambda replica: replica.rests_until)
            taken.load += size
            taken.last_asked = now
            return taken

    def _give(self, replica: Replica, size: int, failed: bool) -> None:
        with self._lock:
            replica.load -= size
            if not failed:
                replica.failures, replica.rests_until = 0, 0.0
                return
            replica.failures += 1
            rest = min(LONGEST_REST_S, FIRST_WAIT_S * 2 ** min(replica.failures, 20))
            replica.rests_until = time.monotonic() + rest

    def _urls(self) -> str:
        return ", ".join(replica.url for replica in self._replicas)


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


def _requests(queries: Sequence[str], most: int) -> Iterator[list[str]]:
    """Cut into requests that a server accepts, of at most `most` queries."""
    part: list[str] = []
    size = 0
    for query in queries:
        needed = len(json.dumps(query))
        if part and (len(part) == most or size + needed > BYTES_PER_REQUEST):
            yield part
            part, size = [], 0
        part.append(query)
        size += needed
    if part:
        yield part


def _refuse(url: str, status: int, data: bytes) -> None:
    """Raise `OSError` for a status that may pass, `RetrievalError` for one that will not."""
    if status != 200:
        cause = f"status {status} ({line(data[:800].decode('utf-8', 'replace'))})"
        raise OSError(cause) if status in RETRIED_STATUS else RetrievalError(f"{url}: refused with {cause}")

"""Clients of Search-R1's `/retrieve`: balance load over replicas, retry while all fail, and end in one error."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from retrieval.protocol import Passage, RetrievalError, Retriever, in_background
from retrieval.remote.wire import NO_DESCRIPTION, Wire, line, read_description, read_rankings

log = logging.getLogger("retrieval")
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
WITHOUT_INFO = (400, 404, 405, 501)  # what servers of other projects answer to GET /info
# Half of the queries and bytes that this project's server accepts per request, and all the passages it returns.
QUERIES_PER_REQUEST, BYTES_PER_REQUEST, ROWS_PER_REQUEST = 2048, 2 * 2**20, 65_536
LEAST_SHARE = 32  # queries: a batch is not split into smaller requests to use more replicas
QUERY_CHARS = 8192  # the server's limit; longer queries are cut, because a policy may write any length
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 15.0
LONGEST_REST_S = 120.0  # of a replica that keeps failing while others answer
T = TypeVar("T")


@dataclass(eq=False)
class Replica:
    """One address and its state as seen by this client."""

    url: str
    load: int = 0  # queries in flight from this client
    failures: int = 0  # in a row
    rests_until: float = 0.0  # monotonic clock: not asked before that time while another replica is up
    # Starts as a random negative number, so that clients that start together begin with different replicas.
    last_asked: float = field(default_factory=lambda: -random.random())

    @property
    def info(self) -> str:
        return self.url.rsplit("/", 1)[0] + "/info"


class HttpRetriever:
    """Implements `Retriever` over HTTP. Any number of threads may use one."""

    def __init__(
        self,
        urls: str | Sequence[str],
        timeout_s: float = 60.0,
        retry_deadline_s: float = 300.0,
        token: str | None = None,
    ):
        """Send nothing yet.

        Args:
          urls: replicas of one index, like http://127.0.0.1:8000/retrieve. A batch is split over the replicas. Each
            part goes to the replica with the lowest load, and to the next one when that fails.
          timeout_s: for a complete answer.
          retry_deadline_s: how long one search is retried, with increasing waits, before it fails.
          token: sent as a bearer token.
        """
        self._replicas = [Replica(url) for url in ([urls] if isinstance(urls, str) else urls)]
        self._lock = threading.Lock()  # guards the state of the replicas
        self._retry_deadline_s = retry_deadline_s
        self._wire = Wire(len(self._replicas), timeout_s, token)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most `k` passages per query, best first; an empty query gives an empty list and is not sent.

        Raises:
          RetrievalError: a server refused, or none gave a valid answer for `retry_deadline_s`.
        """
        cleaned = [" ".join(query.split())[:QUERY_CHARS] for query in queries]
        sent = list(dict.fromkeys(filter(None, cleaned)))
        share = max(LEAST_SHARE, -(-len(sent) // len(self._replicas)))
        parts = list(_requests(sent, min(QUERIES_PER_REQUEST, max(1, ROWS_PER_REQUEST // max(1, k)), share)))
        given_up = threading.Event()
        waiting = iter(enumerate(parts))
        answers: list[list[list[Passage]]] = [[] for _ in parts]

        def work() -> None:
            while not given_up.is_set():
                with self._lock:
                    place, part = next(waiting, (-1, []))
                if place < 0:
                    return
                answers[place] = self._ask(part, k, given_up)

        try:
            _all_at_once([work] * min(len(parts), len(self._replicas)))
        finally:
            given_up.set()  # when one part failed for good, do not wait for the others
        rankings = {
            query: ranking
            for part, answer in zip(parts, answers, strict=True)
            for query, ranking in zip(part, answer, strict=True)
        }
        return [list(rankings.get(query, ())) for query in cleaned]

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`. Also raises `RetrievalError` when two replicas rank or contain other passages."""

        def ask(replica: Replica) -> dict[str, Any]:
            status, data = self._wire.request("GET", replica.info)
            if status in WITHOUT_INFO:
                return NO_DESCRIPTION
            _refuse(replica.info, status, data)
            return read_description(data)

        description = self._patiently(ask, 1, threading.Event())
        for replica in self._replicas:
            try:
                other = ask(replica)
            except (OSError, ValueError):
                continue  # it is down; it is compared at the next call when it is up
            differing = [name for name in description if name != "corpus" and other[name] != description[name]]
            if differing:  # directories may have any name
                contents = " and ".join(str({name: one[name] for name in differing}) for one in (description, other))
                raise RetrievalError(f"{self._urls()}: these are not replicas of one index: {contents}")
        return dict(description)

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
        """Call `ask` with one replica after another until it succeeds; each call adds a load of `size` queries.

        `OSError` and `ValueError` are retried. Raises `RetrievalError` after `retry_deadline_s` of failures, but not
        before every replica has been tried.
        """
        failures = waits = 0
        deadline = 0.0
        while True:
            if failures and self._all_rest():  # wait a random time, so that many clients do not return at once
                waits += 1
                pause = random.random() * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(waits, 10))
                given_up.wait(min(pause, max(0.0, deadline - time.monotonic())))
            replica = self._take(size)
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
                    log.warning("%s answers again; continuing", replica.url)
                return answer
            if not failures:
                deadline = time.monotonic() + self._retry_deadline_s
                log.warning("%s; retrying for up to %.0f s", cause, self._retry_deadline_s)
            failures += 1
            if given_up.is_set() or (time.monotonic() >= deadline and failures >= len(self._replicas)):
                seconds = self._retry_deadline_s
                raise RetrievalError(f"{self._urls()}: no answer in {seconds:.0f} s of retries; last: {cause}")

    def _all_rest(self) -> bool:
        with self._lock:
            now = time.monotonic()
            return all(replica.rests_until > now for replica in self._replicas)

    def _take(self, size: int) -> Replica:
        """Take the replica whose rest ends first; of those that do not rest, the one with the lowest load.

        Among equals it is the one asked longest ago.
        """
        with self._lock:
            now = time.monotonic()
            taken = min(self._replicas, key=lambda r: (max(0.0, r.rests_until - now), r.load, r.last_asked))
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
    """Implements `Retriever` over the parts of one corpus, each served by its own retriever, merged by score."""

    def __init__(self, parts: Iterable[Retriever]):
        """`parts` in the order of the corpus: at equal scores the earlier part comes first."""
        self._parts = list(parts)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `Retriever.search`; the parts are searched concurrently."""
        answers = _all_at_once([partial(part.search, queries, k) for part in self._parts])
        merged = []
        for rankings in zip(*answers, strict=True):
            passages = [passage for ranking in rankings for passage in ranking]
            merged.append(sorted(passages, key=lambda passage: -passage.score)[:k])  # stable: ties keep their order
        return merged

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`: names and digests of all parts joined by "|", and the total of rows."""
        parts = [part.describe() for part in self._parts]

        def joined(name: str) -> str | None:
            values = [part[name] for part in parts]
            return None if None in values else "|".join(values)

        rows = [part["rows"] for part in parts]
        total = None if None in rows else sum(rows)
        return {name: joined(name) for name in ("corpus", "corpus_sha256", "ranking_sha256")} | {"rows": total}


def connect(
    addresses: str, timeout_s: float = 60.0, retry_deadline_s: float = 300.0, token: str | None = None
) -> Retriever:
    """The retriever served at `addresses`: "," separates replicas of one index, "|" parts of a sharded corpus."""
    parts = [
        HttpRetriever([url.strip() for url in part.split(",")], timeout_s, retry_deadline_s, token)
        for part in addresses.split("|")
    ]
    return parts[0] if len(parts) == 1 else ShardedRetriever(parts)


def _all_at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of concurrent calls; the first error is raised without waiting for the others.

    The threads are daemons: a program can exit while a server does not answer.
    """
    if len(calls) == 1:
        return [calls[0]()]
    futures = [in_background(call) for call in calls]
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()
    return [future.result() for future in futures]


def _requests(queries: Sequence[str], most: int) -> Iterator[list[str]]:
    """Split into requests that a server accepts, of at most `most` queries."""
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
    """Raise `OSError` for a status worth a retry, `RetrievalError` for any other but 200."""
    if status != 200:
        cause = f"status {status} ({line(data[:800].decode('utf-8', 'replace'))})"
        raise OSError(cause) if status in RETRIED_STATUS else RetrievalError(f"{url}: refused with {cause}")

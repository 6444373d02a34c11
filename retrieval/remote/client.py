"""A client of Search-R1's `/retrieve`: it balances load over replicas, and retries while all of them fail."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import tenacity

from retrieval.protocol import Passage, RetrievalError, as_utf8, in_background
from retrieval.remote.wire import Description, Wire, first_line, read_description, read_rankings

log = logging.getLogger("retrieval")
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
WITHOUT_INFO = (400, 404, 405, 501)  # what servers of other projects answer to GET /info
# Half of the queries and bytes that this project's server accepts per request, and all the passages it returns.
QUERIES_PER_REQUEST, BYTES_PER_REQUEST, ROWS_PER_REQUEST = 2048, 2 * 2**20, 65_536
MIN_QUERIES_PER_REPLICA = 32  # a batch is not split into smaller requests to use more replicas
QUERY_CHARS = 8192  # the server's limit; longer queries are cut, because a policy may write any length
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 15.0
LONGEST_REST_S = 120.0  # of a replica that keeps failing while others answer
T = TypeVar("T")


@dataclass(eq=False)
class Replica:
    """One address, and its failures as seen by this client."""

    url: str
    failures: int = 0  # in a row
    rests_until: float = 0.0  # monotonic clock: asked last before that time


class HttpRetriever:
    """Implements `Retriever` over HTTP. Any number of threads may use one."""

    def __init__(self, urls: str, timeout_s: float = 60.0, retry_deadline_s: float = 300.0, token: str | None = None):
        """Send nothing yet.

        Args:
          urls: replicas of one index, like http://127.0.0.1:8000/retrieve, separated by commas. A batch is split over
            the replicas. Each part goes to the next one in turn, and to another when that fails.
          timeout_s: for a complete answer.
          retry_deadline_s: how long one search is retried, with increasing waits, before it fails.
          token: sent as a bearer token.
        """
        self._replicas = [Replica(url.strip()) for url in urls.split(",")]
        self._urls = ", ".join(replica.url for replica in self._replicas)
        self._lock = threading.Lock()  # guards the state of the replicas and `_turns`
        # Random, so that clients that start together begin with different replicas.
        self._turns = random.randrange(len(self._replicas))
        self._retry_deadline_s = retry_deadline_s
        self._wire = Wire(len(self._replicas), timeout_s, token)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most `k` passages per query, best first; an empty query gives an empty list and is not sent.

        Raises:
          RetrievalError: a server refused, or none gave a valid answer for `retry_deadline_s`.
        """
        cleaned = [" ".join(as_utf8(query).split())[:QUERY_CHARS] for query in queries]
        sent = list(dict.fromkeys(filter(None, cleaned)))
        share = max(MIN_QUERIES_PER_REPLICA, -(-len(sent) // len(self._replicas)))
        parts = list(_split_requests(sent, min(QUERIES_PER_REQUEST, max(1, ROWS_PER_REQUEST // max(1, k)), share)))
        given_up = threading.Event()
        remaining = iter(enumerate(parts))
        answers: list[list[list[Passage]]] = [[] for _ in parts]

        def work() -> None:
            while not given_up.is_set():
                with self._lock:
                    number, part = next(remaining, (-1, []))
                if number < 0:
                    return
                answers[number] = self._search(part, k, given_up)

        workers = [in_background(work) for _ in self._replicas[: len(parts)]]  # daemons: the program may exit
        try:
            for future in wait(workers, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            given_up.set()  # when one part failed for good, do not wait for the others
        received = [ranking for answer in answers for ranking in answer]
        rankings = dict(zip(sent, received, strict=True))
        return [list(rankings.get(query, ())) for query in cleaned]

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`. Also raises `RetrievalError` when two replicas rank or contain other passages."""

        def ask(url: str) -> dict[str, Any]:
            info = url.rsplit("/", 1)[0] + "/info"
            status, data = self._wire.request("GET", info)
            if status in WITHOUT_INFO:
                return Description().model_dump()
            _check_status(info, status, data)
            return read_description(data)

        description = self._ask_with_retries(ask, threading.Event())
        for replica in self._replicas:
            try:
                other = ask(replica.url)
            except (OSError, ValueError):
                continue  # it is down; it is compared at the next call when it is up
            differing = [name for name in description if name != "corpus" and other[name] != description[name]]
            if differing:  # directories may have any name
                contents = " and ".join(str({name: d[name] for name in differing}) for d in (description, other))
                raise RetrievalError(f"{self._urls}: these are not replicas of one index: {contents}")
        return dict(description)

    def _search(self, queries: list[str], k: int, given_up: threading.Event) -> list[list[Passage]]:
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()

        def ask(url: str) -> list[list[Passage]]:
            status, data = self._wire.request("POST", url, body)
            _check_status(url, status, data)
            try:
                return read_rankings(data, len(queries), k)
            except ValueError as error:
                raise ValueError(f"not an answer of the /retrieve form: {error}") from None

        return self._ask_with_retries(ask, given_up)

    def _ask_with_retries(self, ask: Callable[[str], T], given_up: threading.Event) -> T:
        """Call `ask` with the address of one replica after another until it succeeds, with waits after a full round.

        `OSError` and `ValueError` are retried. Raises `RetrievalError` after `retry_deadline_s` of failures.
        """

        def log_failure(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                log.warning("%s; retrying for up to %.0f s", state.outcome.exception(), self._retry_deadline_s)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(OSError),
            # A random time, so that many clients do not return at once.
            wait=tenacity.wait_random_exponential(FIRST_WAIT_S, LONGEST_WAIT_S),
            stop=tenacity.stop_any(
                tenacity.stop_before_delay(self._retry_deadline_s), tenacity.stop_when_event_set(given_up)
            ),
            sleep=tenacity.sleep_using_event(given_up),
            before_sleep=log_failure,
            reraise=True,
        )
        try:
            answer = retrying(lambda: self._ask_each(ask))
        except OSError as error:
            seconds = self._retry_deadline_s
            raise RetrievalError(f"{self._urls}: no answer in {seconds:.0f} s of retries; last: {error}") from None
        if retrying.statistics["attempt_number"] > 1:
            log.warning("%s: answers again; continuing", self._urls)
        return answer

    def _ask_each(self, ask: Callable[[str], T]) -> T:
        """The answer of the first replica that gives one. Raises the error of the last if none does."""
        error: Exception = OSError("no replica")
        for replica in self._order_replicas():
            try:
                answer = ask(replica.url)
            except (OSError, ValueError) as reason:
                error = OSError(f"{replica.url}: {first_line(str(reason))}")
                replica.failures += 1
                rest = min(LONGEST_REST_S, FIRST_WAIT_S * 2 ** min(replica.failures, 20))
                replica.rests_until = time.monotonic() + rest
            else:
                replica.failures, replica.rests_until = 0, 0.0
                return answer
        raise error from None

    def _order_replicas(self) -> list[Replica]:
        """All replicas: in turn, those last that rest after a failure."""
        with self._lock:
            self._turns = (self._turns + 1) % len(self._replicas)
            in_turn = self._replicas[self._turns :] + self._replicas[: self._turns]
            now = time.monotonic()
            return sorted(in_turn, key=lambda replica: max(0.0, replica.rests_until - now))


def _split_requests(queries: Sequence[str], most: int) -> Iterator[list[str]]:
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


def _check_status(url: str, status: int, data: bytes) -> None:
    """Raise `OSError` for a status worth a retry, `RetrievalError` for any other but 200."""
    if status != 200:
        cause = f"status {status} ({first_line(data[:800].decode('utf-8', 'replace'))})"
        raise OSError(cause) if status in RETRIED_STATUS else RetrievalError(f"{url}: refused with {cause}")

"""Batches the calls of many clients: the calls that arrive during one search form the next one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retrieval.protocol import Passage, RetrievalError, Retriever

log = logging.getLogger("retrieval")
RETRY_S = 10.0  # after a batch fails, its calls are searched one by one for at most this long; others wait
PROBE_S = 10.0
STUCK_S = 300.0
FAILED = "the search failed; the server's log says why"  # sent to clients: the cause may contain paths and texts


@dataclass(eq=False)
class Call:
    """One client's queries and the future of its answer, which is cancelled when the client stops waiting."""

    queries: list[str]
    k: int
    answer: asyncio.Future[list[list[Passage]]]


class Batcher:
    """Searches in its own thread, one batch at a time."""

    def __init__(self, retriever: Retriever, most_queries: int, observe: Callable[[int], None] = lambda _: None):
        """`observe` is called with the number of queries of each search."""
        self._retriever, self._most, self._observe = retriever, most_queries, observe
        self._thread = ThreadPoolExecutor(1, "search")
        self._waiting: list[Call] = []
        self._arrived = asyncio.Event()
        self._failing = False  # no call of the last batch could be answered
        self._started: float | None = None  # the running search's start
        self._probe: asyncio.Task[bool] | None = None
        self._probes = itertools.count()

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Wait for the next search and return this call's results. A call cancelled before that is not searched.

        Raises `RetrievalError` when the batch fails and the search for this call on its own fails or is not tried.
        """
        call = Call(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrived.set()
        return await call.answer

    async def run(self) -> None:
        """Search for the waiting calls, forever."""
        while True:
            await self._arrived.wait()
            calls = self._take()
            for k in sorted({call.k for call in calls}):  # the candidates of a search may depend on k
                await self._answer([call for call in calls if call.k == k], k)

    @property
    def busy(self) -> bool:
        """Whether a search is running, even if no client waits for it."""
        return self._started is not None

    async def healthy(self) -> bool:
        """Whether the last search succeeded, or a new one does now, and none has been running for `STUCK_S`."""
        started = self._started  # read once: the search may end in between
        if started is not None and time.monotonic() - started > STUCK_S:
            return False
        if not self._failing:
            return True
        if self._probe is None or self._probe.done():  # concurrent health checks share one probe
            self._probe = asyncio.create_task(self._try())
        return await asyncio.shield(self._probe)

    async def _try(self) -> bool:
        try:  # the number prevents an answer from a cache
            await asyncio.wait_for(self.search([f"health {next(self._probes)}"], 1), PROBE_S)
        except (RetrievalError, TimeoutError):
            return False
        return True

    def _take(self) -> list[Call]:
        """Take the calls that have waited longest, up to the largest batch, and drop cancelled ones."""
        self._waiting = [call for call in self._waiting if not call.answer.done()]
        count, total = 0, 0
        while count < len(self._waiting) and (not count or total + len(self._waiting[count].queries) <= self._most):
            total += len(self._waiting[count].queries)
            count += 1
        calls, self._waiting = self._waiting[:count], self._waiting[count:]
        if not self._waiting:
            self._arrived.clear()
        return calls

    async def _answer(self, calls: Sequence[Call], k: int) -> None:
        """Search for all calls at once. If that fails, search for each on its own: a bad query fails only its call."""
        queries = [query for call in calls for query in call.queries]
        self._observe(len(queries))
        rankings, answered, start = await self._search(queries, k), False, 0
        until = time.monotonic() + RETRY_S
        for call in calls:
            if rankings is not None:
                share = rankings[start : start + len(call.queries)]
                start += len(call.queries)
            elif len(calls) > 1 and not call.answer.done() and time.monotonic() < until:
                share = await self._search(call.queries, k)
            else:
                share = None
            answered = answered or share is not None
            if call.answer.done():
                continue
            if share is None:
                call.answer.set_exception(RetrievalError(FAILED))
            else:
                call.answer.set_result(share)
        self._failing = not answered

    async def _search(self, queries: list[str], k: int) -> list[list[Passage]] | None:
        """Run one search in the thread. A failure is logged and gives None."""

        def guarded() -> list[list[Passage]] | BaseException:
            self._started = time.monotonic()
            try:
                return self._retriever.search(queries, k)
            except BaseException as error:  # a panic in a Rust library is not an Exception; keep serving
                return error
            finally:
                self._started = None

        result = await asyncio.get_running_loop().run_in_executor(self._thread, guarded)
        if isinstance(result, BaseException):
            expected = isinstance(result, RetrievalError)
            log.error(
                "a search for %d queries failed: %s", len(queries), result, exc_info=None if expected else result
            )
            return None
        return result

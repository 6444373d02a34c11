"""The calls of many clients as few searches: what waits while one search runs becomes the next one."""

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
RETRY_S = 10.0  # a batch that failed is searched call by call for this long; meanwhile all others wait
PROBE_S = 10.0
STUCK_S = 300.0
FAILED = "the search failed; the server's log says why"  # what a client is told: the cause may hold paths and texts


@dataclass(eq=False)
class Call:
    """What one client asks, and where its answer goes. The answer is cancelled when nobody waits for it any more."""

    queries: list[str]
    k: int
    answer: asyncio.Future[list[list[Passage]]]


class Batcher:
    """Searches in a thread of its own, one batch after the other."""

    def __init__(self, retriever: Retriever, most_queries: int, observe: Callable[[int], None] = lambda _: None):
        """`observe` is told the number of queries of each search."""
        self._retriever, self._most, self._observe = retriever, most_queries, observe
        self._thread = ThreadPoolExecutor(1, "search")
        self._waiting: list[Call] = []
        self._arrived = asyncio.Event()
        self._failing = False  # no call of the last batch could be answered
        self._started: float | None = None  # the running search's start
        self._probe: asyncio.Task[bool] | None = None
        self._probes = itertools.count()

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Wait for the next search and take this call's share of it; cancelled before that, it is not searched.

        Raises `RetrievalError` when the search for this call alone fails as well.
        """
        call = Call(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrived.set()
        return await call.answer

    async def run(self) -> None:
        """Search for whatever waits, for ever."""
        while True:
            await self._arrived.wait()
            calls = self._take()
            for k in sorted({call.k for call in calls}):  # another k may look at other candidates
                await self._answer([call for call in calls if call.k == k], k)

    @property
    def busy(self) -> bool:
        """Whether a search is running, waited for or not."""
        return self._started is not None

    async def healthy(self) -> bool:
        """Whether searches succeed: the last one did, or a new one does now; and none has been running for minutes."""
        started = self._started  # the thread may end in between
        if started is not None and time.monotonic() - started > STUCK_S:
            return False
        if not self._failing:
            return True
        if self._probe is None or self._probe.done():  # one for all who ask
            self._probe = asyncio.create_task(self._try())
        return await asyncio.shield(self._probe)

    async def _try(self) -> bool:
        try:  # the number keeps the answer from coming out of a cache
            await asyncio.wait_for(self.search([f"health {next(self._probes)}"], 1), PROBE_S)
        except (RetrievalError, TimeoutError):
            return False
        return True

    def _take(self) -> list[Call]:
        """The calls that have waited longest, up to the largest batch, without those whose client has gone."""
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
        """Search for all calls at once; when that fails, for each alone, so that one query spoils one answer only."""
        queries = [query for call in calls for query in call.queries]
        self._observe(len(queries))
        found, answered, start = await self._search(queries, k), False, 0
        until = time.monotonic() + RETRY_S
        for call in calls:
            if found is not None:
                share = found[start : start + len(call.queries)]
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
        """One search in the thread; None when it failed, of which the log tells."""

        def guarded() -> list[list[Passage]] | BaseException:
            self._started = time.monotonic()
            try:
                return self._retriever.search(queries, k)
            except BaseException as error:  # a panic of a library in Rust is no Exception; the next ones are served
                return error
            finally:
                self._started = None

        found = await asyncio.get_running_loop().run_in_executor(self._thread, guarded)
        if isinstance(found, BaseException):
            expected = isinstance(found, RetrievalError)
            log.error("a search for %d queries failed: %s", len(queries), found, exc_info=None if expected else found)
            return None
        return found

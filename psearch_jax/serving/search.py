"""Searches of live requests: a search blocks no other row, and its failure affects only its own question.

Only an initial search (`rollout.initial_search`) blocks: decoding waits until it has ended.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection
from concurrent.futures import Future, wait

from psearch_jax.rollout.tools import Calls, Passages, Toolbox
from retrieval.protocol import in_background

log = logging.getLogger("psearch_jax")
IDLE_WAIT_S = 0.05  # if no row decodes, wait this long for the search before admitting new questions
RETRY_S = 10.0  # if a batched search fails sooner than this, its rows are retried one by one until then

Failures = dict[int, str]  # order of a rollout -> the reason, in one line


class ServingSearch:
    """A search policy that polls its searches by wall clock, which would make training irreproducible.

    A failed search raises nothing. Its rollout gets no passages and is not pending any more.

    Attributes:
      failures: the searches that failed; the caller removes what it takes.
      all_failed: whether the last search failed for all its rollouts; None after the caller has handled it.
    """

    def __init__(self, tools: Toolbox):
        self._tools = tools
        self.failures: Failures = {}
        self.all_failed: bool | None = None
        self._queued: Calls = {}  # to be searched when the search in progress ends
        self._in_progress: Calls = {}
        self._future: Future | None = None

    @property
    def pending(self) -> Collection[int]:
        return self._in_progress.keys() | self._queued.keys()

    def exchange(self, calls: Calls, *, idle: bool) -> Passages:
        """Starts a search if none is in progress, and returns the results that have arrived.

        The call that starts a search returns at once, so that the clients learn of it before its results.
        """
        self._queued = {**self._queued, **calls}
        if self._start() or self._future is None:
            return {}
        if idle:
            wait([self._future], IDLE_WAIT_S)
        if not self._future.done():
            return {}
        results = self._record(*self._future.result())
        self._future, self._in_progress = None, {}
        self._start()
        return results

    def search(self, calls: Calls) -> Passages:
        if self._future is not None:
            wait([self._future])  # one batch at a time
        return self._record(*self._try(calls))

    def _start(self) -> bool:
        """Starts a search for the queued calls if none is in progress; returns whether it did."""
        if self._future is not None or not self._queued:
            return False
        self._in_progress, self._queued = self._queued, {}
        self._future = in_background(functools.partial(self._try, self._in_progress))
        return True

    def _record(self, results: Passages, failures: Failures) -> Passages:
        self.failures |= failures
        self.all_failed = bool(failures) and not results
        return results

    def _try(self, calls: Calls) -> tuple[Passages, Failures]:
        """Retries one rollout after the other if the batch fails. For any thread."""
        results: Passages = {}
        failures: Failures = {}
        deadline = time.monotonic() + RETRY_S
        try:
            results = self._tools.run(calls)
        except BaseException as error:  # a panic in a Rust library does not derive from Exception
            log.warning("a search for %d questions failed: %s", len(calls), " ".join(str(error).split())[:300])
            for order, rollout_calls in calls.items():
                if len(calls) > 1 and time.monotonic() < deadline:
                    try:
                        results |= self._tools.run({order: rollout_calls})
                        continue
                    except BaseException as retry_error:
                        error = retry_error
                failures[order] = f"the search failed ({type(error).__name__})"
        return results, failures

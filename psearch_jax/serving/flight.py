"""Rollouts for live requests: a search blocks no other row, and its failure affects only its own question."""

from __future__ import annotations

import functools
import logging
import time
from concurrent.futures import wait
from typing import Any

from psearch_jax.rollout.scheduler import RolloutScheduler, in_background

log = logging.getLogger("psearch_jax")
TOGETHER_S = 0.05  # if no row decodes, wait this long for the search before admitting new questions
RETRY_S = 10.0  # after a batched search failed, retry its rows one by one for this long


class ServingScheduler(RolloutScheduler):
    """Rollouts in one process that polls its searches by wall clock, which would make training irreproducible.

    Attributes:
      failed: the reason, in one line, by the order of each rollout whose search failed.
      searches_fail: whether the last search failed for every row; None after the caller has handled it.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.failed: dict[int, str] = {}
        self.searches_fail: bool | None = None
        self._line: dict[int, tuple[str, ...]] = {}  # queries by slot, waiting for the search in progress to end
        self._under_way: dict[int, tuple[str, ...]] = {}

    @property
    def decodes(self) -> bool:
        """Whether any row would be decoded."""
        return bool(self.live.keys() - self._searched_for.keys())

    def _exchange(self, queries: dict[int, tuple[str, ...]]) -> dict[int, Any]:
        """Starts a search if none is in progress, and returns the results that have arrived, by slot."""
        began, results = time.monotonic(), {}
        self._line |= queries
        self._begin()
        self._searched_for = {**self._under_way, **self._line}
        if self._search_ahead is not None:
            if not self.decodes:
                wait([self._search_ahead], TOGETHER_S)
            if self._search_ahead.done():
                results = self._found(*self._search_ahead.result())
                self._search_ahead, self._under_way = None, {}
                self._begin()
                self._searched_for = {**self._under_way, **self._line}
        self._count(search_s=time.monotonic() - began)
        return results

    def _begin(self) -> None:
        if self._search_ahead is None and self._line:
            self._under_way, self._line = self._line, {}
            self._search_ahead = in_background(functools.partial(self._tried, self._under_way))

    def _look_up(self, queries: dict[int, tuple[str, ...]]) -> dict[int, Any]:
        """As in training, but a failed search adds its row to `failed` instead of raising."""
        return self._found(*self._tried(queries))

    def _found(self, found: dict[int, Any], failed: dict[int, str]) -> dict[int, Any]:
        self.failed |= {self.live[slot].order: why for slot, why in failed.items()}
        self.searches_fail = bool(failed) and not found
        return found

    def _tried(self, queries: dict[int, tuple[str, ...]]) -> tuple[dict[int, Any], dict[int, str]]:
        """(results by slot, reason of failure by slot). Retries row by row if the batch fails. For any thread."""
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        try:
            results = super()._look_up(queries)
        except BaseException as error:  # a panic in a Rust library does not derive from Exception
            log.warning("a search for %d questions failed: %s", len(queries), " ".join(str(error).split())[:300])
            until = time.monotonic() + RETRY_S
            for slot, row in queries.items():
                if len(queries) > 1 and time.monotonic() < until:
                    try:
                        results |= super()._look_up({slot: row})
                        continue
                    except BaseException as own:
                        error = own
                failed[slot] = f"the search failed ({type(error).__name__})"
        return results, failed

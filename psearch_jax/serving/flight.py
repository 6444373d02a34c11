"""Rollouts of people who wait: nobody's search holds up the others, and nobody's failure is another's."""

from __future__ import annotations

import functools
import logging
import time
from concurrent.futures import wait
from typing import Any

from psearch_jax.rollout.inflight import InFlight, in_background

log = logging.getLogger("psearch_jax")
TOGETHER_S = 0.05  # how long a search is waited for where no row decodes: then newcomers are let in
RETRY_S = 10.0  # rows of a search that failed are searched one by one for this long


class Served(InFlight):
    """Rollouts in one process whose searches are looked at by the clock; in training that would not repeat itself.

    Attributes:
      failed: what went wrong, in one line, by the order of each rollout that could not be searched for.
      searches_fail: whether the last search failed for every row; None where it has been looked at.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.failed: dict[int, str] = {}
        self.searches_fail: bool | None = None
        self._line: dict[int, tuple[str, ...]] = {}  # queries by slot, that wait for the search under way
        self._under_way: dict[int, tuple[str, ...]] = {}

    @property
    def decodes(self) -> bool:
        """Whether a row would get an id."""
        return bool(self.live.keys() - self._searched_for.keys())

    def _exchange(self, queries: dict[int, tuple[str, ...]]) -> dict[int, Any]:
        """Begins a search where none is under way, and returns what has been found by now."""
        began, found = time.monotonic(), {}
        self._line |= queries
        self._begin()
        self._searched_for = {**self._under_way, **self._line}
        if self._search_ahead is not None:
            if not self.decodes:
                wait([self._search_ahead], TOGETHER_S)
            if self._search_ahead.done():
                found = self._found(*self._search_ahead.result())
                self._search_ahead, self._under_way = None, {}
                self._begin()
                self._searched_for = {**self._under_way, **self._line}
        self._count(search_s=time.monotonic() - began)
        return found

    def _begin(self) -> None:
        if self._search_ahead is None and self._line:
            self._under_way, self._line = self._line, {}
            self._search_ahead = in_background(functools.partial(self._tried, self._under_way))

    def _look_up(self, queries: dict[int, tuple[str, ...]]) -> dict[int, Any]:
        """As in training; rows whose search fails are put into `failed`."""
        return self._found(*self._tried(queries))

    def _found(self, found: dict[int, Any], failed: dict[int, str]) -> dict[int, Any]:
        self.failed |= {self.live[slot].order: why for slot, why in failed.items()}
        self.searches_fail = bool(failed) and not found
        return found

    def _tried(self, queries: dict[int, tuple[str, ...]]) -> tuple[dict[int, Any], dict[int, str]]:
        """What is found by slot, where all at once fail row by row; and why the others failed. In any thread."""
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        try:
            found = super()._look_up(queries)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log.warning("a search for %d questions failed: %s", len(queries), " ".join(str(error).split())[:300])
            until = time.monotonic() + RETRY_S
            for slot, row in queries.items():
                if len(queries) > 1 and time.monotonic() < until:
                    try:
                        found |= super()._look_up({slot: row})
                        continue
                    except BaseException as own:
                        error = own
                failed[slot] = f"the search failed ({type(error).__name__})"
        return found, failed

"""When rollouts search: a `SearchPolicy` takes the calls of stopped rows and returns their results, now or later.

`BatchedSearch` runs the calls of all rows that wait, before decoding continues or while the other rows decode.
serving/search.py has one for live requests.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

from psearch_jax.rollout.tools import Calls, Passages, Toolbox
from retrieval.protocol import in_background


class SearchPolicy(Protocol):
    """Decides when the calls of rollouts run. It knows a rollout by its order only."""

    @property
    def pending(self) -> Collection[int]:
        """The rollouts whose passages `exchange` has not returned yet; their rows wait while others decode."""
        ...

    def exchange(self, calls: Calls, *, idle: bool) -> Passages:
        """Takes new calls and returns the results that are ready, of these or of earlier rollouts.

        Args:
          calls: those of all rollouts whose turn has ended with calls; called at every yield, also without any.
          idle: no row would decode while they run, so that the method may wait.

        Raises:
          RetrievalError: a search failed.
        """
        ...

    def search(self, calls: Calls) -> Passages:
        """Searches at once, for rollouts that need their passages before the first token. Raises like `exchange`."""
        ...


class BatchedSearch:
    """Runs the calls of all rows that wait, in one batch.

    With `overlap` (`rollout.overlap_search`), the other rows decode meanwhile: `exchange` returns the passages of the
    previous call's rollouts. Which these are depends only on the yields, not on a clock, so that a run is
    reproducible.
    """

    def __init__(self, tools: Toolbox, overlap: bool = False):
        self._tools, self._overlap = tools, overlap
        self._future: Future | None = None
        self.pending: Collection[int] = ()

    def exchange(self, calls: Calls, *, idle: bool) -> Passages:
        if not self._overlap:
            return self._tools.run(calls)
        passages = self._future.result() if self._future else {}
        self.pending = calls.keys()
        self._future = in_background(functools.partial(self._tools.run, calls)) if calls else None
        return passages

    def search(self, calls: Calls) -> Passages:
        if self._future:
            self._future.exception()  # waits for it: one batch at a time
        return self._tools.run(calls)

"""When rollouts search: a `SearchPolicy` takes the sub-queries of stopped rows and returns passages, now or later.

`BatchedSearch` runs one search for all rows that wait, before decoding continues; `OverlappedSearch` runs it while the
other rows decode. serving/search.py has one for live requests.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from retrieval.protocol import Passage, RetrievalError, Retriever, in_background, in_utf8

Queries = Mapping[int, tuple[str, ...]]  # order of a rollout (turns.Rollout) -> its sub-queries
Passages = dict[int, tuple[tuple[Passage, ...], ...]]  # order of a rollout -> the passages of each sub-query


class SearchPolicy(Protocol):
    """Decides when the sub-queries of rollouts are searched. It knows a rollout by its order only."""

    @property
    def pending(self) -> Collection[int]:
        """The rollouts whose passages `exchange` has not returned yet; their rows wait while others decode."""
        ...

    def exchange(self, queries: Queries, *, idle: bool) -> Passages:
        """Takes new sub-queries and returns the passages that are ready, of these or of earlier rollouts.

        Args:
          queries: those of all rollouts whose turn has ended with a search; called at every yield, also without any.
          idle: no row would decode while these searches run, so that the call may wait.

        Raises:
          RetrievalError: a search failed.
        """
        ...

    def search(self, queries: Queries) -> Passages:
        """Searches at once, for rollouts that need their passages before the first token. Raises like `exchange`."""
        ...


@dataclass(frozen=True)
class BatchRetriever:
    """Calls a retriever once for the sub-queries of many rollouts.

    Args:
      topk: passages per sub-query.
    """

    retriever: Retriever | None  # None if the budgets allow no search
    topk: int

    def search(self, queries: Queries) -> Passages:
        flat = [q for row_queries in queries.values() for q in row_queries]
        rankings = self.retriever.search(flat, self.topk) if flat and self.retriever else []
        if len(rankings) != len(flat):
            raise RetrievalError(f"the retriever returned {len(rankings)} rankings for {len(flat)} queries")
        results = iter(rankings)
        return {order: tuple(tuple(map(in_utf8, next(results))) for _ in row) for order, row in queries.items()}


class BatchedSearch:
    """One search for all rows that wait, while no row decodes."""

    pending: Collection[int] = ()

    def __init__(self, retriever: BatchRetriever):
        self._retriever = retriever

    def exchange(self, queries: Queries, *, idle: bool) -> Passages:
        return self.search(queries)

    def search(self, queries: Queries) -> Passages:
        return self._retriever.search(queries)


class OverlappedSearch:
    """Searches in the background while other rows decode (`rollout.overlap_search`).

    `exchange` returns the passages of the previous call's rollouts. Which these are depends only on the yields, not on
    a clock, so that a run is reproducible.
    """

    def __init__(self, retriever: BatchRetriever):
        self._retriever = retriever
        self._future: Future | None = None
        self.pending: Collection[int] = ()

    def exchange(self, queries: Queries, *, idle: bool) -> Passages:
        passages = self._future.result() if self._future else {}
        self.pending = queries.keys()
        self._future = in_background(functools.partial(self._retriever.search, queries)) if queries else None
        return passages

    def search(self, queries: Queries) -> Passages:
        if self._future:
            self._future.exception()  # waits for it: one batch at a time
        return self._retriever.search(queries)

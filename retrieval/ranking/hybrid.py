"""Several rankings of one corpus fused by reciprocal rank (Cormack, Clarke and Buettcher 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieval.protocol import CorpusError, Ranker
from retrieval.ranking.index import best_first, nothing_found

RANK_OFFSET = 60  # the paper's k: a larger value gives less weight to the first ranks
DEPTH = 100  # rows used of each ranking
SCORE_DECIMALS = 6  # neighbouring ranks differ by 0.0003


class HybridRanker:
    """Implements `Ranker`: a row's score is the sum over rankings of 1 / (60 + its rank), rounded to six decimals."""

    def __init__(self, rankers: Sequence[Ranker]):
        """Raises `CorpusError` when the rankers have different numbers of passages."""
        self.rankers = list(rankers)
        self.rows = self.rankers[0].rows
        if any(ranker.rows != self.rows for ranker in self.rankers):
            raise CorpusError(f"the indexes hold {[r.rows for r in self.rankers]} rows, expected one corpus for all")

    @property
    def identity(self) -> Any:
        """See `Ranker.identity`."""
        return [ranker.identity for ranker in self.rankers]

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Ranker.rank`."""
        depth = max(k, DEPTH)
        rankings = np.concatenate([ranker.rank(queries, depth)[0] for ranker in self.rankers], axis=1)
        share = np.tile(1 / (RANK_OFFSET + 1 + np.arange(depth)), len(self.rankers))
        ids, scores = nothing_found(len(queries), k)
        for position, rows in enumerate(rankings):
            unique, where = np.unique(rows[rows >= 0], return_inverse=True)
            summed = np.round(np.bincount(where, share[rows >= 0], len(unique)), SCORE_DECIMALS)
            best, values = (array[0, :k] for array in best_first(unique[None], summed[None]))
            ids[position, : len(best)], scores[position, : len(best)] = best, values
        return ids, scores

"""A probe of whether the policy uses the passages that it retrieves: rollouts with unrelated ones."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

from psearch_jax.runtime import processes
from psearch_jax.runtime.metrics import mean
from psearch_jax.text.answers import exact_match
from psearch_jax.train.run import Run
from psearch_jax.types import Trajectory
from retrieval.protocol import Passage, Retriever


class Misled:
    """A retriever that returns the passages of an unrelated text for each query; equal queries give equal results.

    An unrelated text shares no word of five or more letters with the query. Without one, the query is empty.

    Args:
      texts: the candidates, such as other questions.
    """

    def __init__(self, retriever: Retriever, texts: Sequence[str]):
        self._retriever, self._texts = retriever, [(text, _long_words(text)) for text in texts]

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`."""
        return self._retriever.search([q and self._unrelated(q) for q in queries], k)

    def _unrelated(self, query: str) -> str:
        words, count = _long_words(query), len(self._texts)
        first = zlib.crc32(query.encode()) % max(count, 1)
        candidates = (self._texts[(first + i) % count] for i in range(count))
        return next((text for text, own in candidates if not own & words), "")

    def describe(self) -> dict[str, Any]:
        """As `Retriever.describe`."""
        return self._retriever.describe()


def probe(run: Run, step: int, rolled: Sequence[Trajectory]) -> dict[str, float]:
    """EM of each question's first rollout, and of the same rollout with passages retrieved for unrelated questions.

    Both use the step's random keys, so only the passages differ. With `train.staleness` the weights differ too, by as
    many steps, and after further draws of dynamic sampling the keys. All processes must call this.

    Args:
      rolled: the rollouts of the step's first batch, of all processes.
    """
    config = run.config
    questions = list({(t.question.source, t.question.id): t.question for t in rolled}.values())
    texts = list(dict.fromkeys(q.text for q in questions))
    retriever = Misled(run.collector.retriever, texts)
    own = run.collector.with_retriever(retriever).collect(
        run.sampling_weights(),
        processes.share(questions),
        1,
        seed=config.seed,
        step=step,
        temperature=config.rollout.temperature,
        progress=lambda *_: run.stop.check(),
    )
    misled = processes.in_order(own, 1)
    first = {(t.question.source, t.question.id): t for t in reversed(rolled)}
    regular = [first[t.question.source, t.question.id] for t in misled]
    return {"probe/em": _em(regular), "probe/em_misled": _em(misled)}


def _long_words(text: str) -> set[str]:
    return set(re.findall(r"\w{5,}", text.lower()))


def _em(trajectories: Sequence[Trajectory]) -> float:
    return mean(exact_match(t.answer, t.question.answers) for t in trajectories)

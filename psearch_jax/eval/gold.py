"""An upper bound for retrieval: the passages that state a question's facts, found by their titles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psearch_jax.data.teacher import rounds_of
from psearch_jax.text.answers import normalise
from psearch_jax.types import Question, UserError
from retrieval.protocol import Passage, Retriever

_LOOKED_AT = 10  # passages retrieved per title, to look for the one with that title


class GoldPassages:
    """A retriever that returns a question's gold passages for its own text, and the retriever's results otherwise.

    Args:
      retriever: looks passages up by title. If none of its best results has that title, the best result is used.

    Raises:
      UserError: a question does not name the passages that it needs.
    """

    def __init__(self, retriever: Retriever, questions: Sequence[Question]):
        self._retriever = retriever
        titles = {question.query: titles_of(question) for question in questions}
        wanted = list(dict.fromkeys(title for some in titles.values() for title in some))
        gold = {
            title: _titled(title, ranking)
            for title, ranking in zip(wanted, retriever.search(wanted, _LOOKED_AT), strict=True)
        }
        self._passages = {
            text: list({p.id: p for title in some for p in gold[title]}.values()) for text, some in titles.items()
        }

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """All gold passages of a question, whatever `k` is; for other queries the retriever's `k` passages."""
        others = [query for query in queries if query not in self._passages]
        rankings = dict(zip(others, self._retriever.search(others, k), strict=True)) if others else {}
        return [self._passages.get(query) or rankings.get(query, []) for query in queries]

    def describe(self) -> dict[str, Any]:
        """The retriever's own description."""
        return self._retriever.describe()


def titles_of(question: Question) -> list[str]:
    """The `supporting_titles` in a question's metadata, else the entities of its evidence triples.

    Raises:
      UserError: the question has neither.
    """
    titles = question.metadata.get("supporting_titles") or [
        triple.entity for triples in rounds_of(question) for triple in triples
    ]
    if not titles:
        raise UserError(
            f"--gold_passages: question {question.id!r} of {question.source} has neither metadata.supporting_titles "
            "nor metadata.evidences, accepted: questions that name their passages"
        )
    return list(dict.fromkeys(titles))


def _titled(title: str, passages: Sequence[Passage]) -> list[Passage]:
    """The first passage with that title, else the best passage; [] if there are no passages."""
    same = [passage for passage in passages if normalise(passage.title) == normalise(title)]
    return (same or list(passages))[:1]

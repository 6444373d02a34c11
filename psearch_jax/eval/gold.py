"""An upper limit for retrieval: the passages that state a question's facts, found by their titles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psearch_jax.data.teacher import rounds_of
from psearch_jax.text.answers import normalise
from psearch_jax.types import Question, UserError
from retrieval.protocol import Passage, Retriever

_LOOKED_AT = 10  # passages per title among which the one of that title is looked for


class GoldPassages:
    """Answers a question's own text with the passages its facts stand in; other queries as the retriever does.

    Args:
      retriever: what finds a passage by its title. Where none of the best has that title, the best one is taken.

    Raises:
      UserError: a question does not say which passages it needs.
    """

    def __init__(self, retriever: Retriever, questions: Sequence[Question]):
        self._retriever = retriever
        titles = {question.query: titles_of(question) for question in questions}
        wanted = list(dict.fromkeys(title for some in titles.values() for title in some))
        found = {
            title: _titled(title, some)
            for title, some in zip(wanted, retriever.search(wanted, _LOOKED_AT), strict=True)
        }
        self._passages = {
            text: list({p.id: p for title in some for p in found[title]}.values()) for text, some in titles.items()
        }

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """All gold passages of a question, however many `k` is."""
        others = [query for query in queries if query not in self._passages]
        found = dict(zip(others, self._retriever.search(others, k), strict=True)) if others else {}
        return [self._passages.get(query) or found.get(query, []) for query in queries]

    def describe(self) -> dict[str, Any]:
        """What the retriever says."""
        return self._retriever.describe()


def titles_of(question: Question) -> list[str]:
    """The titles in `supporting_titles` of a question's metadata, else the entities of its evidence triples.

    Raises:
      UserError: it has neither.
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
    """The passage of that title, else the best; none where nothing was found."""
    same = [passage for passage in passages if normalise(passage.title) == normalise(title)]
    return (same or list(passages))[:1]

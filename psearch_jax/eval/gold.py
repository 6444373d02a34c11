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
      retriever: looks passages up, by their title alone and with the question. All results with that title are used,
        those that fit the question best first; without any, the best result for the title.

    Raises:
      UserError: a question does not name the passages that it needs.
    """

    def __init__(self, retriever: Retriever, questions: Sequence[Question]):
        self._retriever = retriever
        titles: dict[str, list[str]] = {}  # by the text of a question, which two questions may share
        for question in questions:
            titles.setdefault(question.query, []).extend(titles_of(question))
        wanted = [(text, title) for text, some in titles.items() for title in dict.fromkeys(some)]
        with_question = retriever.search([f"{title} {text}" for text, title in wanted], _LOOKED_AT)
        alone = dict.fromkeys(title for _, title in wanted)
        by_title = dict(zip(alone, retriever.search(list(alone), _LOOKED_AT), strict=True))
        self._passages: dict[str, list[Passage]] = {}
        for (text, title), ranking in zip(wanted, with_question, strict=True):
            same = [p for p in (*ranking, *by_title[title]) if normalise(p.title) == normalise(title)]
            known = {p.id: p for p in (*self._passages.get(text, ()), *(same or by_title[title][:1]))}
            self._passages[text] = list(known.values())

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

"""An upper bound for retrieval: the passages that state a question's facts, found by their titles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psearch_jax.text.answers import normalise
from psearch_jax.text.evidence import Triple, rounds_of, states
from psearch_jax.types import Question, UserError
from retrieval.protocol import Passage, Retriever

DEPTH = 10  # passages retrieved per query, to look for those with a title


class GoldPassages:
    """A retriever that returns a question's gold passages for its own text, and the retriever's results otherwise.

    Args:
      retriever: looks the passages up. All results with a needed title are used, those that fit the question best
        first; without any, as in corpora without titles, one that states the fact, or else the first result.

    Raises:
      UserError: a question does not name the passages that it needs.
    """

    def __init__(self, retriever: Retriever, questions: Sequence[Question]):
        self._retriever = retriever
        self._passages: dict[str, dict[str, Passage]] = {}  # by the text of a question, which two questions may share
        for question in questions:
            gold = self._passages.setdefault(question.query, {})
            for title, fact in needed_passages(question):
                queries = [f"{title} {question.query}", title]
                queries += [f"{fact.relation} of {fact.entity}"] if fact else []
                rankings = retriever.search(queries, DEPTH)
                same = [p for ranking in rankings for p in ranking if normalise(p.title) == normalise(title)]
                stating = [p for p in rankings[-1] if fact and states("", p.text, fact)]
                gold |= {p.id: p for p in same or stating[:1] or rankings[1][:1]}

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """All gold passages of a question, whatever `k` is; for other queries the retriever's `k` passages."""
        others = [query for query in queries if query not in self._passages]
        rankings = dict(zip(others, self._retriever.search(others, k), strict=True)) if others else {}
        return [[*self._passages[q].values()] if q in self._passages else rankings[q] for q in queries]

    def describe(self) -> dict[str, Any]:
        """The retriever's own description."""
        return self._retriever.describe()


def needed_passages(question: Question) -> Sequence[tuple[str, Triple | None]]:
    """The titles of the passages that a question needs, with the facts that they state, where they are known.

    They are the `supporting_titles` in its metadata, else the entities of its evidence triples.

    Raises:
      UserError: the question has neither.
    """
    facts = [fact for facts in rounds_of(question) for fact in facts]
    titles = question.metadata.get("supporting_titles")
    needed = [(title, None) for title in titles] if titles else [(fact.entity, fact) for fact in facts]
    if not needed:
        raise UserError(
            f"--gold_passages: question {question.id!r} of {question.source} has neither metadata.supporting_titles "
            "nor metadata.evidences, accepted: questions that name their passages"
        )
    return needed

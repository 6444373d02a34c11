"""An upper bound for retrieval: the passages that state a question's facts, found by their titles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psearch_jax.data.triples import Triple, rounds_of
from psearch_jax.text.answers import normalise
from psearch_jax.types import Question, UserError
from retrieval.protocol import Passage, Retriever

_LOOKED_AT = 10  # passages retrieved per title, to look for the one with that title


class GoldPassages:
    """A retriever that returns a question's gold passages for its own text, and the retriever's results otherwise.

    Args:
      retriever: looks passages up, by their title alone and with the question. All results with that title are used,
        those that fit the question best first. Without any, as in corpora without titles, the best result for the fact
        that names entity and value is used; without a fact, the best result for the title.

    Raises:
      UserError: a question does not name the passages that it needs.
    """

    def __init__(self, retriever: Retriever, questions: Sequence[Question]):
        self._retriever = retriever
        # By the text of a question, which two questions may share.
        wanted = list(dict.fromkeys((q.query, title, fact) for q in questions for title, fact in _needed(q)))
        with_question = retriever.search([f"{title} {text}" for text, title, _ in wanted], _LOOKED_AT)
        titles = dict.fromkeys(title for _, title, _ in wanted)
        by_title = dict(zip(titles, retriever.search(list(titles), _LOOKED_AT), strict=True))
        facts = dict.fromkeys(fact for _, _, fact in wanted if fact)
        queries = [f"{fact.relation} of {fact.entity}" for fact in facts]
        by_fact = dict(zip(facts, retriever.search(queries, _LOOKED_AT) if queries else [], strict=True))
        self._passages: dict[str, list[Passage]] = {}
        for (text, title, fact), ranking in zip(wanted, with_question, strict=True):
            same = [p for p in (*ranking, *by_title[title]) if normalise(p.title) == normalise(title)]
            stating = [p for p in by_fact[fact] if _states(p, fact)][:1] if fact else []
            known = {p.id: p for p in (*self._passages.get(text, ()), *(same or stating or by_title[title][:1]))}
            self._passages[text] = list(known.values())

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """All gold passages of a question, whatever `k` is; for other queries the retriever's `k` passages."""
        others = [query for query in queries if query not in self._passages]
        rankings = dict(zip(others, self._retriever.search(others, k), strict=True)) if others else {}
        return [self._passages.get(query) or rankings.get(query, []) for query in queries]

    def describe(self) -> dict[str, Any]:
        """The retriever's own description."""
        return self._retriever.describe()


def _states(passage: Passage, fact: Triple) -> bool:
    text = normalise(passage.text)
    return normalise(fact.entity) in text and normalise(fact.value) in text


def titles_of(question: Question) -> list[str]:
    """The `supporting_titles` in a question's metadata, else the entities of its evidence triples.

    Raises:
      UserError: the question has neither.
    """
    return list(dict.fromkeys(title for title, _ in _needed(question)))


def _needed(question: Question) -> Sequence[tuple[str, Triple | None]]:
    """The titles of the passages that a question needs, with the facts that they state, where they are known."""
    facts = [fact for facts in rounds_of(question) for fact in facts]
    titles = question.metadata.get("supporting_titles")
    needed = [(title, None) for title in titles] if titles else [(fact.entity, fact) for fact in facts]
    if not needed:
        raise UserError(
            f"--gold_passages: question {question.id!r} of {question.source} has neither metadata.supporting_titles "
            "nor metadata.evidences, accepted: questions that name their passages"
        )
    return needed

"""A retriever without knowledge: every query finds one passage, which says that there is none."""

from collections.abc import Sequence

from psearch_jax.config import RetrievalSection
from retrieval.protocol import Passage, text_sha256

PASSAGE = Passage("0", "No results", "The search found no passage about this subject.")


class ClosedBook:
    """A policy that searches here answers from memory or guesses."""

    def __init__(self, section: RetrievalSection):
        del section  # its index is not opened

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The same passage for each query."""
        return [[PASSAGE] for _ in queries]

    def describe(self) -> dict:
        """What is searched, for the record of an evaluation."""
        digest = text_sha256(PASSAGE.text)
        return {"corpus": "closed book", "corpus_sha256": digest, "ranking_sha256": None, "rows": 1}

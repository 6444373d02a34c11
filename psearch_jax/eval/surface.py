"""A control for the decision to split that uses only the question's words: no model, no passages."""

from __future__ import annotations

import re

# Words of comparison, or two capitalised names joined by "and".
_SIDE_BY_SIDE = re.compile(
    r"\b(?:or|both|either|neither|same|different|between)\b"
    r"|[A-Z]\S*,? and (?:the |the film )?[A-Z0-9\"]"
)


def looks_parallel(question: str) -> bool:
    """Whether the words of a question suggest a comparison.

    If this rule decides as well as a policy on some set, the policy may have learned no more than such words.
    """
    return _SIDE_BY_SIDE.search(question) is not None

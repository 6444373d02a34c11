"""A control for the decision to split that reads nothing but the question's words: no model, no passages."""

from __future__ import annotations

import re

# Words that set things side by side, or two capitalised names joined by "and".
_SIDE_BY_SIDE = re.compile(
    r"\b(?:or|both|either|neither|same|different|between)\b"
    r"|[A-Z]\S*,? and (?:the |the film )?[A-Z0-9\"]"
)


def looks_parallel(question: str) -> bool:
    """Whether the words of a question suggest a comparison.

    On a set where this rule decides as well as a policy does, the policy's decisions show no more than that it knows
    such words.
    """
    return _SIDE_BY_SIDE.search(question) is not None

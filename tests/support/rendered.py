"""Rendered transcripts as trajectories, to compare the reward of parsed actions with that of rendered text."""

import numpy as np

from psearch_jax.text.tags import ANSWER_CLOSE, INFORMATION_CLOSE, INFORMATION_OPEN, SEARCH_CLOSE, TAG, parse_turn
from psearch_jax.types import Question, Trajectory, Turn


def parse_transcript(question: Question, response: str) -> Trajectory:
    """Parses a rendered response (without its prompt) into turns, for `paper_reward`. The result has no token ids.

    A search was executed if the next tag after it opens an information block. Text between the two makes its turn
    ill-formed, as does any text after the first answer. Remaining text without an action is a turn as well.
    """
    turns: list[Turn] = []
    at, n = 0, len(response)
    while response[at:].strip() and not (turns and turns[-1].action == "answer"):
        ends = [response.find(tag, at) + len(tag) for tag in (SEARCH_CLOSE, ANSWER_CLOSE) if tag in response[at:]]
        end = min(ends, default=n)
        text = response[at:end]
        action = parse_turn(text)
        if action.kind == "answer":
            action = parse_turn(response[at:])  # including the text after the answer
        observation = _following_information(response, end) if action.kind == "search" else None
        ran = observation is not None
        gap = response[end : observation[0]] if ran else ""
        ok = action.well_formed and (action.kind == "answer" or ran) and not gap.strip()
        queries = action.queries if ran else ()
        turns.append(Turn(text, action.kind, ok, queries, answer=action.answer, n_sampled=len(text)))
        at = observation[1] if ran else end
    status = "answered" if turns and turns[-1].action == "answer" else "out_of_turns"
    none = np.zeros(0)
    return Trajectory(
        question, 0, status, tuple(turns), none.astype(np.int32), none.astype(bool), none.astype(np.float32), 0
    )


def _following_information(text: str, start: int) -> tuple[int, int] | None:
    """(begin, end) of the information block that starts with the first tag from `start` on, or None.

    An unclosed block gives None.
    """
    tag = TAG.search(text, start)
    if tag is None or tag.group() != INFORMATION_OPEN:
        return None
    close = text.find(INFORMATION_CLOSE, tag.end())
    return None if close < 0 else (tag.start(), close + len(INFORMATION_CLOSE))

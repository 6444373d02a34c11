"""What launch/ask.py prints: calls side by side, and doubts about an answer."""

import io

import numpy as np
import pytest

from psearch_jax.serving.answerer import Event
from psearch_jax.serving.console import AnswerPrinter, find_answer, find_doubts
from psearch_jax.types import Call, Question, Trajectory, Turn
from retrieval.protocol import Passage

SUM = Call("calculator", '{"expression": "1 + 2"}')


def test_calls_of_several_tools_are_shown_side_by_side():
    """A call of another tool than the search has its name, and the count says calls."""
    calls, found = (
        (Call("search", "Ada born"), SUM),
        ((Passage("1", "Ada", "Born in 1815."),), (Passage("", "", "3"),)),
    )
    out = io.StringIO()
    printer = AnswerPrinter(out)
    printer.show(Event("search", calls=calls))
    printer.show(Event("passages", calls=calls, passages=found))
    printer.show(Event("search", calls=calls[:1]))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert lines[0] == "2 calls at once" and lines[-1] == "one search"
    assert lines[1:5] == ["├─ Ada born", "│    Ada: Born in 1815.", '└─ calculator {"expression": "1 + 2"}', "3"]


@pytest.mark.parametrize(
    ("question", "text", "expected"),
    [
        ("When was Ada Lovelace born?", "1815", []),
        ("What was 1815 known for?", "1815", []),
        ("Was Ada Lovelace born in 1815?", "yes", []),
        ("Was Ada Lovelace older than Alan Turing?", "Alan Turing", []),
        ("When was Ada Lovelace born?", "1816", ["neither the question nor a retrieved passage"]),
        ("When was Alan Turing born?", "1815", ["no retrieved passage mentions a name from the question"]),
        ("When was The A?", "-" * 40 + " 1" + " 000" * 9, ["neither the"]),  # no name, no repetition
        ("Who was it?", "1815", []),  # no name
        ("When was Ada Lovelace born?", "1815" + "nobum" * 5, ["neither the", "the policy repeats itself"]),
    ],
)
def test_a_doubtful_answer_is_marked(question, text, expected):
    """A confident answer from unrelated passages, or from a policy that writes nonsense, comes with a note."""
    found = ((Passage("1", "Ada Lovelace", "Born in 1815."),),)
    turns = (
        Turn("a", "search", True, ("q",), found, shown=(("Ada Lovelace Born in 1815.",),)),
        Turn(text, "answer", True, answer=text),
    )
    empty = np.zeros(0)
    asked = Question("", "", question, (), "single")
    trajectory = Trajectory(asked, 0, "answered", turns, empty, empty, empty, 0)
    doubts = find_doubts(trajectory, find_answer(trajectory))
    assert all(map(str.startswith, doubts, expected)) and len(doubts) == len(expected)

"""The dependency plan of a question, and the searches that follow it."""

import numpy as np
import pytest

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.eval.plans import PlanCounts, pairs_of, plan_counts
from psearch_jax.eval.scores import figures, score
from psearch_jax.eval.tables import results
from psearch_jax.types import Question, Trajectory, Turn

# Two films and their directors: the directors are found through the films.
FILMS = [
    ["Folly to Be Wise", "director", "Frank Launder"],
    ["The Jerk (1979 film)", "director", "Carl Reiner"],
    ["Frank Launder", "date of birth", "28 January 1906"],
    ["Carl Reiner", "date of birth", "March 20, 1922"],
]


def asked(*searches, evidences=FILMS, kind="mixed"):
    """A rollout whose searches have these sub-queries."""
    turns = [Turn("", "search", True, queries, tuple(() for _ in queries), None, 5) for queries in searches]
    turns.append(Turn("", "answer", True, answer="x", n_sampled=3))
    question = Question("2wiki", "1", "?", ("x",), kind, {"evidences": evidences})
    empty = np.zeros(3)
    return Trajectory(question, 0, "answered", tuple(turns), empty.astype(np.int32), empty > 0, empty, 1)


def test_pairs_by_hand():
    """A film and its director would count as independent, or the two directors as dependent on each other."""
    independent, dependent = pairs_of(asked().question)
    assert set(map(frozenset, independent)) == {
        frozenset(("Folly to Be Wise", "The Jerk (1979 film)")),
        frozenset(("Frank Launder", "Carl Reiner")),
    }
    # The title in the fact has a parenthesis that the director's fact does not repeat.
    assert set(dependent) == {("Folly to Be Wise", "Frank Launder"), ("The Jerk (1979 film)", "Carl Reiner")}
    spouses = [["A", "spouse", "B"], ["B", "spouse", "A"]]
    assert pairs_of(asked(evidences=spouses).question) == ([], [])
    assert pairs_of(asked(evidences=[["only", "two"]]).question) == ([], []), "evidences of another format"


@pytest.mark.parametrize(
    ("searches", "counts"),
    [
        ([("folly to be wise director", "the jerk director"), ("frank launder born", "carl reiner born")], (2, 2)),
        ([("folly to be wise director",), ("the jerk director",), ("frank launder", "carl reiner")], (1, 2)),
        ([("folly to be wise and the jerk directors",)], (0, 0)),  # one sub-query: nothing at once
        ([("folly to be wise, the jerk", "the jerk")], (1, 0)),
        ([("folly to be wise, the jerk", "carl reiner")], (0, 0)),
        ([("folly to be wise", "frank launder"), ("the jerk",), ("carl reiner",)], (0, 1)),  # guessed, not found
        ([("jerky folly", "wise carl")], (0, 0)),  # parts of names
        ([], (0, 0)),
    ],
)
def test_counts_by_hand(searches, counts):
    """Both in one sub-query would count as parallel, or a name that was guessed as found through another."""
    assert plan_counts(asked(*searches)) == PlanCounts(2, counts[0], 2, counts[1])


def test_the_closed_world_has_plans():
    """The figure would be missing in the closed world, whose questions record their facts in another field."""
    world = ClosedWorld.make(0)
    for kind, has in (("parallel", (True, False)), ("sequential", (False, True))):
        for question in questions(world, "eval", kind, 20, 0):
            independent, dependent = pairs_of(question)
            assert (bool(independent), bool(dependent)) == has, question


def test_plans_in_the_report():
    """Shares would be means over questions, or the table would have columns without data."""
    good = [("folly to be wise", "the jerk"), ("frank launder",), ("carl reiner",)]
    scores = [score(asked(*good)), score(asked(kind="parallel", evidences=FILMS[2:]))]
    report = figures(scores)
    assert report["all"]["independent_at_once"] == pytest.approx(1 / 3, abs=1e-6)
    assert report["all"]["dependent_in_order"] == 1 and "dependent_in_order" not in report["kinds"]["parallel"]
    text = results({"2wiki": report}, "policy")
    assert "| 2wiki | all | .333 | 1.000 |" in text and "| 2wiki | parallel | .000 |  |" in text
    assert "dependency plan" not in results({"other": figures([score(asked(evidences=[]))])}, "policy")

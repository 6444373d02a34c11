"""What follows a stopped row's turn."""

from __future__ import annotations

import pytest

from psearch_jax.rollout.sampler_programs import Status
from psearch_jax.rollout.turns import Continue, End, Search, decide
from psearch_jax.types import Turn, pair_calls

ASKED = ("Ada", "Alan")
SEARCH = Turn("", "search", True, ASKED, n_sampled=5)
ANSWER = Turn("", "answer", True, answer="Ada", n_sampled=5)
NOTHING = Turn("", "none", False, n_sampled=5)
STATUSES = [status for status in Status if status not in (Status.EMPTY, Status.RUNNING)]


@pytest.mark.parametrize(
    ("turn", "status", "calls", "expected"),
    [
        (SEARCH, Status.SEARCH, 0, Search(pair_calls((), ASKED))),
        (SEARCH, Status.SEARCH, 1, Search(pair_calls((), ASKED))),
        (SEARCH, Status.SEARCH, 2, End("out_of_turns")),
        (NOTHING, Status.SEARCH, 0, Continue()),  # an empty search, or one without an opening tag
        (ANSWER, Status.ANSWER, 0, End("answered")),
        (ANSWER, Status.ANSWER, 2, End("answered")),
        (NOTHING, Status.ANSWER, 0, Continue()),  # `</answer>` without an opening tag
        (NOTHING, Status.EOS, 0, Continue()),
        (NOTHING, Status.EOS, 2, End("out_of_turns")),
        (NOTHING, Status.TURN_FULL, 1, Continue()),
        (NOTHING, Status.TURN_FULL, 2, End("out_of_turns")),
        (NOTHING, Status.CONTEXT_FULL, 0, End("truncated")),
        (SEARCH, Status.CONTEXT_FULL, 2, End("truncated")),
        (NOTHING, Status.NOT_FINITE, 0, End("not_finite")),
    ],
)
def test_decisions(turn, status, calls, expected):
    """With two search turns: tags decide before budgets, and the last turn ends a rollout whatever it asks for."""
    assert decide(turn, status, calls, 2, spent=False) == expected


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("turn", [SEARCH, ANSWER, NOTHING], ids=["search", "answer", "nothing"])
def test_every_last_turn_ends(turn, status):
    """Whatever a row did in its last turn, the rollout ends there."""
    assert isinstance(decide(turn, status, 2, 2, spent=False), End)
    assert isinstance(decide(turn, status, 0, 2, spent=True), End)

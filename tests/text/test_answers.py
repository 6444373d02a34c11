"""Answer normalisation, exact match and F1, by hand-worked cases."""

import pytest

from psearch_jax.text.answers import exact_match, f1, normalise


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Nile.", "nile"),
        ("An apple a day", "apple day"),
        ("O'Neill", "oneill"),
        ("theatre", "theatre"),
        ("1,815", "1815"),
        ("Café-Müller\n", "cafémüller"),
        ("the", ""),
    ],
)
def test_normalise(text, expected):
    """Texts are normalised as by the published scorer."""
    assert normalise(text) == expected


def test_exact_match():
    """Only a complete answer matches; None matches nothing."""
    assert exact_match("the NILE!", ["Amazon", "Nile"])
    assert not exact_match("Nile river", ["Nile"])
    assert not exact_match(None, ["none"]) and not exact_match("Nile", [])
    assert exact_match("", ["the"])


@pytest.mark.parametrize(
    "prediction, golds, expected",
    [
        ("Ada Lovelace", ["ada lovelace."], 1.0),
        ("Ada King Lovelace", ["Ada Lovelace"], 0.8),  # precision 2/3, recall 1
        ("Ada", ["Nile", "Ada Lovelace"], 2 / 3),  # the best gold answer counts
        ("a a", ["b"], 0.0),
        ("x x y", ["x y y"], 2 / 3),  # tokens match as a multiset
        ("the", ["an"], 1.0),
        (None, ["x"], 0.0),
        ("x", [], 0.0),
    ],
)
def test_f1(prediction, golds, expected):
    """F1 is over multisets of tokens, against the best gold answer."""
    assert f1(prediction, golds) == pytest.approx(expected)

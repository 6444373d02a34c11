"""ScaNN indexes: exact and tree search, tuning, and checks of their inputs and results."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import unit_rows
from programs import ROOT

from retrieval.protocol import RetrievalError
from retrieval.ranking.index import ScannIndex, TreeSettings, tree_settings


def small_tree(vectors: np.ndarray) -> TreeSettings:
    return tree_settings(*vectors.shape)


def test_exact_search_equals_numpy():
    """Results are the largest inner products, at ties the lower row."""
    vectors, queries = unit_rows(500, 32), unit_rows(40, 32, seed=1)
    ids, scores = ScannIndex.from_vectors(vectors).search(queries, 5)
    exact = np.round(queries.astype(np.float64) @ vectors.T.astype(np.float64), 4)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :5]
    assert np.array_equal(ids, order)
    assert np.array_equal(scores, np.take_along_axis(exact, order, axis=1).astype(np.float32))


def test_search_does_not_depend_on_the_batch():
    """Results are the same bit for bit in any batch, so a rollout can be replayed."""
    vectors, queries = unit_rows(2000, 64), unit_rows(130, 64, seed=1)
    index = ScannIndex.from_vectors(vectors)
    ids, scores = index.search(queries, 4)
    for size in (1, 7, 64):
        parts = [index.search(queries[start : start + size], 4) for start in range(0, len(queries), size)]
        assert np.array_equal(np.concatenate([p[0] for p in parts]), ids)
        assert np.array_equal(np.concatenate([p[1] for p in parts]), scores)


@pytest.mark.parametrize("tree", [True, False])
def test_search_guards(tree):
    """A zero query and k > n give missing results, a query that is not finite an error."""
    vectors = unit_rows(40, 32)
    index = ScannIndex.from_vectors(vectors, small_tree(vectors) if tree else None)
    ids, scores = index.search(np.stack([np.zeros(32), vectors[7]]), 60)
    assert ids.shape == scores.shape == (2, 60)
    assert (ids[0] == -1).all() and np.isneginf(scores[0]).all()
    rows = ids[1][ids[1] >= 0]
    assert rows[0] == 7 and len(set(rows)) == len(rows) and np.isneginf(scores[1][len(rows) :]).all()
    assert tree or len(rows) == 40
    with pytest.raises(RetrievalError, match="not finite"):
        index.search(np.full((1, 32), np.nan), 3)


def test_scann_needs_no_tensorflow(tmp_path):
    """ScaNN is imported without TensorFlow, which may be of another version than it was built for."""
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('another version')")
    script = "import sys, retrieval.ranking.index as i; i._import_scann(); assert 'tensorflow' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

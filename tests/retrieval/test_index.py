"""ScaNN indexes: exact and tree search, shards, tuning, and checks of their inputs and results."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import people, unit_rows
from programs import ROOT

from retrieval.protocol import CorpusError, RetrievalError
from retrieval.ranking.index import ScannIndex, ShardedIndex, TreeSettings, exact_search, recall, tree_settings, tune
from retrieval.service import RetrievalService


def small_tree(vectors: np.ndarray) -> TreeSettings:
    return tree_settings(*vectors.shape)


def test_exact_search_equals_numpy():
    """The index returns other rows or scores than the definition: largest inner products, ties to the lower row."""
    vectors, queries = unit_rows(500, 32), unit_rows(40, 32, seed=1)
    ids, scores = ScannIndex.from_vectors(vectors).search(queries, 5)
    exact = np.round(queries.astype(np.float64) @ vectors.T.astype(np.float64), 4)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :5]
    assert np.array_equal(ids, order)
    assert np.array_equal(scores, np.take_along_axis(exact, order, axis=1).astype(np.float32))


@pytest.mark.parametrize("tree", [True, False])
def test_equal_scores_go_to_the_lower_row(tree):
    """If more passages tie than there are candidates, the choice of those returned is arbitrary."""
    vectors = unit_rows(300, 32)
    vectors[50:250] = vectors[50]
    index = ScannIndex.from_vectors(vectors, small_tree(vectors) if tree else None)
    ids, scores = index.search(vectors[[60, 249]], 3)
    assert ids.tolist() == [[50, 51, 52]] * 2 and (scores == 1).all()


def test_ties_by_rounding_go_to_the_lower_row():
    """Rows that are equal after rounding are selected by float noise before rounding."""
    vectors = np.zeros((300, 4), np.float32)
    vectors[:, 0] = 0.5 + 1e-7 * np.arange(300)
    ids, scores = ScannIndex.from_vectors(vectors).search(np.eye(4)[:1], 3)
    assert ids.tolist() == [[0, 1, 2]] and scores.tolist() == [[0.5, 0.5, 0.5]]


def test_search_does_not_depend_on_the_batch():
    """ScaNN's last bits change with the batch size; if results do, a rollout cannot be replayed."""
    vectors, queries = unit_rows(2000, 64), unit_rows(130, 64, seed=1)
    index = ScannIndex.from_vectors(vectors)
    ids, scores = index.search(queries, 4)
    for size in (1, 7, 64):
        parts = [index.search(queries[start : start + size], 4) for start in range(0, len(queries), size)]
        assert np.array_equal(np.concatenate([p[0] for p in parts]), ids)
        assert np.array_equal(np.concatenate([p[1] for p in parts]), scores)


@pytest.mark.parametrize("tree", [True, False])
def test_search_guards(tree):
    """ScaNN answers a zero or NaN query with row 0, pads with row 0, and narrows the result when k > n."""
    vectors = unit_rows(40, 32)
    index = ScannIndex.from_vectors(vectors, small_tree(vectors) if tree else None)
    ids, scores = index.search(np.stack([np.zeros(32), vectors[7]]), 60)
    assert ids.shape == scores.shape == (2, 60)
    assert (ids[0] == -1).all() and np.isneginf(scores[0]).all()
    rows = ids[1][ids[1] >= 0]
    assert rows[0] == 7 and len(set(rows)) == len(rows) and np.isneginf(scores[1][len(rows) :]).all()
    assert tree or len(rows) == 40
    assert len(rows) >= 1
    empty_ids, empty_scores = index.search(np.zeros((0, 32)), 3)
    assert empty_ids.shape == empty_scores.shape == (0, 3)
    for bad in (np.nan, np.inf):
        with pytest.raises(RetrievalError, match="not finite"):
            index.search(np.full((1, 32), bad), 3)
    for queries, k in ((np.ones((1, 31)), 3), (np.ones(32), 3), (np.ones((1, 32)), 0)):
        with pytest.raises(ValueError, match="expected"):
            index.search(queries, k)


def test_vectors_that_cannot_be_indexed():
    """A NaN row aborts the process inside ScaNN, or an array without rows fails without an explanation."""
    vectors = unit_rows(40, 8)
    vectors[31, 2] = np.nan
    with pytest.raises(CorpusError, match="row 31"):
        ScannIndex.from_vectors(vectors, small_tree(vectors))
    with pytest.raises(CorpusError, match="N >= 1"):
        ScannIndex.from_vectors(np.zeros((0, 8), np.float32))


def test_one_passage():
    """A corpus of one passage breaks the exact search or the tree's minimum size."""
    index = ScannIndex.from_vectors(unit_rows(1, 8))
    assert index.search(unit_rows(1, 8), 2)[0].tolist() == [[0, -1]]
    (ranking,) = RetrievalService.from_corpus(people()[:1]).search(["Baro Quill"], 3)
    assert [p.id for p in ranking] == ["p0"]


def test_build_is_silent(capfd):
    """ScaNN prints its build log over the progress bar of a run."""
    vectors = unit_rows(300, 32)
    ScannIndex.from_vectors(vectors, small_tree(vectors)).search(unit_rows(2, 32), 3)
    assert capfd.readouterr() == ("", "")


def test_shards_equal_the_whole():
    """Rows of the second shard keep their local numbers, or a tie at a shard boundary goes to the higher row."""
    vectors, queries = unit_rows(301, 16), unit_rows(40, 16, seed=1)
    vectors[150:153] = vectors[149]
    queries[0] = vectors[149]
    single = ScannIndex.from_vectors(vectors)
    sharded = ShardedIndex([ScannIndex.from_vectors(vectors[a:b]) for a, b in ((0, 151), (151, 300), (300, 301))])
    assert sharded.rows == 301
    for k in (1, 3, 160, 400):
        for one, other in zip(single.search(queries, k), sharded.search(queries, k), strict=True):
            assert np.array_equal(one, other)
    with pytest.raises(CorpusError, match="dimensions"):
        ShardedIndex([single, ScannIndex.from_vectors(unit_rows(3, 8))])


def test_exact_search_in_blocks():
    """The ground truth for recall misses rows at the boundary of two blocks."""
    vectors, queries = unit_rows(500, 16), unit_rows(20, 16, seed=1)
    order = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :5]
    for block_rows in (3, 64, 1000):
        assert np.array_equal(exact_search(vectors, queries, 5, block_rows), order)
    assert (exact_search(vectors[:2], queries, 5)[:, 2:] == -1).all()


def test_tuning_finds_the_cheapest_that_reaches_the_target():
    """Tuning stops short of the target, or searches all leaves where a few would do."""
    vectors = unit_rows(4000, 32)
    queries = vectors[::8] + 0.3 * unit_rows(500, 32, seed=1)
    index = ScannIndex.from_vectors(vectors, replace(tree_settings(4000, 32), searched_leaves=1, reordered=16))
    truth = exact_search(vectors, queries, 3)
    assert recall(index, queries, truth) < 0.8
    efforts = []
    for target in (0.8, 0.9, 0.97):
        tuned = tune(index, queries, truth, target)
        assert recall(tuned, queries, truth) >= target
        efforts.append(tuned.tree.searched_leaves * tuned.tree.reordered)
    assert efforts[0] < efforts[-1] and tuned.tree.searched_leaves < tuned.tree.leaves


def test_scann_needs_no_tensorflow(tmp_path):
    """On a machine with another TensorFlow than ScaNN was built for, no index could be opened."""
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('another version')")
    script = "import sys; from retrieval.ranking.index import _scann; _scann(); assert 'tensorflow' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

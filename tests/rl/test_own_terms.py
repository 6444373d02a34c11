"""Terms that `reward.terms` adds to the reward."""

import shutil

import numpy as np
import pytest
from runs import small_config

from psearch_jax.assembly import build
from psearch_jax.config import from_mapping
from psearch_jax.rl.own_terms import load_terms
from psearch_jax.rl.rewards import Reward
from psearch_jax.train.checkpointing import settings
from psearch_jax.types import Question, Trajectory, Turn, UserError
from retrieval.protocol import Passage

OWN = """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Words:
    number: int
def words(trajectory): return Words(len(trajectory.answer.split())).number
def above_mean(trajectories):
    numbers = list(map(words, trajectories))
    return [number - sum(numbers) / len(numbers) for number in numbers]
def broken(trajectory):
    return trajectory.reply
def nothing(trajectory): return None
def pairs(trajectory): return [1, 2]
def first(trajectories): return [0.0]
def total(trajectory): return 0.0
def f1(trajectory): return 0.0
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "bad.py").write_text("x = 1\nx +\n")


def rewards(terms: str):
    """Of three rollouts of a question: shown the answer by a search, shown less, and shown it before any search."""
    question, empty, rollouts = Question("s", "q7", "q?", ("Ada Lovelace",), "single"), np.zeros(0), []
    for i, (answer, shown, sampled) in enumerate(
        [("Ada", "Ada Lovelace", 9), ("b c d e", "", 9), ("b", "Ada Lovelace", 0)]
    ):
        passages = ((Passage("1", "t", "Ada Lovelace"),),)
        search = Turn("", "search", True, ("a",), passages, n_sampled=sampled, shown=((shown,),))
        turns = (search, Turn("", "answer", True, answer=answer, n_sampled=1))
        rollouts.append(Trajectory(question, i, "answered", turns, empty, empty, empty, 0))
    config = from_mapping({"reward": {"terms": terms}})
    return Reward(config.reward, further=load_terms(config))(rollouts)


def test_own_terms_are_added_to_the_reward():
    """Terms of one rollout, of a group and of the package follow the built-in ones, times their weights."""
    values = [[0.5, 2.0, 0.1, 2 / 3], [2.0, -4.0, 0.0, 0.0], [0.5, 2.0, 0.0, 0.0]]
    specs = "own.py:words=0.5, own.py:above_mean=-2,answer_recall=1e-1,f1=1"
    for plain, parts, expected in zip(rewards(""), rewards(specs), values, strict=True):
        own = dict(zip(("words", "above_mean", "answer_recall", "f1"), expected, strict=True))
        assert list(parts.terms) == [*plain.terms, *own] and parts.terms == pytest.approx({**plain.terms, **own})
        assert parts.total == pytest.approx(plain.total + sum(expected))


@pytest.mark.parametrize(
    "terms, words",
    [
        ("own.py:words", ["accepted: FILE.py:FUNCTION=WEIGHT"]),
        ("own.py:words=nan", ["own.py:words=nan", "accepted: FILE.py:FUNCTION=WEIGHT"]),
        ("f1=1,", ["accepted: FILE.py:FUNCTION=WEIGHT"]),
        ("em=1", ["em=1", "answer_recall=WEIGHT, f1=WEIGHT"]),
        ("absent.py:f=1", ["absent.py: cannot be loaded in /", "No such file"]),
        ("absent_module:f=1", ["absent_module: cannot be loaded", "No module named"]),
        ("bad.py:f=1", ["bad.py: cannot be loaded", "SyntaxError", "line 2"]),
        ("own.py:absent=1", ["own.py has no function 'absent'"]),
        ("own.py:Words=1", ["own.py has no function 'Words'"]),
        ("own.py:total=1", ["another term is named 'total'"]),
        ("own.py:f1=1", ["another term is named 'f1'"]),
        ("own.py:words=1,./own.py:words=2", ["./own.py:words=2", "another term is named 'words'"]),
        ("own.py:broken=1", ["own.py:broken=1", "AttributeError", "'reply' (line 11)"]),
        ("own.py:nothing=1", ["own.py:nothing=1", "returned None for question q7"]),
        ("own.py:pairs=1", ["own.py:pairs=1", "shape (3, 2), accepted: 3 numbers"]),
        ("own.py:first=1", ["own.py:first=1", "shape (1,), accepted: 3 numbers"]),
    ],
)
def test_a_bad_term_is_refused_in_one_line(terms, words):
    """The line names the field, the file and the value."""
    with pytest.raises(UserError, match="^config.reward.terms[^\n]*$") as refused:
        rewards(terms)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_run_records_the_contents_of_its_terms(tiny_policy, tmp_path):
    """The file may be moved; another weight, or a change of the file, is another reward."""

    def record(terms):
        return build.training_run(small_config(tiny_policy, **{"reward.terms": terms})).settings

    first = record("own.py:words=1")
    shutil.copy("own.py", "moved.py")
    assert settings.differences(first, record("moved.py:words=1.0")) == {}
    changes = settings.differences(first, record("own.py:words=2"))
    assert changes == {"reward.terms": "'own.py:words=1', now 'own.py:words=2'"}
    (tmp_path / "own.py").write_text(OWN.replace("split()", "split('-')"))
    changes = settings.differences(first, record("own.py:words=1"))
    assert changes == {"reward.terms": "'own.py:words=1' has other contents"}

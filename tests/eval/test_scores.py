"""Figures about trajectories, by hand and by their definitions, and the tables made from them."""

import json
import math
from dataclasses import asdict, replace
from itertools import combinations

import numpy as np
import pytest
from helpers import PASSAGES

from psearch_jax.eval import tables
from psearch_jax.eval.scores import (
    compare_paired,
    em_interval,
    figures,
    from_row,
    group_by_kind,
    judge_splitting,
    pass_at,
    score,
    share_finished,
    summarise,
)
from psearch_jax.eval.tables import cells_of, paired_table, results, results_table
from psearch_jax.types import Question, Trajectory, Turn, UserError


def search(*queries, n=5):
    return Turn("<search>", "search", True, queries, tuple((PASSAGES[0],) for _ in queries), None, n)


def answer(text, well_formed=True):
    return Turn("<answer>", "answer", well_formed, answer=text, n_sampled=4)


def trajectory(*turns, kind="parallel", status="answered", id=0, sample=0, text="Who is older?", **metadata):
    question = Question("test", str(id), text, ("Ada Lovelace",), kind, metadata)
    empty = np.zeros(30)
    return Trajectory(question, sample, status, turns, empty.astype(np.int32), empty.astype(bool), empty, 3)


def scored(*turns, **facts):
    return score(trajectory(*turns, **facts))


# Four hand-worked trajectories: (em, f1, split, searches, sub-queries, turns, valid).
SPLIT = scored(search("a", "b"), answer("Ada Lovelace"), id=0)  # 1, 1, yes, 1, 2, 2, yes
SLOW = scored(search("a"), search("b", "c"), answer("Ada", False), id=1)  # 0, 2/3, no, 2, 3, 3, no
LOST = scored(search("a", "b", "c"), Turn("", "search", True, n_sampled=5), status="out_of_turns", id=2)  # 1, 3, 2
DIRECT = scored(answer("the ada  lovelace!"), kind="single", id=3)  # 1, 1, no, 0, 0, 1, yes
FOUR = [SPLIT, SLOW, LOST, DIRECT]


def test_summary_by_hand():
    """Means over trajectories, the published rule of the first search, and counts of distinct questions."""
    means = {"em": 0.5, "f1": round((1 + 2 / 3 + 0 + 1) / 4, 6), "decomposition_ratio": 0.5, "searches": 1.0}
    means |= {"sub_queries": 2.0, "turns": 2.0, "tokens": (9 + 14 + 10 + 4) / 4, "context": 30.0, "valid_format": 0.5}
    means |= {"answered": 0.75, "evidence": 0.0}
    assert summarise(FOUR) == means | {"decomposition_accuracy": 0.5, "llm_calls": 8, "questions": 4}
    assert summarise([]) == {"questions": 0}
    assert share_finished(FOUR) == [0.25, 0.5, 0.75, 0.75, 0.75, 0.75]
    assert summarise([SLOW])["decomposition_ratio"] == 0, "only the first executed search counts"
    assert summarise([SPLIT, scored(answer("Alan"), id=0, sample=1)])["questions"] == 1
    groups = group_by_kind(FOUR)
    assert list(groups) == ["parallel", "single"] and len(groups["parallel"]) == 3
    initial = summarise([scored(search("a", "b", n=0), answer("Ada Lovelace"))])  # the host's search, not the policy's
    assert [initial[key] for key in ("searches", "sub_queries", "decomposition_ratio", "turns")] == [0, 0, 0, 1]
    shown = replace(search("a"), shown=(("Ada Lovelace was born in 1815.",),))
    evidences = [["Ada Lovelace", "born", "1815"], ["Alan Turing", "born", "1912"]]
    assert summarise([scored(shown, answer("x"), evidences=evidences)])["evidence"] == 0.5
    broken = scored(Turn("", "none", False, n_sampled=3), status="not_finite", id=4)
    assert figures([*FOUR, broken])["all"]["not_finite"] == 1


def test_chance_level_is_reported_only_if_known_for_every_question():
    """The chance level is a mean over questions, and absent if it is unknown for one of them."""
    known = [scored(answer("x"), id=i, chance=c) for i, c in enumerate((0.5, 0.25))]
    assert summarise(known)["chance"] == 0.375
    assert "chance" not in summarise([*known, scored(answer("x"), id=9)])
    lines = results_table({"mine": figures(known)}, "ours").splitlines()
    assert any(line.startswith("| mine | parallel | chance level | .375 |") for line in lines)
    assert len({line.count("|") for line in lines}) == 1
    assert "chance level" not in results_table({"mine": figures([SPLIT])}, "ours")


def test_interval_of_em():
    """The interval is deterministic, has the width of the normal approximation, and resamples questions."""
    right = np.random.default_rng(0).random(400) < 0.6
    many = [scored(answer("Ada Lovelace" if r else "no"), id=i) for i, r in enumerate(right)]
    low, high = em_interval(many)
    assert [low, high] == em_interval(many)
    half_width = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 400)
    assert [low, high] == pytest.approx([right.mean() - half_width, right.mean() + half_width], abs=0.012)
    assert em_interval([SPLIT, SPLIT]) == [1, 1]
    low4, high4 = em_interval([replace(s, sample=sample) for s in many for sample in range(4)])
    assert high4 - low4 == pytest.approx(high - low, abs=0.012), "copies of an answer must not narrow the interval"


def samples(right, wrong="no", id=0):
    """One question's samples, right where the list is true."""
    return [scored(answer("Ada Lovelace" if r else wrong), id=id, sample=i) for i, r in enumerate(right)]


def test_pass_at_k_is_the_share_of_drawn_sets():
    """pass@k equals the share of all sets of k samples that have a right one."""
    right = [True, False, False, True, False]
    for k in (1, 2, 3, 5):
        subsets = list(combinations(right, k))
        assert pass_at(samples(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-6)
    two = samples(right) + samples([False] * 5, id=1)
    assert pass_at(two, 1) == pytest.approx(0.2, abs=1e-6), "pass@k must be the mean over questions"


def test_splitting_by_hand():
    """Mixed questions are excluded, only a first search with several sub-queries is a split, and silence is wrong."""
    scores = [
        *[scored(search("a", "b"), answer("x"), id=i) for i in range(3)],  # parallel, split
        scored(search("a"), answer("Ada Lovelace"), id=3),  # parallel, not split
        scored(search("a", "b"), answer("x"), kind="sequential", id=4),  # wrongly split
        scored(answer("x"), kind="sequential", id=5),
        scored(search("a"), search("b", "c"), answer("x"), kind="single", id=6),  # the second search does not count
        scored(search("a", "b"), answer("x"), kind="mixed", id=7),
    ]
    decisions = judge_splitting(scores)
    counts = {kind: tuple(of.values()) for kind, of in decisions["confusion"].items()}
    assert counts == {"parallel": (3, 1, 0), "sequential": (1, 0, 1), "single": (0, 1, 0), "mixed": (1, 0, 0)}
    assert list(decisions["confusion"]["single"]) == ["split", "not_split", "no_search"]
    assert (decisions["accuracy"], decisions["precision"], decisions["recall"]) == (round(4 / 7, 6), 0.75, 0.75)
    assert [judge_splitting(scores[-1:])[name] for name in ("accuracy", "precision", "recall")] == [None] * 3


def test_controls_of_the_decision_to_split():
    """The accuracies of never splitting and of the word heuristic are reported next to the policy's."""
    scores = [
        scored(search("a", "b"), answer("x"), id=0, text="Who is older, Ada Lovelace or Alan Turing?"),
        scored(search("a"), answer("x"), id=1, kind="sequential", text="When was the mother of Ada Lovelace born?"),
        scored(search("a"), answer("x"), id=2, kind="sequential", text="Which war was between Rome and Carthage?"),
    ]
    rates = judge_splitting(scores)
    assert rates["accuracy"] == 1 and rates["never_split"] == rates["word_heuristic"] == round(2 / 3, 6)
    assert "| 1.000 | 1.000 | 1.000 | .667 | .667 |" in results({"2wiki": figures(scores)}, "us")


def test_two_evaluations_are_compared_by_set_and_kind():
    """The paired table has rows for each set of a merged benchmark, and for each kind of a set."""
    facts = (("nq", "single", 0.0, 1.0), ("hotpotqa", "parallel", 0.0, 1.0), ("hotpotqa", "sequential", 1.0, 0.0))
    first, second = (
        [replace(SPLIT, source=source, id=str(i), kind=kind, em=em[k]) for i, (source, kind, *em) in enumerate(facts)]
        for k in (0, 1)
    )
    compared = paired_table(("a", {"test": first}), ("b", {"test": second}))
    for row in (
        "| test | EM | 0.333 | 0.667 | +0.333 |",
        "| test: nq | EM | 0.000 | 1.000 | +1.000 |",
        "| test: hotpotqa | EM | 0.500 | 0.500 | +0.000 |",
        "| test: hotpotqa, sequential | EM | 1.000 | 0.000 | -1.000 |",
    ):
        assert row in compared


def test_paired_difference_against_the_exact_test():
    """p equals the enumerated sign flips; the ratio is undefined if the first mean is zero."""
    first = [scored(answer("no"), id=i) for i in range(8)]
    second = [scored(answer("Ada Lovelace" if i < 6 else "no"), id=i) for i in range(8)]
    stats = compare_paired(first, second[::-1])
    assert (stats["first"], stats["second"], stats["difference"], stats["questions"]) == (0, 0.75, 0.75, 8)
    assert stats["p"] == pytest.approx(2 / 2**6, abs=0.005), "p must be the chance that six signs agree"
    assert 0.37 <= stats["low"] <= 0.5 and stats["high"] == 1
    assert math.isnan(stats["ratio"]) and compare_paired(first, second) == pytest.approx(stats, nan_ok=True)
    assert compare_paired(first, first)["p"] == 1
    slow = [scored(search("a"), search("b"), answer("x"), id=0), scored(answer("x"), id=1)]
    fast = [scored(search("a", "b"), answer("x"), id=0), scored(answer("x"), id=1)]
    assert compare_paired(slow, fast, "turns")["ratio"] == 0.75, "a ratio of means, not a mean of ratios"


def test_other_questions_cannot_be_compared():
    """Only evaluations of the same questions are compared."""
    with pytest.raises(UserError, match="2 questions are in one evaluation only"):
        compare_paired([SPLIT], [SLOW])
    with pytest.raises(UserError, match="no benchmark in common"):
        paired_table(("a", {"nq": [SPLIT]}), ("b", {"popqa": [SPLIT]}))
    assert "| nq | EM | 1.000 | 1.000 | +0.000 |" in paired_table(("a", {"nq": [SPLIT]}), ("b", {"nq": [SPLIT]}))


def test_scores_come_back_from_disk():
    """Rows on disk keep all fields of a score."""
    for original in FOUR:
        assert from_row(json.loads(json.dumps({"question": "?", **asdict(original)}))) == original


def test_results_table():
    """Rows fit the header, and published figures stand next to the same set and kind."""
    mixed = [scored(answer("Ada Lovelace"), id=i, kind=kind) for i, kind in enumerate(("parallel", "sequential"))]
    table = results_table({"HotpotQA": figures(mixed), "mine": figures([DIRECT])}, "this policy")
    rows = [cells_of(line) for line in table.splitlines()]
    assert {len(row) for row in rows} == {13}
    ours = [tuple(row[:2]) for row in rows if row[2] == "this policy"]
    hotpot = [("HotpotQA", kind) for kind in ("all", "parallel", "sequential")]
    assert ours == [*hotpot, ("mine", "single"), ("average", "")]
    theirs = [row[1] for row in rows if "published" in row[2]]
    assert theirs.count("all") == 7 and theirs.count("parallel") == 4
    only_parallel = results_table({"HotpotQA": figures(mixed[:1])}, "this policy")
    assert "| all |" not in only_parallel and "| .656 |" in only_parallel and ".429" not in only_parallel
    assert cells_of(tables.table([["name", "EM"], ["a|b", ".5"]]).splitlines()[2]) == ["a|b", ".5"]


def merged_scores():
    """One benchmark with two questions of one set, answered right, and one of another, answered wrong."""
    kinds = [("nq", "single", 1.0), ("nq", "single", 1.0), ("hotpotqa", "parallel", 0.0)]
    return [replace(SPLIT, source=s, id=str(i), kind=kind, em=em) for i, (s, kind, em) in enumerate(kinds)]


def test_a_merged_file_reports_by_source():
    """A merged file is reported for each of its sets; the average counts each set once."""
    report = figures(merged_scores())
    assert {name: (v["all"]["em"], v["all"]["questions"]) for name, v in report["sources"].items()} == {
        "nq": (1.0, 2),
        "hotpotqa": (0.0, 1),
    }
    assert "sources" not in figures(merged_scores()[:2])
    text = results_table({"test": report}, "ours")
    for row in (
        "| test | all | ours | .667 |",
        "| test: nq | single | ours | 1.000 |",
        "| test: hotpotqa | parallel | ours | .000 |",
        "| test: nq | all | ParallelSearch, Qwen2.5-7B (published, arXiv 2508.09303) | .492 |",
        "| average |  | ours | .500 |",  # each set counts once, not each question
    ):
        assert row in text

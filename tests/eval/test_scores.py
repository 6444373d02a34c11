"""Figures about trajectories, by hand and by their definitions, and the tables made from them."""

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from helpers import PASSAGES

from psearch_jax.eval import tables
from psearch_jax.eval.scores import (
    by_graph,
    by_kind,
    em_interval,
    figures,
    finished_by_turn,
    from_row,
    majority_at,
    paired,
    pass_at,
    score,
    splitting,
    summarise,
    to_row,
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


# ---- figures ----


def test_summary_by_hand():
    """A wrong denominator, a search counted that never ran, or a missing answer taken for a right one."""
    assert summarise(FOUR) == {
        "em": 0.5,
        "f1": round((1 + 2 / 3 + 0 + 1) / 4, 6),
        "decomposition_ratio": 0.5,
        "searches": 1.0,
        "sub_queries": 2.0,
        "turns": 2.0,
        "tokens": (9 + 14 + 10 + 4) / 4,
        "context": 30.0,
        "valid_format": 0.5,
        "decomposition_accuracy": 0.75,
        "llm_calls": 8,
        "questions": 4,
    }
    assert summarise([]) == {"questions": 0}


def test_chance_level_is_reported_only_if_known_for_every_question():
    """A chance level shown for real questions, where it is unknown, because fictional ones have it."""
    known = [scored(answer("x"), id=i, chance=c) for i, c in enumerate((0.5, 0.25))]
    assert summarise(known)["chance"] == 0.375
    assert "chance" not in summarise([*known, scored(answer("x"), id=9)])
    lines = results_table({"mine": figures(known)}, "ours").splitlines()
    assert any(line.startswith("| mine | parallel | chance level | .375 |") for line in lines)
    assert len({line.count("|") for line in lines}) == 1
    assert "chance level" not in results_table({"mine": figures([SPLIT])}, "ours")


def test_initial_search_is_not_the_models():
    """With rollout.initial_search, a policy that never searches would appear to search and split."""
    means = summarise([scored(search("a", "b", n=0), answer("Ada Lovelace"))])
    assert (means["searches"], means["sub_queries"], means["decomposition_ratio"], means["turns"]) == (0, 0, 0, 1)


def test_only_the_first_search_decomposes():
    """The published rule looks at the first executed search; a later split must not count."""
    assert summarise([SLOW])["decomposition_ratio"] == 0
    assert summarise([LOST])["decomposition_ratio"] == 1


def test_by_kind_keeps_kinds_apart():
    """Single-hop questions averaged into the figures of parallel ones."""
    groups = by_kind(FOUR)
    assert list(groups) == ["parallel", "single"]
    assert len(groups["parallel"]) == 3 and summarise(groups["single"])["em"] == 1
    assert summarise(groups["parallel"])["em"] == pytest.approx(1 / 3, abs=1e-6)


def test_several_samples_are_one_question():
    """Counting samples as questions would make a small benchmark look large."""
    summary = summarise([SPLIT, scored(answer("Alan"), id=0, sample=1)])
    assert summary["questions"] == 1 and summary["em"] == 0.5


def test_finished_by_turn_is_cumulative():
    """The share must grow with the turns, and a trajectory without an answer never finishes."""
    assert finished_by_turn(FOUR) == [0.25, 0.5, 0.75, 0.75, 0.75, 0.75]
    assert finished_by_turn([]) == []


def test_numbers_that_broke_off_are_counted():
    """A run whose logits overflow scores a little lower, and nothing else would show it."""
    broken = scored(Turn("", "none", False, n_sampled=3), status="not_finite", id=4)
    report = figures([*FOUR, broken])
    assert report["all"]["not_finite"] == 1
    assert {kind: own["not_finite"] for kind, own in report["kinds"].items()} == {"parallel": 1, "single": 0}


def test_interval_of_em():
    """An interval that changes between runs, has the wrong width, or treats samples of a question as independent."""
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.6
    many = [scored(answer("Ada Lovelace" if r else "no"), id=i) for i, r in enumerate(right)]
    low, high = em_interval(many)
    assert [low, high] == em_interval(many)
    half_width = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 400)
    assert low == pytest.approx(right.mean() - half_width, abs=0.012)
    assert high == pytest.approx(right.mean() + half_width, abs=0.012)
    assert em_interval([SPLIT, SPLIT]) == [1, 1]
    copies = [scored(answer(s0.answer), id=s0.id, sample=s) for s0 in many for s in range(4)]
    low4, high4 = em_interval(copies)
    assert high4 - low4 == pytest.approx(high - low, abs=0.012), "copies of an answer must not narrow the interval"
    with pytest.raises(ValueError, match="no scores"):
        em_interval([])


# ---- several samples ----


def samples(right, wrong="no", id=0):
    """One question's samples, right where the list is true."""
    return [scored(answer("Ada Lovelace" if r else wrong), id=id, sample=i) for i, r in enumerate(right)]


def test_pass_at_k_is_the_share_of_drawn_sets():
    """The biased 1 - (1 - p)^k, or only the first k samples. Here all sets of k samples are enumerated instead."""
    right = [True, False, False, True, False]
    for k in (1, 2, 3, 5):
        subsets = list(combinations(right, k))
        assert pass_at(samples(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-6)
    two = samples(right) + samples([False] * 5, id=1)
    assert pass_at(two, 1) == pytest.approx(0.2, abs=1e-6), "pass@k must be the mean over questions"


def test_majority_at_k():
    """A vote that counts spellings separately, counts missing answers, or lets a later answer win a tie."""
    votes = ["Alan", "the Ada Lovelace", "ada lovelace", "Alan", None]
    group = [
        scored(answer(v) if v else Turn("", "none", False, n_sampled=1), id=0, sample=i) for i, v in enumerate(votes)
    ]
    assert [majority_at(group[::-1], k) for k in (1, 2, 3, 4, 5)] == [0, 0, 1, 0, 0]
    assert majority_at(group[-1:], 1) == 0


# ---- the decision to split ----


def test_splitting_by_hand():
    """Mixed questions counted as errors, no search counted as a split, or recall taken for precision."""
    scores = [
        *[scored(search("a", "b"), answer("x"), id=i) for i in range(3)],  # parallel, split
        scored(search("a"), answer("Ada Lovelace"), id=3),  # parallel, not split
        scored(search("a", "b"), answer("x"), kind="sequential", id=4),  # wrongly split
        scored(answer("x"), kind="sequential", id=5),
        scored(search("a"), search("b", "c"), answer("x"), kind="single", id=6),  # the second search does not count
        scored(search("a", "b"), answer("x"), kind="mixed", id=7),
    ]
    decisions = splitting(scores)
    assert decisions["confusion"] == {
        "parallel": {"split": 3, "not_split": 1, "no_search": 0},
        "sequential": {"split": 1, "not_split": 0, "no_search": 1},
        "single": {"split": 0, "not_split": 1, "no_search": 0},
        "mixed": {"split": 1, "not_split": 0, "no_search": 0},
    }
    assert (decisions["accuracy"], decisions["precision"], decisions["recall"]) == (round(5 / 7, 6), 0.75, 0.75)
    only_mixed = splitting(scores[-1:])
    assert (only_mixed["accuracy"], only_mixed["precision"], only_mixed["recall"]) == (None, None, None)


def test_controls_of_the_decision_to_split():
    """A policy that splits every question with the word "or" taken for one that recognizes dependencies."""
    comparison = scored(search("a", "b"), answer("x"), id=0, text="Who is older, Ada Lovelace or Alan Turing?")
    bridge = [
        scored(search("a"), answer("x"), id=1, kind="sequential", text="When was the mother of Ada Lovelace born?"),
        scored(search("a"), answer("x"), id=2, kind="sequential", text="Which war was between Rome and Carthage?"),
    ]
    rates = splitting([comparison, *bridge])
    assert (rates["accuracy"], rates["never_split"], rates["word_heuristic"]) == (
        1.0,
        round(2 / 3, 6),
        round(2 / 3, 6),
    )
    assert "| 1.000 | 1.000 | 1.000 | .667 | .667 |" in results({"2wiki": figures([comparison, *bridge])}, "us")


def test_two_evaluations_are_compared_kind_by_kind():
    """A gain on comparisons offset by a loss on sequential questions, in a table that shows only their average."""
    kinds = ("parallel", "sequential")
    first, second = (
        [replace(SPLIT, id=str(i), kind=kind, em=em) for i, (kind, em) in enumerate(zip(kinds, ems, strict=True))]
        for ems in ((0.0, 1.0), (1.0, 0.0))
    )
    compared = paired_table(("a", {"2wiki": first}), ("b", {"2wiki": second}))
    assert "| 2wiki | EM | 0.500 | 0.500 | +0.000 |" in compared
    assert "| 2wiki, parallel | EM | 0.000 | 1.000 | +1.000 |" in compared
    assert "| 2wiki, sequential | EM | 1.000 | 0.000 | -1.000 |" in compared


def test_splitting_by_manual_labels():
    """A comparison whose facts are in one passage, judged by its set's label instead of the manual one."""
    scores = [
        scored(search("a"), answer("x"), id=0, dependency="single"),
        scored(search("a", "b"), answer("x"), id=1, dependency="parallel"),
        scored(search("a"), answer("x"), id=2),  # without a manual label
    ]
    report = figures(scores)
    assert report["splitting"]["recall"] == round(1 / 3, 6)
    assert report["labels"]["recall"] == 1 and sum(map(len, report["labels"]["confusion"].values())) == 6
    assert "manual labels" in results({"hotpotqa": report}, "us")


def test_graphs_of_musique():
    """Questions with a branching graph lost among the chains."""
    scores = [
        scored(search("a", "b"), answer("Ada Lovelace"), kind="mixed", id=0, graph="3hop2"),
        scored(search("a"), answer("x"), kind="sequential", id=1, graph="2hop"),
    ]
    rows = by_graph(scores)
    assert list(rows) == ["2hop", "3hop2"] and by_graph([SPLIT]) == {}
    assert rows["3hop2"] == {
        "hops": 3,
        "rounds": 2,
        "width": 2,
        "questions": 1,
        "em": 1.0,
        "decomposition_ratio": 1.0,
        "searches": 1.0,
    }
    assert "3hop2" in results({"musique": figures(scores)}, "us")


# ---- two methods ----


def test_paired_difference_against_the_exact_test():
    """An interval that ignores the pairing, or a wrong p: with few questions, the sign flips can be enumerated."""
    first = [scored(answer("no"), id=i) for i in range(8)]
    second = [scored(answer("Ada Lovelace" if i < 6 else "no"), id=i) for i in range(8)]
    stats = paired(first, second[::-1])
    assert (stats["first"], stats["second"], stats["difference"], stats["questions"]) == (0, 0.75, 0.75, 8)
    assert stats["p"] == pytest.approx(2 / 2**6, abs=0.005), "p must be the chance that six signs agree"
    assert 0.37 <= stats["low"] <= 0.5 and stats["high"] == 1
    assert math.isnan(stats["ratio"]) and paired(first, second) == pytest.approx(stats, nan_ok=True)
    assert paired(first, first)["p"] == 1


def test_paired_interval_has_the_textbook_width():
    """An unpaired bootstrap is wider: two methods that agree on most questions would never differ."""
    rng = np.random.default_rng(1)
    base = rng.random(500) < 0.5
    flip = rng.random(500) < 0.1
    pairs = list(zip(base, flip, strict=True))
    first = [scored(answer("Ada Lovelace" if r else "no"), id=i) for i, r in enumerate(base)]
    second = [scored(answer("Ada Lovelace" if r or f else "no"), id=i) for i, (r, f) in enumerate(pairs)]
    stats, difference = paired(first, second), (base | flip).astype(float) - base
    half_width = 1.96 * difference.std() / np.sqrt(500)
    assert stats["difference"] == pytest.approx(difference.mean(), abs=1e-6)
    assert stats["high"] - stats["low"] == pytest.approx(2 * half_width, rel=0.1)
    assert stats["low"] > 0 and stats["p"] < 0.001


def test_ratio_of_turns():
    """The paper's saving is a ratio of means, not a mean of ratios."""
    first = [scored(search("a"), search("b"), answer("x"), id=0), scored(answer("x"), id=1)]
    second = [scored(search("a", "b"), answer("x"), id=0), scored(answer("x"), id=1)]
    assert paired(first, second, "turns")["ratio"] == 0.75


def test_other_questions_cannot_be_compared():
    """Two evaluations of different samples of a set, compared as if they were paired."""
    with pytest.raises(UserError, match="2 questions are in one evaluation only"):
        paired([SPLIT], [SLOW])
    with pytest.raises(UserError, match="no benchmark in common"):
        paired_table(("a", {"nq": [SPLIT]}), ("b", {"popqa": [SPLIT]}))
    assert "| nq | EM | 1.000 | 1.000 | +0.000 |" in paired_table(("a", {"nq": [SPLIT]}), ("b", {"nq": [SPLIT]}))


# ---- on disk and in tables ----


def test_parts_of_a_structured_answer():
    """A long answer that is right but for one value would count as nothing, or a part of a word as found."""
    parts = ["Rhine", "1,233", "Elbe", "yes"]
    scores = [
        scored(answer("The Rhine: 1233 km; the Elbeblick: yes"), id=1, answer_parts=parts),
        scored(search("a"), status="out_of_turns", id=2, answer_parts=parts),
    ]
    assert [s.loose for s in scores] == [0.75, 0.0] and DIRECT.loose is None
    report = figures(scores)
    assert report["all"]["loose_accuracy"] == 0.375 and "loose_accuracy" not in figures([*scores, DIRECT])["all"]
    assert "| rivers | .375 |" in results({"rivers": report}, "p") and "parts of" not in results(
        {"other": figures([DIRECT])}, "p"
    )


def test_scores_come_back_from_disk():
    """A resumed evaluation whose figures differ because a field was lost or rounded."""
    for original in (*FOUR, scored(answer("x"), kind="mixed", id=9, graph="4hop2", dependency="mixed")):
        assert from_row(json.loads(json.dumps({"question": "?", **to_row(original)}))) == original


def test_a_bar_in_a_name_does_not_shift_the_cells():
    """A benchmark or directory named `a|b` gives a row more cells than the table has columns, in the page too."""
    text = tables.table([["name", "EM"], ["a|b", ".5"], ["c", ""]])
    assert [cells_of(line) for line in text.splitlines()] == [["name", "EM"], ["---", "---"], ["a|b", ".5"], ["c", ""]]


def test_results_table():
    """Rows that do not fit the header, or a set's published average shown next to a single kind of question."""
    mixed = [scored(answer("Ada Lovelace"), id=i, kind=kind) for i, kind in enumerate(("parallel", "sequential"))]
    table = results_table({"HotpotQA": figures(mixed), "mine": figures([DIRECT])}, "this policy")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {len(row) for row in rows} == {13}
    ours = [row[:2] for row in rows if row[2] == "this policy"]
    assert ours[:-1] == [["HotpotQA", "all"], ["HotpotQA", "parallel"], ["HotpotQA", "sequential"], ["mine", "single"]]
    assert ours[-1] == ["average", ""]
    theirs = [row for row in rows if "published" in row[2]]
    assert len([r for r in theirs if r[1] == "all"]) == 9 and len([r for r in theirs if r[1] == "parallel"]) == 4
    only_parallel = results_table({"HotpotQA": figures(mixed[:1])}, "this policy")
    assert "| all |" not in only_parallel and "| .656 |" in only_parallel and ".429" not in only_parallel


def test_averages_stand_beside_the_published_ones():
    """The paper's average over seven sets shown next to an average over other sets."""
    sets = ("nq", "TriviaQA", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")
    every = {name: figures([DIRECT]) for name in sets}
    table = results_table(every, "us")
    assert "| average |  | ParallelSearch, Qwen2.5-7B (published, arXiv 2508.09303) | .458 |" in table
    assert "| average |  | us | 1.000 |" in table
    del every["nq"]
    assert ".458" not in results_table(every, "us")


def merged_scores():
    """One benchmark with two questions of one set, answered right, and one of another, answered wrong."""
    kinds = [("nq", "single", 1.0), ("nq", "single", 1.0), ("hotpotqa", "parallel", 0.0)]
    return [replace(SPLIT, source=s, id=str(i), kind=kind, em=em) for i, (s, kind, em) in enumerate(kinds)]


def test_a_merged_file_reports_by_source():
    """Seven sets in one test file reported as a single figure, which cannot be compared with published ones."""
    report = figures(merged_scores())
    assert {name: (v["all"]["em"], v["all"]["questions"]) for name, v in report["sources"].items()} == {
        "nq": (1.0, 2),
        "hotpotqa": (0.0, 1),
    }
    assert "sources" not in figures(merged_scores()[:2])
    text = results_table({"test": report}, "ours")
    assert "| test | all | ours | .667 |" in text and "| test: nq | single | ours | 1.000 |" in text
    assert "| test: hotpotqa | parallel | ours | .000 |" in text
    assert "| test: nq | all | ParallelSearch, Qwen2.5-7B (published, arXiv 2508.09303) | .492 |" in text
    assert "| average |  | ours | .500 |" in text  # each set counts once, not each question
    compared = paired_table(("a", {"test": merged_scores()}), ("b", {"test": merged_scores()}))
    assert "| test | EM | 0.667 |" in compared and "| test: nq | EM | 1.000 |" in compared


def test_pass_at_in_the_tables():
    """Requested figures that appear in no table."""
    text = results({"nq": figures(samples([True, False, False]), (1, 3))}, "us")
    assert "| benchmark | pass@1 | pass@3 | maj@1 | maj@3 |" in text and "| nq | .333 | 1.000 | 1.000 | .000 |" in text

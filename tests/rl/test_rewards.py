"""The reward: `paper` by hand-worked cases, `compat` against scores of the public implementation."""

import json
from dataclasses import replace

import numpy as np
import pytest

from psearch_jax.assembly import build
from psearch_jax.config import Config, RewardSection, from_mapping
from psearch_jax.rl.compat import parse_transcript, valid_transcript
from psearch_jax.rl.rewards import Reward
from psearch_jax.train.rollouts import compute_advantages
from psearch_jax.types import TOOL_ERROR, Question, Trajectory, Turn
from retrieval.protocol import Passage

WEIGHTS = RewardSection()  # format 0.1, final_format 0, decomposition 0.15, search_count 0.35


def trajectory(kind, searches, answer, well_formed=True):
    """One turn per entry of `searches` (its number of sub-queries; 0: no search ran), then the answer, if any."""
    turns = []
    for n in searches:
        turns.append(Turn("", "search" if n else "none", n > 0, tuple(f"q{i}" for i in range(n)), n_sampled=9))
    if answer is not None:
        turns.append(Turn("", "answer", well_formed, answer=answer, n_sampled=5))
    status = "answered" if answer is not None else "out_of_turns"
    empty = np.zeros(0)
    question = Question("s", "1", "q?", ("Ada Lovelace", "Ada"), kind)
    return Trajectory(question, 0, status, tuple(turns), empty, empty, empty, 0)


def paper_reward(rollout, section):
    """The reward of a rollout that is the only one of its group."""
    return Reward(section)([rollout])[0]


# kind, sub-queries per turn, answer, last turn well formed, (outcome, format, decomposition, search count)
CASES = [
    # Outcome and format, on a parallel question split in one search: decomposition 3 * .15, search count .35.
    ("parallel", [2], "Ada Lovelace", True, (1, 0, 0.45, 0.35)),
    ("parallel", [2], "Ada", False, (1, -0.1, 0.45, 0.35)),
    ("parallel", [2], "Alan", True, (0, 0.1, 0.45, 0.35)),
    ("parallel", [2], "Alan", False, (0, 0, 0.45, 0.35)),
    ("parallel", [2], None, True, (0, 0, 0.45, 0.35)),
    ("parallel", [2, 0], "Ada", True, (1, -0.1, 0.45, 0.35)),  # an ill-formed turn fails the format and is no search
    # Decomposition of a parallel question: only the first search counts.
    ("parallel", [1], "Ada", True, (1, 0, 0, 0.35)),
    ("parallel", [3], "Ada", True, (1, 0, 0.45, 0.35)),
    ("parallel", [1, 2], "Ada", True, (1, 0, 0, 0)),
    ("parallel", [2, 1], "Ada", True, (1, 0, 0.45, 0)),
    # Number of searches of a parallel question: .35 * (1 - |n - 1|).
    ("parallel", [], "Ada", True, (1, 0, 0, 0)),
    ("parallel", [2, 1, 1], "Ada", True, (1, 0, 0.45, -0.35)),
    # Sequential: .15 for not splitting, .35 * (1 - max(0, 2 - n)).
    ("sequential", [1, 1], "Ada", True, (1, 0, 0.15, 0.35)),
    ("sequential", [1, 1, 1, 1], "Ada", True, (1, 0, 0.15, 0.35)),
    ("sequential", [1], "Ada", True, (1, 0, 0.15, 0)),
    ("sequential", [], "Ada", True, (1, 0, 0.15, -0.35)),
    ("sequential", [2, 1], "Ada", True, (1, 0, 0, 0.35)),
    ("sequential", [2], None, True, (0, 0, 0, 0)),
    # Single: .15 for not splitting, .35 * (1 - |n - 1|).
    ("single", [1], "Ada", True, (1, 0, 0.15, 0.35)),
    ("single", [2], "Ada", True, (1, 0, 0, 0.35)),
    ("single", [1, 1], "Ada", True, (1, 0, 0.15, 0)),
    ("single", [], "", True, (0, 0.1, 0.15, 0)),
    ("single", [], None, True, (0, 0, 0.15, 0)),
    # Mixed: as sequential.
    ("mixed", [1, 1], "Ada", True, (1, 0, 0.15, 0.35)),
    ("mixed", [2, 2], "Ada", True, (1, 0, 0, 0.35)),
]


@pytest.mark.parametrize("kind, searches, answer, well_formed, expected", CASES)
def test_paper_reward(kind, searches, answer, well_formed, expected):
    """The published rule, case by case."""
    rollout = trajectory(kind, searches, answer, well_formed)
    parts = paper_reward(rollout, WEIGHTS)
    assert (
        parts.terms["outcome"],
        parts.terms["format"],
        parts.terms["decomposition"],
        parts.terms["search_count"],
    ) == pytest.approx(expected)
    assert parts.total == pytest.approx(sum(expected))
    bonuses = parts.terms["decomposition"] + parts.terms["search_count"]
    assert parts.total == parts.terms["outcome"] + parts.terms["format"] + bonuses  # to the bit


@pytest.mark.parametrize("well_formed", [False, True])
def test_f1_as_the_outcome_lies_between_wrong_and_right(well_formed):
    """A better answer earns more."""
    answers = ("Alan", "Lovelace Byron King", "Ada Byron", "Ada Lovelace")
    rollouts = [trajectory("parallel", [2], answer, well_formed) for answer in answers]
    parts = [paper_reward(t, RewardSection(outcome="f1")) for t in rollouts]
    assert [p.terms["outcome"] for p in parts] == pytest.approx([0, 0.4, 2 / 3, 1])
    assert [parts[0], parts[-1]] == [paper_reward(t, WEIGHTS) for t in (rollouts[0], rollouts[-1])]
    totals = [p.total for p in parts]
    assert totals == sorted(totals) and len(set(totals)) == 4


def test_every_sub_query_has_its_price():
    """The price does not depend on how sub-queries are grouped into searches."""
    priced = RewardSection(sub_query_penalty=0.05, critical_path=0.5)
    plain = replace(priced, sub_query_penalty=0.0)
    for searches, sub_queries in (([], 0), ([2], 2), ([1, 1], 2), ([2, 1], 3)):
        t = trajectory("sequential", searches, "Ada")
        assert paper_reward(t, priced).total == pytest.approx(paper_reward(t, plain).total - 0.05 * sub_queries)


def test_a_failed_call_earns_nothing():
    """A policy could earn the bonuses for searching and splitting with calls that are refused."""
    found, failed = (Passage("1", "Ada", "1815"),), (Passage(TOOL_ERROR, "", "error: no tool"),)
    one, none = (trajectory("parallel", searches, "Alan") for searches in ([1], []))
    for passages, equal in (((found, failed), one), ((failed, failed), none)):
        turns = trajectory("parallel", [2], "Alan").turns
        t = replace(one, turns=(replace(turns[0], passages=passages), turns[1]))
        for section in (WEIGHTS, RewardSection(no_search_penalty=0.2, sub_query_penalty=0.1)):
            assert paper_reward(t, section).terms == pytest.approx(paper_reward(equal, section).terms)


@pytest.mark.parametrize(
    "kind, searches, answer, outcome, share",
    [
        ("parallel", [2], "Ada", "em", 1),
        ("parallel", [2], "Alan", "em", 0),
        ("single", [], "Ada", "em", 0),
        ("sequential", [], "Ada", "em", 0),
        ("parallel", [2], "Lovelace Byron King", "f1", 0.4),
        ("parallel", [1] * 5, "Alan", "em", 0),
    ],
)
def test_gated_bonuses_need_a_search_and_the_right_answer(kind, searches, answer, outcome, share):
    """Both bonuses are multiplied by the outcome; the price of a sub-query and of too many searches is not."""
    plain = RewardSection(outcome=outcome)
    free, gated = (paper_reward(trajectory(kind, searches, answer), s) for s in (plain, replace(plain, gated=True)))
    decomposition, count = free.terms["decomposition"], free.terms["search_count"]
    paid = share * decomposition, share * count if count > 0 else count
    assert (gated.terms["decomposition"], gated.terms["search_count"]) == pytest.approx(paid)
    assert (gated.terms["outcome"], gated.terms["format"]) == (free.terms["outcome"], free.terms["format"])
    priced = paper_reward(trajectory(kind, searches, answer), replace(plain, gated=True, sub_query_penalty=0.1))
    assert priced.total == pytest.approx(gated.total - 0.1 * sum(searches))


ADA, ALAN = Passage("1", "Ada", "Ada was born in 1815."), Passage("2", "Alan (man)", "He was born on June 23, 1912.")
BOTH = {"evidences": [["Ada", "birth year", "1815"], ["Alan", "date of birth", "23 June 1912"]]}


@pytest.mark.parametrize(
    "shown, metadata, sampled, recall",
    [
        ((ADA.text, f"({ALAN.title}) {ALAN.text}"), BOTH, 9, 1),
        ((ADA.text, f"({ALAN.title}) He was born on June"), BOTH, 9, 0.5),  # cut before the value
        ((ADA.text,), BOTH, 9, 0.5),
        ((ADA.text,), BOTH, 0, 0),  # not the model's own search
        ((ADA.text,), {"evidences": [["Alan", "birth year", "1815"]]}, 9, 0),  # stated of another entity
        ((ADA.text,), {"rounds": [[["birth year", "Ada", "1815"]], [["heir", "1815", "Ada"]]]}, 9, 0.5),
        ((ADA.text,), {}, 9, 1),  # without triples: an answer was shown
        (("Ada said yes",), {}, 9, 0),  # any text may contain a yes
    ],
)
def test_evidence_counts_if_it_was_shown(shown, metadata, sampled, recall):
    """What was retrieved but cut, or is about another entity, does not count; a wrong answer earns it as well."""
    t = trajectory("single", [1], "Alan")
    search = replace(t.turns[0], passages=((ADA, ALAN),), shown=(shown,), n_sampled=sampled)
    question = replace(t.question, answers=("1815", "yes"), metadata=metadata)
    rollout = replace(t, question=question, turns=(search, t.turns[1]))
    (parts,), (free,) = (Reward(replace(WEIGHTS, evidence=weight))([rollout]) for weight in (0.5, 0.0))
    assert parts.terms["evidence"] == 0.5 * recall and parts.total == pytest.approx(free.total + 0.5 * recall)


def with_turns(searches, answer="Ada", question="1"):
    """A trajectory with these searches (`trajectory`) of a named question."""
    t = trajectory("single", searches, answer)
    return replace(t, question=replace(t.question, id=question))


def test_a_critical_path_is_rewarded_without_labels():
    """Only right answers to the same question are compared, and the bonus reaches the advantages."""
    section = RewardSection(critical_path=0.4)
    rollouts = [
        with_turns([2]),  # 2 model turns
        with_turns([1, 1]),  # 3
        with_turns([1, 1, 1]),  # 4: the mean of the right answers is 3
        with_turns([], "Bob"),  # wrong after a single turn
        with_turns([1], question="2"),  # the only right answer of its group
        with_turns([1], "Bob", question="2"),
        with_turns([], question="3"),  # 1 turn; the mean is 5.5, so both reach the limit
        with_turns([1] * 9, question="3"),
    ]
    relabelled = [replace(t, question=replace(t.question, kind="parallel")) for t in rollouts]
    rewards = Reward(section)(rollouts)
    assert all(p.terms["decomposition"] == p.terms["search_count"] == 0 for p in rewards)
    bonuses = [p.terms["critical_path"] for p in rewards]
    np.testing.assert_allclose(bonuses, [0.4 / 3, 0, -0.4 / 3, 0, 0, 0, 0.2, -0.2], atol=1e-12)
    without = [paper_reward(t, section).total for t in rollouts]
    np.testing.assert_allclose([p.total for p in rewards], np.add(bonuses, without))
    assert Reward(section)(relabelled) == rewards
    assert Reward(WEIGHTS)(rollouts) == [paper_reward(t, WEIGHTS) for t in rollouts]
    advantages = compute_advantages(rollouts, rewards, Config())
    assert advantages[0] > advantages[1] > advantages[2]


@pytest.mark.parametrize("name, charged", [("unfinished", (0, 1, 0, 1)), ("no_search", (0, 0, 1, 0))])
def test_penalties_of_no_answer_and_of_no_search(tiny_tokenizer, name, charged):
    """Each is part of the total, in both profiles; an answer without a search pays, no answer without one does not."""
    prompt = tiny_tokenizer.encode_trusted(PROMPT)
    rollouts = [
        replace(trajectory("single", searches, answer), ids=np.array(prompt), prompt_length=len(prompt))
        for searches in ([1], [])
        for answer in ("Ada", None)
    ]
    for profile in ("paper", "compat"):
        free, paid = (
            build.make_reward(
                from_mapping({"reward": {"profile": profile, f"{name}_penalty": penalty}}), tiny_tokenizer, ()
            )(rollouts)
            for penalty in (0.0, 0.3)
        )
        differences = [b.total - a.total for a, b in zip(free, paid, strict=True)]
        assert differences == pytest.approx([-0.3 * times for times in charged])


# --- compat ---


def compat_score(prompt, response, golds, kind, weights):
    empty = np.zeros(0)
    rollout = Trajectory(Question("s", "1", "q?", tuple(golds), kind), 0, "answered", (), empty, empty, empty, 0)
    return Reward(weights, lambda t, _: parse_transcript(prompt, response, t))([rollout])[0]


def test_compat_reproduces_the_public_scores(shared_data):
    """1,500 scores of the public implementation, quirks included."""
    rows = [json.loads(line) for line in (shared_data / "reward_vectors.jsonl").read_text().splitlines()]
    ours = [
        compat_score(r["prompt"], r["response"], r["golden_answers"], r["kind"], RewardSection(**r["weights"])).total
        for r in rows
    ]
    assert len(rows) == 1500
    np.testing.assert_allclose(ours, [r["score"] for r in rows], rtol=0, atol=1e-6)


PROMPT = (
    "<search> a </search> <search> b ## c </search> <answer> and <answer> Beijing </answer><|im_start|>assistant\n"
)
INFO = "<information>x</information>"


@pytest.mark.parametrize(
    "response, valid",
    [
        ("<think>a</think><answer>b</answer>", True),
        (f"<think>a</think> <search>b</search>\n{INFO}\n<think>c</think><answer>d</answer> ", True),
        (f"<think>a</think><search>b</search>{INFO}<answer>d</answer>", False),
        ("<think>a</think><search>b</search><think>c</think><answer>d</answer>", False),
        ("<think>a</think><answer>b</answer> c", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a</think> b <answer>c</answer>", False),
        ("<answer>c</answer>", False),
        ("<think>a<think>b</think><answer>c</answer>", False),
        ("<think>a</think><answer>b", False),
        ("<think>a</think>", False),
        ("", False),
    ],
)
def test_valid_transcript(response, valid):
    """The grammar accepts a response after its prompt only if every turn is well formed."""
    assert valid_transcript(PROMPT + response) is valid
    assert not valid_transcript(response)


def test_compat_quirks():
    """It reads the prompt's examples as if the policy had written them."""
    golds, bare = ("Beijing",), RewardSection(format=0.1, decomposition=0, search_count=0)
    two_answers = "<answer> x </answer> <answer> Beijing </answer><|im_start|>assistant\n"
    assert compat_score(two_answers, "", golds, "single", bare).total == 0.9
    assert compat_score("<|im_start|>assistant\n", "<answer>Beijing</answer>", golds, "single", bare).total == 0
    count = RewardSection(format=0, decomposition=0, search_count=1)
    assert compat_score("", "", golds, "single", count).total == -2  # no example searches: n = -2
    split = RewardSection(format=0, decomposition=1, search_count=0)
    assert compat_score(PROMPT, "<search> a ## </search>", golds, "parallel", split).total == 3
    assert compat_score(PROMPT, "<search> </search><search> a ## b </search>", golds, "parallel", split).total == 0
    assert compat_score(PROMPT, "<search> a", golds, "mixed", split) == compat_score(
        PROMPT, "", golds, "sequential", split
    )


def test_compat_reads_the_prompt_and_the_reply_of_a_rollout(tiny_tokenizer):
    """The prompt counts once, and the stop token of the reply does not break the grammar."""
    reply = "<think>a</think><search>b ## c</search>" + INFO + "<think>d</think><answer>Ada</answer>"
    prompt, rest = map(tiny_tokenizer.encode_trusted, (PROMPT, reply + "<|im_end|>"))
    t = replace(trajectory("parallel", [2], "Ada"), ids=np.array(prompt + rest, np.int32), prompt_length=len(prompt))
    parts = build.make_reward(from_mapping({"reward": {"profile": "compat"}}), tiny_tokenizer, ())([t])[0]
    assert (parts.terms["outcome"], parts.terms["format"]) == (1, 0)
    assert (parts.terms["decomposition"], parts.terms["search_count"]) == pytest.approx((0.45, 0.35))


def test_a_rollout_that_is_not_finite_changes_no_advantage_of_a_step():
    """It gets 0 and does not count towards the baseline of its question."""
    others, broken = [with_turns([1]), with_turns([1], "Bob")], replace(with_turns([], None), status="not_finite")
    advantages = [
        compute_advantages(rollouts, Reward(WEIGHTS)(rollouts), Config()).tolist()
        for rollouts in (others, [*others, broken])
    ]
    assert advantages[1] == [*advantages[0], 0.0] and advantages[0][0] > 0

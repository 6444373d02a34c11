"""The reward: `paper` by hand-worked cases, `compat` against scores of the public implementation."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rendered import parse_transcript

from psearch_jax.assembly import build
from psearch_jax.config import Config, RewardSection, from_mapping
from psearch_jax.rl.compat import check_examples, compat_score, valid_transcript
from psearch_jax.rl.rewards import PaperReward, format_part, paper_reward
from psearch_jax.text.prompts import load_template
from psearch_jax.train.rollouts import compute_advantages
from psearch_jax.types import Question, Trajectory, Turn, UserError
from retrieval.protocol import Passage

WEIGHTS = RewardSection()  # format 0.1, final_format 0, decomposition 0.15, search_count 0.35


def trajectory(kind, searches, answer, well_formed=True, initial=False):
    """One turn per entry of `searches` (its number of sub-queries; 0: no search ran), then the answer, if any."""
    turns = []
    if initial:
        turns.append(Turn("", "search", True, ("the question",), ((Passage("1", "t", "x"),),), n_sampled=0))
    for n in searches:
        turns.append(Turn("", "search" if n else "none", n > 0, tuple(f"q{i}" for i in range(n)), n_sampled=9))
    if answer is not None:
        turns.append(Turn("", "answer", well_formed, answer=answer, n_sampled=5))
    status = "answered" if answer is not None else "out_of_turns"
    empty = np.zeros(0)
    question = Question("s", "1", "q?", ("Ada Lovelace", "Ada"), kind)
    return Trajectory(question, 0, status, tuple(turns), empty, empty, empty, 0)


# kind, sub-queries per turn, answer, last turn well formed, (outcome, format, decomposition, search count)
CASES = [
    # Outcome and format, on a parallel question split in one search: decomposition 3 * .15, search count .35.
    ("parallel", [2], "Ada Lovelace", True, (1, 0, 0.45, 0.35)),
    ("parallel", [2], "the ADA.", True, (1, 0, 0.45, 0.35)),
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
    ("parallel", [2, 1, 1, 1], "Ada", True, (1, 0, 0.45, -0.7)),
    # Sequential: .15 for not splitting, .35 * (1 - max(0, 2 - n)).
    ("sequential", [1, 1], "Ada", True, (1, 0, 0.15, 0.35)),
    ("sequential", [1, 1, 1, 1], "Ada", True, (1, 0, 0.15, 0.35)),
    ("sequential", [1], "Ada", True, (1, 0, 0.15, 0)),
    ("sequential", [], "Ada", True, (1, 0, 0.15, -0.35)),
    ("sequential", [2, 1], "Ada", True, (1, 0, 0, 0.35)),
    ("sequential", [1, 2], "Ada", True, (1, 0, 0.15, 0.35)),
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
    parts = paper_reward(trajectory(kind, searches, answer, well_formed), WEIGHTS)
    assert (parts.outcome, parts.format, parts.decomposition, parts.search_count) == pytest.approx(expected)
    assert parts.total == pytest.approx(sum(expected))


def test_f1_as_the_outcome_lies_between_wrong_and_right():
    """A better answer never earns less."""
    totals = []
    for answer in ("Alan", "Lovelace Byron King", "Ada Byron", "Ada Lovelace"):
        for well_formed in (False, True):
            t = trajectory("parallel", [2], answer, well_formed)
            parts = paper_reward(t, RewardSection(outcome="f1"))
            totals.append((parts.outcome, well_formed, parts.total))
            if answer in ("Alan", "Ada Lovelace"):
                assert parts == paper_reward(t, WEIGHTS)
    outcomes = [outcome for outcome, _, _ in totals[::2]]
    assert outcomes == pytest.approx([0, 0.4, 2 / 3, 1])
    for well_formed in (False, True):
        paid = [total for _, formed, total in totals if formed == well_formed]
        assert paid == sorted(paid) and len(set(paid)) == 4


def test_every_sub_query_has_its_price():
    """The price does not depend on how sub-queries are grouped into searches."""
    priced = RewardSection(sub_query_penalty=0.05, critical_path=0.5)
    plain = replace(priced, sub_query_penalty=0.0)
    for searches, sub_queries in (([], 0), ([2], 2), ([1, 1], 2), ([2, 1], 3)):
        t = trajectory("sequential", searches, "Ada")
        assert paper_reward(t, priced).total == pytest.approx(paper_reward(t, plain).total - 0.05 * sub_queries)


def test_format_by_the_answers_worth():
    """Half right is half of each rule."""
    weights = RewardSection(format=0.2, final_format=0.3)
    ill = [format_part(worth, True, False, weights) for worth in (0.0, 0.5, 1.0)]
    assert ill == pytest.approx([0.3, 0.15 - 0.1, -0.2])
    assert [format_part(worth, True, True, weights) for worth in (0.0, 0.5, 1.0)] == pytest.approx([0.2, 0.1, 0.0])
    assert format_part(0.0, False, False, weights) == 0


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
    rewards = PaperReward(section)(rollouts)
    assert all(p.decomposition == p.search_count == 0 for p in rewards)
    bonuses = [p.critical_path for p in rewards]
    np.testing.assert_allclose(bonuses, [0.4 / 3, 0, -0.4 / 3, 0, 0, 0, 0.2, -0.2], atol=1e-12)
    without = [paper_reward(t, section).total for t in rollouts]
    np.testing.assert_allclose([p.total for p in rewards], np.add(bonuses, without))
    assert PaperReward(section)(relabelled) == rewards
    assert PaperReward(WEIGHTS)(rollouts) == [paper_reward(t, WEIGHTS) for t in rollouts]
    advantages = compute_advantages(rollouts, rewards, Config())
    assert advantages[0] > advantages[1] > advantages[2]


def test_a_rollout_without_an_answer_pays_for_it(tiny_tokenizer):
    """`unfinished_penalty` is part of its total, in both profiles."""
    prompt = tiny_tokenizer.encode_trusted(PROMPT)
    rollouts = [
        replace(trajectory("single", [1], a), ids=np.array(prompt), prompt_length=len(prompt)) for a in ("Ada", None)
    ]
    for profile in ("paper", "compat"):
        free, charged = (
            build.make_reward(
                from_mapping({"reward": {"profile": profile, "unfinished_penalty": penalty}}), tiny_tokenizer
            )(rollouts)
            for penalty in (0.0, 0.3)
        )
        assert [b.total - a.total for a, b in zip(free, charged, strict=True)] == pytest.approx([0, -0.3])


def test_initial_search_is_not_counted():
    """The initial search is not the policy's action."""
    for kind, searches in [("parallel", [2]), ("sequential", [1]), ("single", [])]:
        plain = paper_reward(trajectory(kind, searches, "Ada"), WEIGHTS)
        assert paper_reward(trajectory(kind, searches, "Ada", initial=True), WEIGHTS) == plain


# --- compat ---


def test_compat_reproduces_the_public_scores(shared_data):
    """1,500 scores of the public implementation, quirks included."""
    rows = [json.loads(line) for line in (shared_data / "reward_vectors.jsonl").read_text().splitlines()]
    ours = [
        compat_score(r["prompt"], r["response"], r["golden_answers"], r["kind"], RewardSection(**r["weights"])).total
        for r in rows
    ]
    assert len(rows) == 1500
    np.testing.assert_allclose(ours, [r["score"] for r in rows], rtol=0, atol=1e-6)


def test_both_profiles_agree_on_clean_transcripts(shared_data):
    """Where prompt and response have none of the quirks."""
    clean = 0
    for line in (shared_data / "reward_vectors.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, response = row["prompt"], row["response"]
        question = Question("v", "1", row["question"], tuple(row["golden_answers"]), row["kind"])
        parsed = parse_transcript(question, response)
        contents = [part.split("</search>")[0] for part in response.split("<search>")[1:]]
        as_written = [len(turn.queries) for turn in parsed.executed] == [text.count("##") + 1 for text in contents]
        usual_prompt = prompt.count("<search>") == 2 and "<answer>" in prompt and "<|im_start|>assistant" in prompt
        if usual_prompt and as_written and parsed.answer is not None and response.count("<answer>") == 1:
            weights = RewardSection(**row["weights"])
            theirs = compat_score(prompt, response, question.answers, question.kind, weights)
            assert paper_reward(parsed, weights) == theirs, response
            clean += 1
    assert clean > 300


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
    """The transcript's grammar and the check of turns accept the same responses."""
    assert valid_transcript(PROMPT + response) is valid
    assert not valid_transcript(response)
    question = Question("v", "1", "q", ("x",), "single")
    assert parse_transcript(question, response).well_formed is valid


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


@pytest.mark.parametrize(
    ("template", "outcome_only", "accepted"),
    [
        ("parallel", False, True),
        ("sequential", False, False),  # one example search
        ("sequential", True, True),  # the search count is not rewarded then
        ("direct", False, False),
        ("direct", True, True),
        ("published", False, True),
        ("published_sequential", True, True),
        ("toy", True, False),  # no example answer: the right answer would be taken for one
    ],
)
def test_a_prompt_without_the_examples_is_refused(template, outcome_only, accepted):
    """Under such a prompt a right answer, or the right number of searches, would earn nothing."""
    weights = RewardSection(decomposition=0, search_count=0) if outcome_only else WEIGHTS
    text = load_template(template)
    right = "<think>a</think><search>b ## c</search>" + INFO + "<think>d</think><answer>Ada</answer>"
    paid = compat_score(text + "<|im_start|>assistant\n", right, ("Ada",), "parallel", weights).total
    full = 1.0 if outcome_only else 1.0 + 3 * WEIGHTS.decomposition + WEIGHTS.search_count
    assert (paid == pytest.approx(full)) is accepted
    if accepted:
        check_examples(text, weights, "prompt")
        return
    reward = {"profile": "compat"} | ({"decomposition": 0.0, "search_count": 0.0} if outcome_only else {})
    config = from_mapping({"reward": reward, "data": {"template": template}})
    with pytest.raises(UserError, match=f"config.data.template={template}: found .* at least one <answer>") as caught:
        build.training_run(config)
    assert ("exactly 2 times <search>" in str(caught.value)) is not outcome_only


def test_compat_reads_the_prompt_and_the_reply_of_a_rollout(tiny_tokenizer):
    """The prompt counts once, and the stop token of the reply does not break the grammar."""
    reply = "<think>a</think><search>b ## c</search>" + INFO + "<think>d</think><answer>Ada</answer>"
    prompt, rest = map(tiny_tokenizer.encode_trusted, (PROMPT, reply + "<|im_end|>"))
    t = replace(trajectory("parallel", [2], "Ada"), ids=np.array(prompt + rest, np.int32), prompt_length=len(prompt))
    parts = build.make_reward(from_mapping({"reward": {"profile": "compat"}}), tiny_tokenizer)([t])[0]
    assert (parts.outcome, parts.format) == (1, 0)
    assert (parts.decomposition, parts.search_count) == pytest.approx((0.45, 0.35))


def test_a_rollout_that_is_not_finite_changes_no_advantage_of_a_step():
    """It gets 0 and does not count towards the baseline of its question."""
    others, broken = [with_turns([1]), with_turns([1], "Bob")], replace(with_turns([], None), status="not_finite")
    advantages = [
        compute_advantages(rollouts, PaperReward(WEIGHTS)(rollouts), Config()).tolist()
        for rollouts in (others, [*others, broken])
    ]
    assert advantages[1] == [*advantages[0], 0.0] and advantages[0][0] > 0

"""The reward: `paper` by hand-worked cases, `compat` against scores of the public implementation."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rendered import parse_transcript

from psearch_jax.assembly import build
from psearch_jax.config import Config, RewardSection, from_mapping
from psearch_jax.rl.compat import check_examples, compat_reward, compat_score, valid_transcript
from psearch_jax.rl.rewards import format_part, length_penalty, paper_reward, with_critical_path
from psearch_jax.text.prompts import load_template
from psearch_jax.train import rollouts as stage
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
    """A wrong sign or swapped kinds would teach the opposite behaviour, and no curve would show why."""
    parts = paper_reward(trajectory(kind, searches, answer, well_formed), WEIGHTS)
    assert (parts.outcome, parts.format, parts.decomposition, parts.search_count) == pytest.approx(expected)
    assert parts.total == pytest.approx(sum(expected))


def test_paper_reward_options():
    """Each option must change the part that it names and no other."""
    wrong = trajectory("parallel", [2], "Alan", well_formed=False)
    assert paper_reward(wrong, RewardSection(final_format=0.3)).format == 0.3
    assert paper_reward(trajectory("parallel", [2], None), RewardSection(final_format=0.3)).format == 0
    assert paper_reward(wrong, RewardSection(gate_bonus_on_outcome=True)).total == 0
    right = trajectory("parallel", [2], "Ada")
    assert paper_reward(right, RewardSection(gate_bonus_on_outcome=True)) == paper_reward(right, WEIGHTS)
    mixed = trajectory("mixed", [2], "Ada")
    assert paper_reward(mixed, RewardSection(mixed="parallel")) == paper_reward(right, WEIGHTS)
    assert paper_reward(mixed, RewardSection(search_count=0, decomposition=0)).total == 1


def test_f1_as_the_outcome_lies_between_wrong_and_right():
    """A partly right answer that pays more than a right one would be learned instead of it."""
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
    half = paper_reward(trajectory("parallel", [2], "Ada Byron"), RewardSection(outcome="f1"))
    assert half.format == pytest.approx(0.1 / 3)


def test_every_search_has_its_price():
    """A penalty charged only once, or only if the model answers, would not make each search cost something."""
    priced = RewardSection(search_penalty=0.2)
    for searches, answer in (([], None), ([2], "Ada"), ([1, 1, 2], "Alan")):
        t = trajectory("sequential", searches, answer)
        assert paper_reward(t, priced).total == pytest.approx(paper_reward(t, WEIGHTS).total - 0.2 * len(searches))
    wrong = trajectory("sequential", [1, 1], "Alan")
    assert paper_reward(wrong, replace(priced, gate_bonus_on_outcome=True)).total == pytest.approx(0.1 - 0.4)


def test_every_sub_query_has_its_price():
    """A price that depends on the grouping of sub-queries into searches would pay for splitting, or punish it."""
    priced = RewardSection(sub_query_penalty=0.05, parallelism="critical_path")
    plain = replace(priced, sub_query_penalty=0.0)
    for searches, sub_queries in (([], 0), ([2], 2), ([1, 1], 2), ([2, 1], 3)):
        t = trajectory("sequential", searches, "Ada")
        assert paper_reward(t, priced).total == pytest.approx(paper_reward(t, plain).total - 0.05 * sub_queries)


def test_format_by_the_answers_worth():
    """Half right is half of each rule: a right answer must not also earn the consolation for a wrong one."""
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
    """A bonus that a wrong answer gets, that reads the kind, or that compares rollouts of different questions."""
    reward = RewardSection(parallelism="critical_path", critical_path=0.4)
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

    def bonuses(section, step, trajectories=rollouts):
        without = [paper_reward(t, section) for t in trajectories]
        assert all(p.decomposition == p.search_count == p.critical_path == 0 for p in without)
        rewards = with_critical_path(without, trajectories, section, step)
        bonus = [p.critical_path for p in rewards]
        np.testing.assert_allclose([p.total for p in rewards], np.add(bonus, [p.total for p in without]))
        return bonus

    expected = [0.4 / 3, 0, -0.4 / 3, 0, 0, 0, 0.2, -0.2]
    np.testing.assert_allclose(bonuses(reward, 0), expected, atol=1e-12)
    np.testing.assert_allclose(bonuses(reward, 7, relabelled), expected, atol=1e-12)
    for step, share in ((0, 1.0), (5, 0.5), (10, 0.0), (99, 0.0)):
        annealed = bonuses(replace(reward, critical_path_steps=10), step)
        np.testing.assert_allclose(annealed, share * np.array(expected), atol=1e-12)
    labelled = [paper_reward(t, WEIGHTS) for t in rollouts]
    assert with_critical_path(labelled, rollouts, WEIGHTS, 0) == labelled


def test_the_critical_path_reaches_the_advantages():
    """The trainer would compute the bonus and learn from the reward without it."""
    reward = RewardSection(parallelism="critical_path")
    config = replace(Config(), reward=reward)
    run = SimpleNamespace(config=config, reward=lambda t: paper_reward(t, reward))
    rollouts = stage.Rollouts()
    stage._reward(run, rollouts, [with_turns([2]), with_turns([1, 1])], 0)
    assert [parts.critical_path for parts in rollouts.rewards] == pytest.approx([0.1, -0.1])
    assert rollouts.totals == pytest.approx([1.1, 0.9])
    advantages = stage._advantages(run, rollouts)
    assert advantages[0] > 0 > advantages[1]


def test_what_fills_the_context_is_charged_by_the_end():
    """A length penalty with a wrong window would teach short answers, or none at all."""
    reward = RewardSection(unfinished_penalty=0.5, overlong_tokens=100)

    def charged(length, status="answered", penalise=False):
        t = replace(trajectory("single", [1], "Ada"), ids=np.zeros(length, np.int32), status=status)
        return length_penalty(t, reward, penalise, 1000)

    assert [charged(n) for n in (10, 900, 950, 1000)] == pytest.approx([0, 0, 0.25, 0.5])
    assert charged(10, "out_of_turns") == 0 and charged(10, "out_of_turns", penalise=True) == 0.5
    t = trajectory("single", [1], None)
    assert length_penalty(t, RewardSection(), False, 1000) == 0


def test_initial_search_is_not_counted():
    """The initial search is an option, not the policy's action: it must change neither n nor d."""
    for kind, searches in [("parallel", [2]), ("sequential", [1]), ("single", [])]:
        plain = paper_reward(trajectory(kind, searches, "Ada"), WEIGHTS)
        assert paper_reward(trajectory(kind, searches, "Ada", initial=True), WEIGHTS) == plain


# --- compat ---


def test_compat_reproduces_the_public_scores(shared_data):
    """If `compat` differs anywhere, published numbers cannot be reproduced."""
    rows = [json.loads(line) for line in (shared_data / "reward_vectors.jsonl").read_text().splitlines()]
    ours = [
        compat_score(r["prompt"], r["response"], r["golden_answers"], r["kind"], RewardSection(**r["weights"])).total
        for r in rows
    ]
    assert len(rows) == 1500
    np.testing.assert_allclose(ours, [r["score"] for r in rows], rtol=0, atol=1e-6)


def test_both_profiles_agree_on_clean_transcripts(shared_data):
    """Where prompt and response have none of the quirks, both profiles must give the same reward."""
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
            assert paper_reward(parsed, weights) == compat_reward(parsed, prompt, response, weights), response
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
    """The transcript's grammar and the turns' own check must accept the same responses."""
    assert valid_transcript(PROMPT + response) is valid
    assert not valid_transcript(response)
    question = Question("v", "1", "q", ("x",), "single")
    assert parse_transcript(question, response).well_formed is valid


def test_compat_quirks():
    """The quirks that only `compat` may have: it reads the prompt's examples as if the policy had written them."""
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
    """A run of hours that pays 0 for every right answer, because the prompt has no example answer."""
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


def test_parse_transcript():
    """A misread transcript would show mismatches that the reward does not cause."""
    question = Question("v", "1", "q", ("x",), "single")
    parsed = parse_transcript(
        question,
        f"<think>a</think><search>b ## c</search>\n\n{INFO}\n\n<search>d</search> stray {INFO}"
        "<think>e</think><search>f</search><think>g</think><answer> h </answer><search>i</search>",
    )
    assert [t.action for t in parsed.turns] == ["search", "search", "search", "answer"]
    assert [t.queries for t in parsed.turns] == [("b", "c"), ("d",), (), ()]
    assert [t.well_formed for t in parsed.turns] == [True, False, False, False]
    assert (parsed.answer, parsed.status, parsed.decomposed, len(parsed.executed)) == ("h", "answered", True, 2)
    cut = parse_transcript(question, "<think>a</think><search>b</search><information>c <search>d</search>")
    assert (cut.answer, cut.executed, cut.status, cut.well_formed) == (None, (), "out_of_turns", False)
    assert parse_transcript(question, " \n").turns == ()


def test_compat_reads_the_prompt_and_the_reply_of_a_rollout(tiny_tokenizer):
    """The prompt is counted twice, or the reply's stop token breaks the grammar of every answer."""
    reply = "<think>a</think><search>b ## c</search>" + INFO + "<think>d</think><answer>Ada</answer>"
    prompt, rest = map(tiny_tokenizer.encode_trusted, (PROMPT, reply + "<|im_end|>"))
    t = replace(trajectory("parallel", [2], "Ada"), ids=np.array(prompt + rest, np.int32), prompt_length=len(prompt))
    parts = build.reward_of(from_mapping({"reward": {"profile": "compat"}}), tiny_tokenizer)(t)
    assert (parts.outcome, parts.format) == (1, 0)
    assert (parts.decomposition, parts.search_count) == pytest.approx((0.45, 0.35))


def test_a_rollout_that_is_not_finite_changes_no_advantage_of_a_step():
    """Its reward of 0 raises the advantages of the other rollouts of its question."""
    run = SimpleNamespace(config=Config(), reward=lambda t: paper_reward(t, WEIGHTS))
    others, broken = [with_turns([1]), with_turns([1], "Bob")], replace(with_turns([], None), status="not_finite")
    advantages = []
    for trajectories in (others, [*others, broken]):
        rollouts = stage.Rollouts()
        stage._reward(run, rollouts, trajectories, 0)
        advantages.append(stage._advantages(run, rollouts).tolist())
    assert advantages[1] == [*advantages[0], 0.0] and advantages[0][0] > 0

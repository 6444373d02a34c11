"""launch/sample.py: which rollouts are kept, and that supervised fine-tuning accepts them."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from programs import Program, completed, wait_until

from configs import smoke
from psearch_jax.config import from_mapping
from psearch_jax.data.transcripts import read_rows
from psearch_jax.eval.rejection import as_transcript, best_rollouts, follows_evidence, render_draft
from psearch_jax.text.dialects import Tags
from psearch_jax.text.prompts import load_template
from psearch_jax.types import Question, RewardParts, Trajectory, Turn
from retrieval.protocol import Passage

QUESTION = Question("s", "1", "Who?", ("Ada",), "parallel")


def scored(sample, reward, text="<answer>", length=4, well_formed=True):
    turn = Turn(text, "answer", well_formed, answer="Ada", n_sampled=2)
    ids = np.zeros(length, np.int32)
    return Trajectory(QUESTION, sample, "answered", (turn,), ids, ids > 0, ids * 1.0, 1), RewardParts({}, reward)


def test_the_best_are_kept_once_each():
    """The best rollouts are kept, each text once, and only well-formed ones."""
    pairs = [
        scored(0, 1.0, "a"),
        scored(1, 2.0, "b", length=9),
        scored(2, 2.0, "c", length=5),
        scored(3, 2.0, "c", length=6),
        scored(4, 9.0, "d", well_formed=False),
        scored(5, 0.5, "e"),
    ]
    for keep, min_reward, expected in ((1, 0.0, [2]), (9, 0.0, [2, 1, 0, 5]), (9, 1.0, [2, 1, 0]), (1, 3.0, [])):
        assert [t.sample for t, _ in best_rollouts(pairs, keep, min_reward)] == expected


@pytest.mark.parametrize(
    ("question", "answer", "texts", "accepted"),
    [
        ("Who wrote it?", "Ada", ["<search>its author</search>", "It was Ada. <answer>Ada</answer>"], True),
        ("Who wrote it?", "Ada", ["Ada wrote it. <search>its author</search>", "<answer>Ada</answer>"], False),
        ("Who wrote it?", "Ada", ["<search>Ada</search>", "It was Ada. <answer>Ada</answer>"], False),
        ("Who wrote it?", "Alan", ["<search>its author</search>", "<answer>Alan</answer>"], False),
        ("Ada or Alan?", "Alan", ["Ada and Alan. <search>the author</search>", "<answer>Alan</answer>"], True),
        ("Ada or Alan?", "Alan", ["<answer>Alan</answer>"], False),
        ("Is it so?", "yes", ["<search>so</search>", "<answer>yes</answer>"], True),
    ],
)
def test_a_draft_that_was_told_the_answer_must_find_it(question, answer, texts, accepted):
    """Else a policy learns to state facts before it has read them."""
    asked = replace(QUESTION, text=question, answers=(answer,))
    ranking = (Passage("1", "", "It was written by Ada."),)
    searches = [Turn(text, "search", True, ("q",), (ranking,), None, 2, ((ranking[0].text,),)) for text in texts[:-1]]
    turns = (*searches, Turn(texts[-1], "answer", True, answer=answer))
    trajectory = replace(scored(0, 1.0)[0], question=asked, turns=turns)
    assert follows_evidence(trajectory) == accepted


def test_the_prompt_of_a_draft_states_the_answer(tiny_tokenizer):
    prompt = tiny_tokenizer.decode(render_draft(tiny_tokenizer, "{answer}! {question}", QUESTION))
    assert "Ada! Who?" in prompt


def command(out: Path, *more: str) -> list[str]:
    flags = ["--model=toy", "--config=configs/smoke.py", "--questions=closed_world", "--samples=4"]
    fields = {"rollout.slots": 16, "rollout.num_buckets": 1}
    fields["reward.terms"] = "examples/custom_reward.py:short_answers=1.0,f1=0.5"
    fields = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["launch/sample.py", *flags, *fields, f"--out={out}", *more]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    out = tmp_path_factory.mktemp("sampled") / "best.jsonl"
    done = completed([sys.executable, *command(out, "--count=64")])
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout


def test_rows_are_rollouts_with_their_reward(sampled):
    """One rollout per question is kept, with its reward and the user's terms, and the counts are printed."""
    out, printed = sampled
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert 8 < len(rows) <= 64 and f"{len(rows)} kept, of {len(rows)} questions" in printed
    assert "256 rollouts of 64 questions" in printed
    assert all(row["reward"]["total"] >= 1 and row["status"] == "answered" for row in rows)
    assert len({row["question_id"] for row in rows}) == len(rows)
    for reward in (row["reward"] for row in rows):
        assert reward["short_answers"] == 0 and (reward["f1"] == 0.5) == (reward["outcome"] == 1)
        assert sum(reward.values()) == pytest.approx(2 * reward["total"])
    refused = completed([sys.executable, *command(out, "--count=64")])
    assert refused.returncode == 2 and "exists already" in refused.stderr


def test_drafts_are_transcripts_of_what_was_sampled(sampled, tmp_path, tokenizer):
    """Behind a prompt with the same text they have the sampled tokens and loss mask."""
    (tmp_path / "draft.txt").write_text(load_template("toy"))
    drafts = tmp_path / "drafts.jsonl"
    done = completed([sys.executable, *command(drafts, "--count=64", f"--template={tmp_path / 'draft.txt'}")])
    assert done.returncode == 0, done.stderr[-3000:]
    rollout = from_mapping(smoke.get_config().to_dict()).rollout
    dialect, equal = Tags(tokenizer, rollout.obs_tokens), 0
    kept = [json.loads(line) for line in sampled[0].read_text().splitlines()]
    texts = {row["question_id"]: [turn["text"] for turn in row["turns"]] for row in kept}
    rows = {row["question_id"]: (row["ids"], row["mask"]) for row in kept}
    read = read_rows(drafts, dialect, load_template("toy"), rollout)
    for line, (ids, mask) in zip(drafts.read_text().splitlines(), read, strict=True):
        row = json.loads(line)
        assert "ids" not in row and any("passages" in turn for turn in row["turns"])
        if [turn["text"] for turn in row["turns"]] == texts.get(row["id"]):
            assert (ids.tolist(), mask.astype(int).tolist()) == rows[row["id"]]
            equal += 1
    assert equal > 10


def test_a_transcript_ends_turns_with_their_tag():
    """The token that completes a tag may go on with other characters, which fine-tuning refuses."""
    turns = (
        Turn("<search>a</search><", "search", True, ("a",), n_sampled=3),
        Turn("<answer>b</answer>.", "answer", True),
    )
    t = Trajectory(QUESTION, 0, "answered", turns, *(np.zeros(0),) * 3, 0)
    assert [turn["text"] for turn in as_transcript(t)["turns"]] == ["<search>a</search>", "<answer>b</answer>"]


def test_a_killed_call_resumes(sampled, tmp_path):
    """A killed call ends with the rows of an uninterrupted one, and refuses other settings."""
    out = tmp_path / "best.jsonl"
    process = Program(command(out, "--count=64"))
    wait_until(lambda: list(tmp_path.glob("best.jsonl.parts/0*.jsonl")) or process.poll() is not None, 300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    other = completed([sys.executable, *command(out, "--count=64", "--seed=1")])
    assert other.returncode == 2 and "holds results with sampling.seed 0, found 1" in other.stderr
    done = completed([sys.executable, *command(out, "--count=64")])
    assert done.returncode == 0, done.stderr[-3000:]
    assert out.read_bytes() == sampled[0].read_bytes() and not list(tmp_path.glob("*.parts"))

"""Supervised fine-tuning rows from transcripts and rollouts, and which lines are refused."""

import json

import numpy as np
import pytest
from helpers import rollout_section
from written import say

from psearch_jax.data.transcripts import read_rows, read_trajectories
from psearch_jax.eval.evaluate import trajectory_row
from psearch_jax.text import tags
from psearch_jax.text.dialects import Tags
from psearch_jax.text.prompts import render_prompt
from psearch_jax.types import Question, Trajectory, Turn, UserError
from retrieval.protocol import Passage

TEMPLATE = "Answer: {question}"
ROLLOUT = rollout_section(context_tokens=900, obs_tokens=200)
SEARCH = "<think> two </think> <search> Ada born ## Alan born </search>"
ANSWER = "<think> done </think> <answer> Ada </answer>"
ADA, ALAN = {"title": "Ada", "text": "Ada was born in 1815."}, {"title": "Alan", "text": "Alan was born in 1912."}
GOOD = {
    "question": "Who is older, Ada or Alan?",
    "turns": [{"text": SEARCH, "passages": [[ADA], [ALAN, ADA]]}, {"text": ANSWER}],
}


def dialect(tokenizer):
    return Tags(tokenizer, ROLLOUT.obs_tokens)


def written(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def trained_texts(tokenizer, row) -> list[str]:
    ids, mask = row
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [tokenizer.decode(ids[a:b], control=True) for a, b in edges.reshape(-1, 2)]


def test_a_transcript_is_laid_out_as_a_rollout(tmp_path, tiny_tokenizer):
    """The loss covers the replies alone, and passages are rendered as in a rollout."""
    (row,) = read_rows(written(tmp_path, GOOD), dialect(tiny_tokenizer), TEMPLATE, ROLLOUT)
    ids, mask = row
    assert ids.dtype == np.int32 and mask.dtype == bool and len(ids) == len(mask)
    assert trained_texts(tiny_tokenizer, row) == [SEARCH, ANSWER + "<|im_end|>"]
    prompt = render_prompt(tiny_tokenizer, TEMPLATE, GOOD["question"])
    encode = tiny_tokenizer.encode_foreign
    rankings = [[Passage("", **ADA)], [Passage("", **ALAN), Passage("", **ADA)]]
    observed = tags.render_observation(("Ada born", "Alan born"), rankings, encode, 200).ids
    wanted = [*prompt, *encode(SEARCH), *observed, *encode(ANSWER), *tiny_tokenizer.encode_trusted("<|im_end|>")]
    assert ids.tolist() == wanted


def test_turns_can_be_left_out_of_the_loss(tmp_path, tiny_tokenizer):
    """A turn with `train` false is not learned, and is followed by the corrective message."""
    bad = {"text": "Ada, I guess.", "train": False}
    row = {**GOOD, "turns": [bad, *GOOD["turns"]]}
    (parsed,) = read_rows(written(tmp_path, row), dialect(tiny_tokenizer), TEMPLATE, ROLLOUT)
    assert trained_texts(tiny_tokenizer, parsed) == [SEARCH, ANSWER + "<|im_end|>"]
    text = tiny_tokenizer.decode(parsed[0], control=True)
    assert f"Ada, I guess.<|im_end|>\n<|im_start|>user\n{tags.CORRECTIVE_MESSAGE.strip()}<|im_end|>" in text


def rollout(tokenizer) -> dict:
    """A trajectory as a run writes it, with tokens that no tokenizer would choose for its text."""
    prompt = render_prompt(tokenizer, TEMPLATE, "Who?")
    letters = [i for letter in ANSWER for i in tokenizer.encode_foreign(letter)]
    sampled = letters + tokenizer.encode_trusted("<|im_end|>")
    ids = np.asarray(prompt + sampled, np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    turn = Turn(ANSWER, "answer", True, answer="Ada", n_sampled=len(sampled))
    question = Question("s", "1", "Who?", ("Ada",), "single")
    t = Trajectory(question, 0, "answered", (turn,), ids, mask, np.where(mask, -1.0, 0), len(prompt))
    return json.loads(json.dumps(trajectory_row(t, None, 0)))


def test_a_rollout_is_read_as_it_was_sampled(tmp_path, tiny_tokenizer):
    """A rollout's tokens are used as they were sampled, without tokenizing again."""
    row = rollout(tiny_tokenizer)
    (parsed,) = read_rows(written(tmp_path, row), dialect(tiny_tokenizer), TEMPLATE, ROLLOUT)
    assert parsed[0].tolist() == row["ids"] and parsed[1].astype(int).tolist() == row["mask"]
    again = say(tiny_tokenizer, ANSWER)
    assert parsed[0][parsed[1]][:-1].tolist() != again and tiny_tokenizer.decode(again) == ANSWER


def test_prompts_of_the_rows(tmp_path, tiny_tokenizer):
    """With data.template=row, a row's own chat is its prompt."""
    row = {"prompt": [{"role": "user", "content": "Look it up."}], "turns": [{"text": ANSWER}]}
    (parsed,) = read_rows(written(tmp_path, row), dialect(tiny_tokenizer), None, ROLLOUT)
    assert "user\nLook it up.<|im_end|>" in tiny_tokenizer.decode(parsed[0], control=True)


def test_a_transcript_that_cannot_be_a_rollout_is_refused(tmp_path, tiny_tokenizer):
    """In one line that names its place and what is accepted."""
    row, asked = {**GOOD, "source": "s", "id": "1"}, [Question("s", "1", GOOD["question"], ("Ada",), "parallel")]
    for rows, words in (
        ([GOOD], "line 1: no source and id found"),
        ([row, row], "line 2: the question of .*line 1 found again"),
        ([{**row, "question": "Who?"}], "line 1: field question: 'Who.' found, accepted: 'Who is older"),
        ([{**row, "turns": TURNS[:1]}], "line 1: 1 turns found, the last with action search, accepted: an answer"),
        ([{**row, "turns": [TURNS[0]] * 3 + TURNS[1:]}], "line 1: 4 turns found, .* config.rollout.search_turns=2"),
        ([{**row, "id": "3"}], "no transcript of a training question found"),
    ):
        with pytest.raises(UserError, match=words):
            read_trajectories(written(tmp_path, *rows), asked, lambda _: [5], dialect(tiny_tokenizer), ROLLOUT)


TURNS = GOOD["turns"]
BAD = {
    "not json": ("{", "Invalid JSON"),
    "no turns": ({"question": "Who?"}, "transcript.turns: .*Field required"),
    "no question": ({"turns": TURNS}, "field question: '' found"),
    "passages missing": ({**GOOD, "turns": [{"text": SEARCH}, TURNS[1]]}, "turn 1: field passages: 0 found, .* 2 sub"),
    "passages of nothing": ({**GOOD, "turns": [{"text": ANSWER, "passages": [[ADA]]}]}, "turn 1: field passages: 1"),
    "an answer too early": ({**GOOD, "turns": [TURNS[1], TURNS[1]]}, "turn 1: an answer found"),
    "text after a search": ({**GOOD, "turns": [{**TURNS[0], "text": SEARCH + " so"}, TURNS[1]]}, "turn 1: 'so' after"),
    "too deep": ("[" * 100_000, "Invalid JSON"),
    "nothing to learn": ({**GOOD, "turns": [{"text": ANSWER, "train": False}]}, "no token to learn from"),
    "too long": ({**GOOD, "turns": [{"text": "a " * 900 + ANSWER}]}, "config.rollout.context_tokens=900"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_line_is_refused_with_its_number(tmp_path, tiny_tokenizer, name):
    """Every malformed line is refused with its number and what is wrong."""
    row, words = BAD[name]
    with pytest.raises(UserError, match=f"rows.jsonl: line 3: .*{words}|rows.jsonl: line 3: {words}"):
        read_rows(written(tmp_path, GOOD, "", row, GOOD), dialect(tiny_tokenizer), TEMPLATE, ROLLOUT)


def test_rollouts_of_another_tokenizer_are_refused(tmp_path, tiny_tokenizer, tokenizer):
    """Rollouts whose tokens do not spell their texts are refused."""
    row = rollout(tokenizer)
    with pytest.raises(UserError, match="line 1: .*(token id|do not spell)"):
        read_rows(written(tmp_path, row), dialect(tiny_tokenizer), TEMPLATE, ROLLOUT)
    broken = rollout(tiny_tokenizer)
    for fields, words in (
        ({"mask": broken["mask"][:-1]}, "equally many"),
        ({"ids": [10**30] * len(broken["ids"])}, "token id 10{30} found"),
    ):
        with pytest.raises(UserError, match=f"line 1: .*{words}"):
            read_rows(written(tmp_path, {**broken, **fields}), dialect(tiny_tokenizer), TEMPLATE, ROLLOUT)

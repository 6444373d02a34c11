"""Gold passages: the upper limit for retrieval that launch/eval.py --gold_passages measures."""

import json

import pytest
from programs import completed

from psearch_jax.closed_world import question_forms
from psearch_jax.closed_world.encyclopedia import ClosedWorld, fact_sentence
from psearch_jax.eval.gold import GoldPassages
from psearch_jax.types import Question, UserError
from retrieval.corpus import write_corpus
from retrieval.protocol import Passage
from retrieval.service import RetrievalService

PASSAGES = [
    Passage("0", "The Jerk", "The Jerk is a film by Carl Reiner."),
    Passage("1", "Carl Reiner", "Carl Reiner was born in 1922."),
    Passage("2", "The Jerk, Too", "The Jerk, Too is a film."),
    Passage("3", "Folly to Be Wise", "Folly to Be Wise is a film by Frank Launder."),
    Passage("4", "Frank Launder", "Frank Launder was born in 1906."),
]
EVIDENCE = [["The Jerk", "director", "Carl Reiner"], ["Carl Reiner", "date of birth", "1922"]]


@pytest.fixture
def service():
    return RetrievalService.from_corpus(PASSAGES)


def asked(text="When was the  director of The Jerk born?", **metadata):
    return Question("2wiki", "7", text, ("1922",), "sequential", metadata)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"evidences": EVIDENCE}, ["The Jerk", "Carl Reiner"]),
        # The titles that a set gives go first.
        ({"evidences": EVIDENCE, "supporting_titles": ["Frank Launder"]}, ["Frank Launder"]),
        ({"supporting_titles": ["Frank Launder", "Folly to be wise"]}, ["Frank Launder", "Folly to Be Wise"]),
    ],
)
def test_the_passages_that_a_question_names_are_found(service, metadata, expected):
    """A question gets the passages of its titles or facts whatever k is; other queries are searched as usual."""
    gold = GoldPassages(service, [asked(**metadata)])
    (passages,) = gold.search(["When was the director of The Jerk born?"], 1)
    assert [passage.title for passage in passages] == expected
    assert gold.search(["Frank Launder", ""], 2) == service.search(["Frank Launder", ""], 2)


@pytest.mark.parametrize("kind", ["single", "parallel", "sequential", "mixed"])
def test_facts_of_a_corpus_without_titles_are_found(kind):
    """In a corpus without titles, exactly the passages that state a question's facts are found."""
    world = ClosedWorld.make(0)
    asked = question_forms.questions(world, "eval", kind, 30, 0)
    gold = GoldPassages(RetrievalService.from_corpus(world.passages), asked)
    for question in asked:
        facts = {fact_sentence(*lookup) for lookups in question.metadata["rounds"] for lookup in lookups}
        (passages,) = gold.search([question.query], 1)
        assert {passage.text for passage in passages} == facts


def test_all_passages_of_a_title_are_found():
    """All passages of an article are found, those that fit the question first."""
    parts = ["Ada Lovelace was a mathematician.", "Ada Lovelace died in Marylebone.", "Ada Lovelace wrote notes."]
    article = [Passage(str(i), "Ada Lovelace", text) for i, text in enumerate(parts)]
    question = asked("Where did she die, in Marylebone?", supporting_titles=["Ada Lovelace"])
    gold = GoldPassages(RetrievalService.from_corpus([*PASSAGES, *article]), [question])
    (passages,) = gold.search([question.query], 1)
    assert {passage.id for passage in passages} == {"0", "1", "2"} and passages[0].id == "1"


def test_questions_of_one_text_keep_their_passages(service):
    """Questions of one text get the passages of all of them."""
    first, second = asked(supporting_titles=["Carl Reiner"]), asked(supporting_titles=["Frank Launder"])
    (passages,) = GoldPassages(service, [first, second]).search([first.query], 1)
    assert [passage.title for passage in passages] == ["Carl Reiner", "Frank Launder"]


def test_a_question_without_titles_is_refused(service):
    """A question that names neither titles nor facts is refused in one line."""
    with pytest.raises(UserError, match=r"question '7' of 2wiki has neither metadata.supporting_titles nor"):
        GoldPassages(service, [asked()])


def test_the_program_puts_them_in_front_of_the_first_turn(tmp_path):
    """The passages start the context, and the policy does not search; a method without passages is refused."""
    questions, corpus = tmp_path / "questions.jsonl", tmp_path / "corpus.jsonl"
    row = {"id": "q", "question": "When was the director of The Jerk born?", "golden_answers": ["1922"]}
    questions.write_text(json.dumps(row | {"metadata": {"type": "inference", "evidences": EVIDENCE}}) + "\n")
    write_corpus(corpus, PASSAGES)
    program = ["launch/eval.py", "--model=toy", "--config=configs/smoke.py", "--gold_passages"]
    program += [f"--benchmark=2wiki:{questions}", f"--corpus={corpus}", f"--out={tmp_path / 'out'}"]
    refused = completed([*program, "--config.method=r1"])
    assert refused.returncode == 2 and "--gold_passages: found with method r1" in refused.stderr
    done = completed(program)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "2wiki.jsonl").read_text().splitlines()]
    assert [passage["title"] for passage in row["actions"][0]["passages"][0]] == ["The Jerk", "Carl Reiner"]
    assert row["searches"] == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["gold_passages"] is True

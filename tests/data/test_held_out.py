"""Held-out questions: chosen independently of all other questions, and never trained on."""

import json
import random

import pytest

from psearch_jax.assembly.questions import load_questions
from psearch_jax.config import from_mapping
from psearch_jax.data.held_out import hold_out, pick, without_held_out
from psearch_jax.data.loader import QuestionLoader
from psearch_jax.data.prepared import prepare
from psearch_jax.types import KINDS, Question, UserError

QUESTIONS = [Question("set", f"q{i}", f"Who is {i}?", ("a",), KINDS[i % 4]) for i in range(1000)]


def write(path, questions):
    rows = [{"id": q.id, "question": q.text, "golden_answers": list(q.answers)} for q in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_what_is_held_out_depends_on_the_question_alone():
    """A question's source and id decide, not the other questions or their order; larger shares hold out more."""
    train, held = hold_out(QUESTIONS, 0.1)
    assert 70 <= len(held) <= 130 and sorted(q.id for q in [*train, *held]) == sorted(q.id for q in QUESTIONS)
    shuffled = random.Random(0).sample(QUESTIONS, 700)
    assert {q.id for q in hold_out(shuffled, 0.1)[1]} == {q.id for q in held} & {q.id for q in shuffled}
    assert {q.id for q in held} < {q.id for q in hold_out(QUESTIONS, 0.2)[1]}
    other = [Question("other", q.id, q.text, q.answers, q.kind) for q in QUESTIONS]
    assert {q.id for q in hold_out(other, 0.1)[1]} != {q.id for q in held}  # the source matters too
    assert without_held_out(QUESTIONS, 0.1) == train and without_held_out(QUESTIONS, 0) is QUESTIONS


def test_the_few_that_are_asked():
    """The few questions asked are of every kind and do not depend on the order of the file."""
    picked = pick(QUESTIONS, 5)
    assert [q.kind for q in picked] == [kind for kind in KINDS for _ in range(5)]
    assert pick(random.Random(1).sample(QUESTIONS, 1000), 5) == picked
    assert {q.id for q in pick(QUESTIONS, 3)} < {q.id for q in picked}


def test_a_share_that_holds_out_nothing_is_refused():
    """Both parts must have questions."""
    for questions, share in ((QUESTIONS[:3], 1e-9), (QUESTIONS[:3], 1 - 1e-9)):
        with pytest.raises(UserError, match="config.data.validation_share: .* of 3 questions holds out"):
            hold_out(questions, share)


def test_a_prepared_set_is_split_without_being_kept(tmp_path):
    """A prepared set is split lazily, and a position in the part is not one in the full set."""
    prepared = prepare([("set", write(tmp_path / "a.jsonl", QUESTIONS[:200]))], tmp_path / "out")
    train, held = hold_out(prepared, 0.2)
    assert not isinstance(train, list) and len(train) + len(held) == 200
    assert {q.id for q in held} == {q.id for q in hold_out(QUESTIONS[:200], 0.2)[1]}
    loader = QuestionLoader(train, 10, seed=0, epochs=1)
    seen = {q.id for batch in loader for q in batch}
    assert len(seen) == len(train) // 10 * 10 and not seen & {q.id for q in held}
    with pytest.raises(UserError, match="other questions"):
        QuestionLoader(prepared, 10, seed=0).restore(loader.state())


def test_what_a_run_trains_on_and_validates_with(tmp_path, caplog):
    """Validation questions are held out or from a file; those that are also trained on cause a warning."""
    source, other = write(tmp_path / "a.jsonl", QUESTIONS[:100]), write(tmp_path / "b.jsonl", QUESTIONS[90:130])

    def split(kind="", **data):
        evaluation = {"questions_per_kind": 20, "every_steps": 1, "best_metric": f"{kind}em"}
        return load_questions(from_mapping({"data": {"source": source, **data}, "eval": evaluation}), None)

    train, validation = split(validation_share=0.15)
    assert len(validation) <= 20 and not {q.id for q in train} & {q.id for q in validation} and len(train) < 100
    train, validation = split(validation=other)
    assert len(train) == 100 and len(validation) == 20
    leaked = sum(int(q.id[1:]) < 100 for q in validation)
    assert leaked and f"{leaked} of the 20 validation questions are also training questions" in caplog.text
    with pytest.raises(UserError, match="best_metric: found 'mixed/em', but no validation question .* of single"):
        split("mixed/", validation=other)

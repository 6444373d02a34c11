"""The order of questions: shuffling, sharding, and a position that resumes exactly or is refused."""

import itertools
import json
from dataclasses import replace

import pytest

from psearch_jax.data.loader import QuestionLoader
from psearch_jax.types import Question, UserError


def questions(count, source="set"):
    return [Question(source, str(i), f"question {i}?", ("a", "b")[: 1 + i % 2], "single") for i in range(count)]


def ids(batches):
    return [[q.id for q in batch] for batch in batches]


def take(loader, count):
    return ids(itertools.islice(loader, count))


def test_each_epoch_is_another_order_of_the_same_questions():
    """Every epoch has all questions, in an order of its own, which the seed decides."""
    batches = take(QuestionLoader(questions(12), 4, seed=0), 6)
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert sorted(first) == sorted(second) == sorted(q.id for q in questions(12))
    assert first != second and first != [q.id for q in questions(12)]
    assert take(QuestionLoader(questions(12), 4, seed=0), 6) == batches
    assert take(QuestionLoader(questions(12), 4, seed=4), 6) != batches


def test_no_batch_holds_a_question_twice():
    """The remainder of an epoch is dropped, so a batch does not cross its end; another epoch drops other questions."""
    batches = take(QuestionLoader(questions(7), 3, seed=1, epochs=20), 100)
    assert len(batches) == 40 and all(len(set(batch)) == 3 for batch in batches)
    assert {i for batch in batches for i in batch} == {q.id for q in questions(7)}, "some question is never seen"


@pytest.mark.parametrize("count", [16, 19])
def test_processes_share_out_each_step(count):
    """Two processes together see the questions of one, step by step, for the same number of steps."""
    single = take(QuestionLoader(questions(count), 4, seed=5, epochs=3), 100)
    parts = [take(QuestionLoader(questions(count), 2, 5, 3, process, 2), 100) for process in (0, 1)]
    assert len(parts[0]) == len(parts[1]) == len(single) == 3 * (count // 4)
    for step, batch in enumerate(single):
        assert sorted(parts[0][step] + parts[1][step]) == sorted(batch)


def test_resume_continues_after_the_last_batch():
    """A restored loader repeats and skips nothing, also if it had already advanced, or the position is 0."""
    expected = take(QuestionLoader(questions(10), 3, seed=2), 12)
    for done in (0, 1, 3, 7):
        before = QuestionLoader(questions(10), 3, seed=2)
        assert take(before, done) == expected[:done]
        state = before.state()
        saved = json.loads(json.dumps(state))
        assert take(before, 2) == expected[done : done + 2]
        assert saved == state, "a state does not change when the loader moves on"
        after = QuestionLoader(questions(10), 3, seed=2)
        take(after, 2)
        after.restore(saved)
        assert take(after, 12 - done) == expected[done:]


EDITS = [{"text": "Who?"}, {"answers": ("b",)}, {"kind": "mixed"}, {"metadata": {"prompt": "A"}}, {"source": "b"}]


def test_a_position_in_other_data_is_refused():
    """A position of another seed, batch, order or edited question is refused, which Grain alone would accept."""
    asked = questions(10)
    loader = QuestionLoader(asked, 2, seed=0)
    edited = [[*asked[:3], replace(asked[3], **changes), *asked[4:]] for changes in EDITS]
    for other, name in (
        (QuestionLoader(asked, 2, seed=1), "seed"),
        (QuestionLoader(asked, 3, seed=0), "questions_per_step"),
        *((QuestionLoader(changed, 2, seed=0), "data") for changed in (asked[::-1], *edited)),
    ):
        with pytest.raises(UserError, match=f"accepted: the same {name}"):
            other.restore(loader.state())
    for state in ({}, {"fingerprint": 3, "grain": {}}):
        with pytest.raises(UserError, match="data: "):
            loader.restore(state)


def test_resume_with_another_number_of_processes():
    """The position of one process continues on two."""
    single = QuestionLoader(questions(13), 4, seed=0)
    take(single, 2)
    halves = [QuestionLoader(questions(13), 2, 0, None, process, 2) for process in (0, 1)]
    for half in halves:
        half.restore(single.state())
    for batch in take(single, 5):
        parts = [next(half) for half in halves]
        assert batch == [q.id for pair in zip(*parts, strict=True) for q in pair]


def test_too_few_questions_are_refused():
    """Fewer questions than one step of all processes needs are refused."""
    with pytest.raises(UserError, match="7 questions found, accepted: at least those of one step, 8"):
        QuestionLoader(questions(7), 4, 0, None, 0, 2)

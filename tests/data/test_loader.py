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
    """A run sees its questions in file order, or in the same order in every epoch."""
    batches = take(QuestionLoader(questions(12), 4, seed=0), 6)
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert sorted(first) == sorted(second) == sorted(q.id for q in questions(12))
    assert first != second and first != [q.id for q in questions(12)]


def test_the_seed_decides_and_nothing_else():
    """Equal seeds give different runs, or different seeds the same run."""
    assert take(QuestionLoader(questions(12), 4, seed=3), 9) == take(QuestionLoader(questions(12), 4, seed=3), 9)
    assert take(QuestionLoader(questions(12), 4, seed=3), 3) != take(QuestionLoader(questions(12), 4, seed=4), 3)


def test_no_batch_holds_a_question_twice():
    """A batch across the end of an epoch contains a question twice, and its two groups are taken for one."""
    batches = take(QuestionLoader(questions(7), 3, seed=1), 40)
    assert all(len(set(batch)) == 3 for batch in batches)
    assert {i for batch in batches for i in batch} == {q.id for q in questions(7)}, "some question is never seen"


def test_epochs_end():
    """A loader of two epochs never ends, or one without a number of epochs does."""
    assert len(list(QuestionLoader(questions(7), 3, seed=1, epochs=2))) == 4
    assert len(take(QuestionLoader(questions(4), 4, seed=1), 50)) == 50


def test_batches_are_questions_as_given():
    """Answers of different lengths break a batch of arrays: a batch is a list of the question records."""
    originals = questions(4)
    (batch,) = itertools.islice(QuestionLoader(originals, 4, seed=0), 1)
    assert isinstance(batch, list) and all(any(q is g for g in originals) for q in batch)


@pytest.mark.parametrize("count", [16, 19])
def test_processes_share_out_each_step(count):
    """Two hosts train on the same question, for different numbers of steps, or on other questions than one host."""
    single = take(QuestionLoader(questions(count), 4, seed=5, epochs=3), 100)
    parts = [take(QuestionLoader(questions(count), 2, 5, 3, process, 2), 100) for process in (0, 1)]
    assert len(parts[0]) == len(parts[1]) == len(single) == 3 * (count // 4)
    for step, batch in enumerate(single):
        assert sorted(parts[0][step] + parts[1][step]) == sorted(batch)


def test_resume_goes_on_behind_the_last_batch():
    """A resumed run repeats or skips a batch, also if the loader had already advanced, or the position is 0."""
    expected = take(QuestionLoader(questions(10), 3, seed=2), 12)
    for done in (0, 1, 3, 7):
        before = QuestionLoader(questions(10), 3, seed=2)
        assert take(before, done) == expected[:done]
        state = json.loads(json.dumps(before.state()))
        after = QuestionLoader(questions(10), 3, seed=2)
        take(after, 2)
        after.restore(state)
        assert take(after, 12 - done) == expected[done:]


def test_state_is_a_snapshot():
    """A saved state changes when the loader moves to the next batch."""
    loader = QuestionLoader(questions(10), 3, seed=2)
    take(loader, 1)
    state = loader.state()
    following = take(loader, 2)
    loader.restore(state)
    assert take(loader, 2) == following


OTHERS = {
    "data": QuestionLoader(questions(10)[::-1], 2, seed=0),
    "seed": QuestionLoader(questions(10), 2, seed=1),
    "questions_per_step": QuestionLoader(questions(10), 3, seed=0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_position_in_other_data_is_refused(name):
    """Grain silently accepts a position of another seed, batch or source, and the run trains on a mixture."""
    state = QuestionLoader(questions(10), 2, seed=0).state()
    with pytest.raises(UserError, match=f"accepted: the same {name} as before"):
        OTHERS[name].restore(state)


def test_a_position_goes_on_with_another_number_of_processes():
    """A run that resumes on fewer hosts repeats or skips questions, or cannot resume at all."""
    single = QuestionLoader(questions(13), 4, seed=0)
    take(single, 2)
    halves = [QuestionLoader(questions(13), 2, 0, None, process, 2) for process in (0, 1)]
    for half in halves:
        half.restore(single.state())
    for batch in take(single, 5):
        parts = [next(half) for half in halves]
        assert batch == [q.id for pair in zip(*parts, strict=True) for q in pair]


def test_other_sources_with_the_same_ids_are_other_data():
    """Two sets often use the same numbers as ids, so a position in one would be accepted in the other."""
    state = QuestionLoader(questions(10), 2, seed=0).state()
    with pytest.raises(UserError, match="other questions"):
        QuestionLoader(questions(10, "other"), 2, seed=0).restore(state)


@pytest.mark.parametrize(
    "changed",
    [{"text": "Who?"}, {"answers": ("other",)}, {"kind": "sequential"}, {"metadata": {"prompt": "Answer."}}],
    ids=lambda changed: next(iter(changed)),
)
def test_edited_questions_are_other_data(changed):
    """A label, which decides the reward, is edited between two starts, and the run resumes as if unchanged."""
    state = QuestionLoader(questions(10), 2, seed=0).state()
    edited = questions(10)
    edited[3] = replace(edited[3], **changed)
    with pytest.raises(UserError, match="other questions"):
        QuestionLoader(edited, 2, seed=0).restore(state)


@pytest.mark.parametrize(
    "state", [{}, {"grain": {"next_index": 1}}, {"fingerprint": {}}, {"fingerprint": 3, "grain": {}}]
)
def test_a_state_that_is_none(state):
    """A checkpoint of another program ends in a KeyError."""
    with pytest.raises(UserError, match="data: "):
        QuestionLoader(questions(10), 2, seed=0).restore(state)


def test_too_few_questions():
    """A loader without a single batch ends the run before its first step, or waits forever."""
    with pytest.raises(UserError, match="3 questions found, accepted: at least those of one step, 4"):
        QuestionLoader(questions(3), 4, seed=0)
    with pytest.raises(UserError, match="at least those of one step, 8"):
        QuestionLoader(questions(7), 4, 0, None, 0, 2)

"""Merged data sets: written completely, read lazily, equal to their sources; sets of TFDS; leaks."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from programs import completed

from psearch_jax.data.loader import QuestionLoader
from psearch_jax.data.prepared import PreparedQuestions, find_overlap, location_exists, open_questions, prepare
from psearch_jax.data.sources import read_questions
from psearch_jax.types import Question, UserError

FILES = {"questions.array_record", "questions.json", "skipped.txt"}


def write(path, count, kind="comparison", answer="Ünïcode"):
    metadata = {"type": kind, "titles": ["A", "B"], "level": "easy"}
    rows = [
        {"id": f"q{i}", "question": f"Who is {i}?", "golden_answers": [answer] * (1 + i % 2), "metadata": metadata}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def command(*arguments, expect=0):
    done = completed(["launch/prepare_data.py", *arguments])
    assert done.returncode == expect, done.stderr
    return done


def test_prepared_questions_are_those_of_their_files(tmp_path):
    """Questions come back unchanged and in order, with their counts."""
    first, second = write(tmp_path / "a.jsonl", 7), write(tmp_path / "b.jsonl", 5, "bridge")
    prepared = prepare([("hotpotqa", first), ("nq", second)], tmp_path / "out")
    expected = read_questions(first, "hotpotqa") + read_questions(second, "nq")
    assert list(prepared) == expected and prepared[np.int64(8)] == expected[8] and prepared[2:4] == expected[2:4]
    assert prepared[-1] == expected[-1] and prepared.counts == [("hotpotqa", "parallel", 7), ("nq", "sequential", 5)]
    assert list(open_questions(tmp_path / "out")) == expected


def test_position_in_a_prepared_set(tmp_path):
    """A position in a prepared set is the same as in its file, and is refused in another set."""
    files = [write(tmp_path / f"{name}.jsonl", 20) for name in "ab"]
    first, second = (prepare([(name, file)], tmp_path / name) for name, file in zip("xy", files, strict=True))
    loader = QuestionLoader(first, 4, 0)
    next(loader)
    state = json.loads(json.dumps(loader.state()))
    rest = [next(loader) for _ in range(6)]
    for questions in (PreparedQuestions(tmp_path / "x"), read_questions(files[0], "x")):
        again = QuestionLoader(questions, 4, 0)
        again.restore(state)
        assert [next(again) for _ in range(6)] == rest
    with pytest.raises(UserError, match="other questions"):
        QuestionLoader(second, 4, 0).restore(state)


def test_a_refused_set_leaves_nothing_behind(tmp_path):
    """Two sources of one name must not share an id; after an error or a kill the directory can be prepared."""
    files = [write(tmp_path / f"{name}.jsonl", 3) for name in "ab"]
    with pytest.raises(UserError, match=r"b\.jsonl:1: field id: 'q0' was already used in .*a\.jsonl:1"):
        prepare([("nq", files[0]), ("nq", files[1])], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "questions.array_record").write_bytes(b"x" * 100)  # of a killed call
    with pytest.raises(UserError, match="accepted: a directory of launch/prepare_data.py"):
        PreparedQuestions(tmp_path / "out")
    assert len(prepare([("nq", files[0]), ("hotpotqa", files[1])], tmp_path / "out")) == 6


def test_damaged_sets_are_refused(tmp_path):
    """Truncated, empty, missing or exchanged files are noticed when the set is opened."""
    out = tmp_path / "out"
    prepare([("nq", write(tmp_path / "a.jsonl", 50))], out)
    prepare([("nq", write(tmp_path / "b.jsonl", 3))], tmp_path / "other")
    rows, summary = out / "questions.array_record", out / "questions.json"
    content, counts = rows.read_bytes(), summary.read_bytes()
    other = (tmp_path / "other" / rows.name).read_bytes()
    damages = [(rows, data) for data in (content[: len(content) // 2], other, None)]
    for file, damage in [*damages, (summary, b"{"), (summary, b"{}")]:
        rows.write_bytes(content)
        summary.write_bytes(counts)
        file.write_bytes(damage) if damage is not None else file.unlink()
        with pytest.raises(UserError, match=r"questions.array_record: cannot be read .*; prepare it again"):
            PreparedQuestions(out)


class Answered(tfds.core.GeneratorBasedBuilder):
    """A set of TFDS with answers as a list, as in natural_questions_open, or as TriviaQA's record."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, record: bool, **kwargs):
        self.record = record
        super().__init__(file_format="array_record", **kwargs)

    def _info(self):
        text = tfds.features.Text()
        answers = tfds.features.Sequence(text)
        answers = {"value": text, "aliases": answers} if self.record else answers
        features = tfds.features.FeaturesDict({"question": text, "answer": answers})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(4), "validation": self._generate_examples(2)}

    def _generate_examples(self, count):
        for i in range(count):
            answers = [f"here {i}", "there"]
            answer = {"value": answers[0], "aliases": answers} if self.record else answers
            yield i, {"question": f"where is {i}", "answer": answer}


@pytest.mark.parametrize("record", [False, True])
def test_sets_of_tfds(tmp_path, record):
    """Sets of TFDS are read with their answers, as a list or as TriviaQA's record."""
    made = Answered(record, data_dir=tmp_path / "tfds")
    made.download_and_prepare()
    questions = open_questions(f"tfds:{made.data_path}:train", "set")
    found = {(q.source, q.text, q.answers, q.kind) for q in questions}
    assert found == {("set", f"where is {i}", (f"here {i}", "there"), "single") for i in range(4)}
    assert len(prepare([("set", f"tfds:{made.data_path}:validation")], tmp_path / "out")) == 2
    for location, words in ((f"tfds:{made.data_path}:test", "cannot be opened"), ("tfds:trivia_qa", "BUILDER:SPLIT")):
        with pytest.raises(UserError, match=words):
            open_questions(location)


def test_leaks_are_found_by_their_words():
    """Questions that differ only in capitals, articles or punctuation are the same."""
    training = [Question("nq", "1", "Who wrote the Iliad?", ("Homer",), "single")]
    asked = [
        Question("dev", "a", "who wrote Iliad", ("Homer",), "single"),
        Question("dev", "b", "Who wrote the Odyssey?", ("Homer",), "single"),
    ]
    assert [q.id for q in find_overlap(asked, training)] == ["a"] and find_overlap(asked, []) == []


def test_the_command(tmp_path):
    """Bad rows, a second call and wrong flags get one line each, and nothing is half-written."""
    file, out = Path(write(tmp_path / "a.jsonl", 3)), tmp_path / "out"
    with file.open("a") as more:
        more.write('{"id": "bad"}\n')
    done = command(f"--source=nq:{file}", f"--out={out}", expect=2)
    assert len(done.stderr.strip().splitlines()) == 1 and "a.jsonl:4: field" in done.stderr and not out.exists()
    done = command(f"--source=nq:{file}", f"--out={out}", "--skip_bad_rows")
    assert "| nq | 3 | 3 | 0 | 0 | 0 |" in done.stdout and "1 bad rows skipped" in done.stdout
    assert "a.jsonl:4: field" in (out / "skipped.txt").read_text()
    assert len(PreparedQuestions(out)) == 3 and {p.name for p in out.iterdir()} == FILES
    assert "already holds prepared questions" in command(f"--source=nq:{file}", f"--out={out}", expect=2).stderr
    assert len(command("--source=nq", f"--out={tmp_path / 'new'}", expect=2).stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("mine = 5", "TypeError: 'int' object is not callable"),
        ("def mine():\n    raise KeyError('x')", "KeyError: 'x'"),
        ("other = 5", "has no 'mine'"),
        ("def mine():\n    return [{'id': '1', 'question': 'Who?'}]", "row 1: field golden_answers"),
    ],
)
def test_questions_of_a_users_code_are_checked(tmp_path, code, problem):
    """What is wrong with the code or its rows is one line; a file that is missing, or named so, is not code."""
    (tmp_path / "asked.py").write_text(code)
    location = f"{tmp_path}/asked.py:mine"
    assert location_exists(location) and not location_exists(f"{tmp_path}/gone.py:mine")
    with pytest.raises(UserError, match=problem):
        open_questions(location)
    assert not location_exists("closed_world:pairs")

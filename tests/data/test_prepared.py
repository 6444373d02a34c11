"""Merged data sets: written completely, read lazily, equal to their sources; sets of TFDS; leaks."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from programs import completed

from psearch_jax.data.loader import QuestionLoader
from psearch_jax.data.prepared import PreparedQuestions, open_questions, overlap, prepare
from psearch_jax.data.sources import read_questions
from psearch_jax.types import Question, UserError


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
    """Questions come back from array_record files unchanged and in order."""
    first, second = write(tmp_path / "a.jsonl", 7), write(tmp_path / "b.jsonl", 5, "bridge")
    prepared = prepare([("hotpotqa", first), ("nq", second)], "train", tmp_path / "out")
    expected = read_questions(first, "hotpotqa") + read_questions(second, "nq")
    assert list(prepared) == expected and prepared[np.int64(8)] == expected[8] and prepared[2:4] == expected[2:4]
    assert prepared.counts == [("hotpotqa", "parallel", 7), ("nq", "sequential", 5)] and prepared.split == "train"
    assert list(open_questions(tmp_path / "out")) == expected


def test_tfds_reads_it_by_its_name(tmp_path):
    """TFDS itself can open the dataset."""
    prepare([("nq", write(tmp_path / "a.jsonl", 3))], "validation", tmp_path / "out")
    rows = tfds.data_source("psearch_qa", data_dir=tmp_path / "out", split="validation")
    assert [row["question"] for row in rows] == [b"Who is 0?", b"Who is 1?", b"Who is 2?"]


def test_position_in_a_prepared_set(tmp_path):
    """A position in a prepared set is the same as in its file, and is refused in another set."""
    files = [write(tmp_path / f"{name}.jsonl", 20) for name in "ab"]
    first = prepare([("x", files[0])], "train", tmp_path / "first")
    second = prepare([("y", files[1])], "train", tmp_path / "second")
    loader = QuestionLoader(first, 4, 0, fingerprint=first.fingerprint)
    next(loader)
    state = loader.state()
    rest = [next(loader) for _ in range(6)]
    again = QuestionLoader(PreparedQuestions(tmp_path / "first"), 4, 0, fingerprint=first.fingerprint)
    again.restore(json.loads(json.dumps(state)))
    assert [next(again) for _ in range(6)] == rest
    in_memory = QuestionLoader(read_questions(files[0], "x"), 4, 0)  # the same questions, not from a prepared set
    in_memory.restore(state)
    assert next(in_memory) == rest[0]
    with pytest.raises(UserError, match="other questions"):
        QuestionLoader(second, 4, 0, fingerprint=second.fingerprint).restore(state)


def test_an_id_in_two_sources_of_one_name(tmp_path):
    """Two sources of one name must not share an id; nothing is left behind."""
    files = [write(tmp_path / f"{name}.jsonl", 3) for name in "ab"]
    with pytest.raises(UserError, match=r"b\.jsonl:1: field id: 'q0' was already used in .*a\.jsonl:1"):
        prepare([("nq", files[0]), ("nq", files[1])], "train", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(prepare([("nq", files[0]), ("hotpotqa", files[1])], "train", tmp_path / "out")) == 6


def test_damaged_sets_are_refused(tmp_path):
    """Truncated, empty or missing files are noticed when the set is opened."""
    out = tmp_path / "out"
    prepare([("nq", write(tmp_path / "a.jsonl", 50))], "train", out)
    (record,) = out.rglob("*array_record*")
    content = record.read_bytes()
    for damage in (content[: len(content) // 2], b""):
        record.write_bytes(damage)
        with pytest.raises(UserError, match=r"psearch_qa.*cannot be read .*; prepare it again"):
            PreparedQuestions(out)
    record.unlink()
    with pytest.raises(UserError, match="prepare it again"):
        PreparedQuestions(out)
    with pytest.raises(UserError, match="accepted: a directory of launch/prepare_data.py"):
        PreparedQuestions(tmp_path)


class NaturalQuestionsOpen(tfds.core.GeneratorBasedBuilder):
    """A few rows in the format of TFDS's own set."""

    name = "natural_questions_open"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"question": tfds.features.Text(), "answer": tfds.features.Sequence(tfds.features.Text())}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(4), "validation": self._generate_examples(2)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"question": f"where is {i}", "answer": [f"here {i}", "there"]}


class TriviaQa(NaturalQuestionsOpen):
    """The same in TriviaQA's format, where the answer is a record."""

    name = "trivia_qa"

    def _info(self):
        answer = {"value": tfds.features.Text(), "aliases": tfds.features.Sequence(tfds.features.Text())}
        features = {"question": tfds.features.Text(), "question_id": tfds.features.Text(), "answer": answer}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _generate_examples(self, count):
        for i in range(count):
            answer = {"value": f"here {i}", "aliases": [f"here {i}", "there"]}
            yield i, {"question": f"where is {i}", "question_id": f"tc_{i}", "answer": answer}


@pytest.mark.parametrize("builder", [NaturalQuestionsOpen, TriviaQa])
def test_sets_of_tfds(tmp_path, builder):
    """Sets of TFDS are read with their answers, as a list or as TriviaQA's record."""
    made = builder(data_dir=tmp_path / "tfds", file_format="array_record")
    made.download_and_prepare()
    questions = open_questions(f"tfds:{made.data_path}:train", "set")
    assert len(questions) == 4 and {q.kind for q in questions} == {"single"}
    assert {(q.source, q.text, q.answers) for q in questions} == {
        ("set", f"where is {i}", (f"here {i}", "there")) for i in range(4)
    }
    prepared = prepare([("set", f"tfds:{made.data_path}:validation")], "dev", tmp_path / "out")
    assert len(prepared) == 2
    with pytest.raises(UserError, match="cannot be opened"):
        open_questions(f"tfds:{made.data_path}:test")
    with pytest.raises(UserError, match="accepted: tfds:BUILDER:SPLIT"):
        open_questions("tfds:trivia_qa")


def test_leaks_are_found_by_their_words():
    """Questions that differ only in capitals, articles or punctuation are the same."""
    training = [Question("nq", "1", "Who wrote the Iliad?", ("Homer",), "single")]
    asked = [
        Question("dev", "a", "who wrote Iliad", ("Homer",), "single"),
        Question("dev", "b", "Who wrote the Odyssey?", ("Homer",), "single"),
    ]
    assert [q.id for q in overlap(asked, training)] == ["a"] and overlap(asked, []) == []


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
    assert len(PreparedQuestions(out)) == 3 and sorted(p.name for p in out.iterdir()) == ["psearch_qa", "skipped.txt"]
    assert "already holds a prepared dataset" in command(f"--source=nq:{file}", f"--out={out}", expect=2).stderr
    for flag in ("--source=nq", "--source=:x", f"--source=nq:{tmp_path / 'nope'}"):
        assert len(command(flag, f"--out={tmp_path / 'new'}", expect=2).stderr.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()

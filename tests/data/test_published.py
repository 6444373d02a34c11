"""A benchmark from files in the published format of 2WikiMultiHopQA: its corpus, and sets that share no entity."""

import json
import tracemalloc

import pytest
from programs import completed

from psearch_jax.data import sources
from psearch_jax.data.prepared import PreparedQuestions
from psearch_jax.data.triples import without_entities_of
from psearch_jax.text.evidence import Triple, rounds_of
from retrieval.corpus import MemoryMappedCorpus


def write(path, films, **changes):
    """A question for each number in `films`; two films are by one director. Some sentences start with a space."""
    rows = []
    for i in films:
        film, person, town, born, released = f"Film {i}", f"Person {i // 2}", f"Town {i // 2}", 1900 + i // 2, 1950 + i
        texts = (
            [f"{film} was released in {released}.", f" It is by {person}."],
            [f"{person}, born {born}", f" in {town}."],
        )
        evidences = [[film, "director", person], [person, "date of birth", str(born)]]
        evidences += [[film, "publication date", str(released)], [person, "place of birth", town]]
        facts = {"context": [[film, texts[0]], [person, texts[1]]], "supporting_facts": [[film, 1], [person, 0]]}
        asked = {"question": f"When was the director of {film} born?", "answer": str(born), "type": "compositional"}
        rows.append({"_id": f"5a{i}", **asked, **facts, "evidences": evidences, **changes})
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


def command(*arguments, expect=0):
    done = completed(["launch/prepare_data.py", *arguments])
    assert done.returncode == expect, done.stderr
    assert not expect or len(done.stderr.strip().splitlines()) == 1
    return done.stdout + done.stderr


def test_a_benchmark_from_published_files(tmp_path):
    """The corpus has each paragraph once; the sets share no entity and have the sizes and forms asked for."""
    train, test, corpus = tmp_path / "train.json", tmp_path / "dev.json", tmp_path / "corpus.jsonl"
    write(train, range(60)), write(test, range(41, 80))
    arguments = [f"--source=train:{train}", f"--source=test:{test}", f"--corpus_out={corpus}"]
    assert "120 passages" in command(*arguments)  # 80 films and 40 people
    passages = list(MemoryMappedCorpus(corpus))
    assert len({(p.title, p.text) for p in passages}) == len({p.id for p in passages}) == 120
    assert passages[1].text == "Person 0, born 1900 in Town 0."
    assert "accepted: a new file" in command(*arguments, expect=2)
    command(*arguments[:2], f"--corpus_out={tmp_path / 'short.jsonl'}", "--passage_words=2")
    assert list(MemoryMappedCorpus(tmp_path / "short.jsonl"))[1].text == "Person 0,"

    options = [f"--corpus={corpus}", "--sizes=3,4", "--forms=compare,bridge_choose", "--questions=40"]
    command(f"--source=train:triples:{train}", *options, f"--exclude_entities_of={test}", f"--out={tmp_path / 'a'}")
    command(f"--source=test:triples:{test}", *options, f"--out={tmp_path / 'b'}")
    entities = []
    for name in "ab":
        questions = list(PreparedQuestions(tmp_path / name))
        assert len(questions) == 40 and {q.metadata["form"] for q in questions} == {"compare", "bridge_choose"}
        assert {len(q.metadata["rounds"][0]) for q in questions if q.kind == "parallel"} == {3, 4}
        facts = [fact for q in questions for r in rounds_of(q) for fact in r]
        entities.append({name for fact in facts for name in (fact.entity, fact.value) if name[:2] in ("Fi", "Pe")})
    assert not entities[0] & entities[1] and "Film 41" in entities[1]  # which is in both files
    command(f"--source=2wiki:{test}", f"--out={tmp_path / 'published'}")
    metadata = PreparedQuestions(tmp_path / "published")[0].metadata
    assert metadata["supporting_titles"] == ["Film 41", "Person 20"] and len(metadata["evidences"]) == 4


def test_entities_of_another_file_are_excluded():
    """A triple may share its value with the other file, but no entity that either file has a fact about."""
    others = [Triple("Jaws", "director", "Steven Spielberg"), Triple("Fritz Lang", "place of birth", "Vienna")]
    shared = [
        Triple("JAWS", "publication date", "1975"),
        Triple("Steven Spielberg", "place of birth", "Cincinnati"),
        Triple("Metropolis", "director", "Fritz Lang"),
    ]
    free = [Triple("Billy Wilder", "place of death", "Vienna"), Triple("Metropolis", "publication date", "1927")]
    assert without_entities_of([*shared, *free], others) == free


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"context": None}, "--corpus_out={}/c", "train.json: element 1: field context: nothing found"),
        ({"context": [["A", "text"]]}, "--corpus_out={}/c", "field context: ['A', 'text'] found"),
        ({}, "--corpus_out={}/c --out={}/d", "accepted: --out=DIR, without --passage_words; or"),
        ({}, "--out={}/d --passage_words=9", "accepted: --out=DIR, without --passage_words; or"),
        ({}, "--out={}/d --sizes=1,3", "--sizes=['1', '3']"),
        ({}, "--out={}/d --forms=compares", "accepted: compare,has,bridge,bridge_choose,fact,fact_choose"),
    ],
)
def test_what_is_refused(tmp_path, changes, flags, message):
    """Rows without paragraphs and wrong flags are refused in one line, and nothing is written."""
    file = write(tmp_path / "train.json", range(3), **changes)
    assert message in command(f"--source=2wiki:{file}", *flags.replace("{}", str(tmp_path)).split(), expect=2)
    assert [path.name for path in tmp_path.iterdir()] == ["train.json"]


def test_arrays_are_read_in_parts(tmp_path, monkeypatch):
    """Elements come back complete wherever a part ends, and a large file is never in memory."""
    file = tmp_path / "x.json"
    rows = [{"_id": str(i), "question": 'é "]}, [\\ \U0001f600?' * (i % 7 + 1), "answer": "a"} for i in range(30)]
    for indent, size in ((None, 1), (1, 7), (None, 1 << 20)):
        monkeypatch.setattr(sources, "_CHUNK", size)
        file.write_text(json.dumps(rows, ensure_ascii=bool(indent), indent=indent), encoding="utf-8")
        assert [q.text for q in sources.read_questions(file)] == [row["question"] for row in rows]
    file.write_text(json.dumps([{"context": [["A", ["word " * 200]]]}] * 4000))
    monkeypatch.setattr(sources, "_CHUNK", 1 << 14)
    tracemalloc.start()
    assert len(list(sources.iter_contexts([file]))) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < file.stat().st_size / 10

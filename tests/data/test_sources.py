"""Reading question files: real formats, labels, and every kind of bad row."""

import json

import numpy as np
import pytest

from psearch_jax.data.kinds import KIND_OF_LABEL
from psearch_jax.data.sources import read_questions
from psearch_jax.eval.scores import score, summarise
from psearch_jax.text.prompts import render_messages
from psearch_jax.types import KINDS, Trajectory, Turn, UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


def row(i=0, label="comparison", **changes):
    base = {"id": f"q{i}", "question": "Who is older?", "golden_answers": ["Ada"], "metadata": {"type": label}}
    return {**base, **changes}


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def parquet_row(i=0, label="comparison", source="hotpotqa"):
    """A row as ParallelSearch's own preparation writes it; Search-R1's has no `type`."""
    content = f"Answer. For example, <answer> Beijing </answer>. Question: Who is older, {i} or 1?\n"
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "Ada L."]}},
        "extra_info": {"split": "train", "index": i, "type": label},
    }


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_every_label_has_its_kind(tmp_path):
    """Labels of the data sets give the kind; without a label a question is single."""
    labels = [*KIND_OF_LABEL, None, ""]
    questions = read_questions(write(tmp_path / "two.jsonl", [row(i, label) for i, label in enumerate(labels)]))
    assert [q.kind for q in questions] == [*KIND_OF_LABEL.values(), "single", "single"]
    assert set(KIND_OF_LABEL.values()) == set(KINDS)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"metadata": None}, "kind", "single"),
        ({"golden_answers": ["Ada", " ", ""]}, "answers", ("Ada",)),
        ({"golden_answers": None, "answer": "Ada", "answer_aliases": ["", None, "A."]}, "answers", ("Ada", "A.")),
        ({"golden_answers": None, "answer": "Ada", "answer_aliases": [" "]}, "answers", ("Ada",)),
        ({"question": "Who\u2028is older?"}, "text", "Who\u2028is older?"),
        ({"metadata": {"type": "bridge", "titles": ["A"], "context": {"a": 1}}, "prompt": PROMPT}, "metadata", None),
    ],
)
def test_rows_are_read_as_they_are(tmp_path, changes, field, value):
    """Blank aliases, nested records and missing labels are left out; a row's own prompt and its line breaks stay."""
    changed = {key: v for key, v in row(**changes).items() if v is not None}
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(changed, ensure_ascii=False) + "\n", encoding="utf-8")
    (question,) = read_questions(file)
    assert getattr(question, field) == (value or {"type": "bridge", "titles": ["A"], "prompt": PROMPT})
    assert question.source == "x"


def test_text_that_cannot_be_written_is_replaced(tmp_path):
    """Lone surrogates, which cannot be encoded, become question marks, in lines and in arrays."""
    file = tmp_path / "x.json"
    text = json.dumps({"id": "a\udc00", "question": "\ud83d \U0001f600?", "golden_answers": ["b\ud83d"]})
    for content in (text, f"[{text}]"):
        file.write_text(content)
        (question,) = read_questions(file)
        assert (question.id, question.text, question.answers) == ("a?", "? \U0001f600?", ("b?",))


def test_parquet_of_parallel_search(tmp_path, tiny_tokenizer):
    """A row's own source is part of its identity: indices start again with each set of a merged file."""
    rows = [parquet_row(0), parquet_row(1, "bridge"), parquet_row(0, "na", source="nq")]
    questions = read_questions(write_parquet(tmp_path / "train.parquet", rows), "ignored")
    assert [(q.source, q.id, q.kind) for q in questions] == [
        ("hotpotqa", "0", "parallel"),
        ("hotpotqa", "1", "sequential"),
        ("nq", "0", "single"),
    ]
    assert questions[0].answers == ("Ada", "Ada L.")
    assert questions[1].text == "Who is older, 1 or 1?"
    assert questions[0].metadata["prompt"] == rows[0]["prompt"]
    assert render_messages(tiny_tokenizer, questions[0].metadata["prompt"])


TRIPLES = [["Ada", "father", "Byron"], ["Byron", "place of birth", "London"]]
HOTPOT = {"_id": "5a", "question": "Who?", "answer": "Ada", "type": "comparison", "level": "hard", "context": [[1]]}
FACTS = {"evidences": TRIPLES, "supporting_facts": [["Ada", 0], ["Byron", 2], ["Ada", 1]]}
TITLES = {"evidences": TRIPLES, "supporting_titles": ["Ada", "Byron"]}
BROWSECOMP = {"query_id": "12", "query": "Who?", "answer": "Ada", "gold_docs": [{"docid": "7", "text": "long"}]}
MUSIQUE = {"id": "3hop2__1_2_3", "question": "Who?", "answer": "Ada", "answer_aliases": ["Ada", None]}
SEARCH_R1 = {"id": "train_0", "question": "Who?", "metadata": {"type": "bridge"}, "extra_info": {"index": 0}}
# data set: the file's ending, a row, and what is read from it (id, kind, metadata without a prompt)
FORMATS = {
    "HotpotQA": ("json", HOTPOT, ("5a", "parallel", {"type": "comparison"})),
    "2WikiMultiHopQA": ("json", HOTPOT | FACTS, ("5a", "parallel", {"type": "comparison"} | TITLES)),
    "BrowseComp-Plus": ("jsonl", BROWSECOMP, ("12", "single", {})),
    "MuSiQue": ("jsonl", MUSIQUE, ("3hop2__1_2_3", "mixed", {})),
    "MuSiQue of FlashRAG": ("jsonl", row(metadata={"id": "4hop1__1_2"}), ("q0", "sequential", {"id": "4hop1__1_2"})),
    "a MuSiQue id with a label": ("jsonl", row(id="3hop2__1_2"), ("3hop2__1_2", "parallel", {"type": "comparison"})),
    "FlashRAG as parquet": ("parquet", row(), ("q0", "parallel", {"type": "comparison"})),
    "Search-R1": ("parquet", {**parquet_row(), **SEARCH_R1}, ("0", "sequential", {"type": "bridge"})),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_the_data_sets(tmp_path, name):
    """The fields of every data set are found; nested records are left out."""
    ending, values, (identifier, kind, metadata) = FORMATS[name]
    file = tmp_path / f"set.{ending}"
    if ending == "parquet":
        write_parquet(file, [values])
    else:
        file.write_text("\ufeff" + json.dumps([values] if ending == "json" else values), encoding="utf-8")
    (question,) = read_questions(file)
    assert (question.id, question.kind, question.answers[0]) == (identifier, kind, "Ada")
    question.metadata.pop("prompt", None)
    assert question.text.startswith("Who") and question.metadata == metadata


@pytest.mark.parametrize("value", [["a", "b"], "high", [1, 2]])
def test_names_that_another_set_uses_otherwise(tmp_path, value):
    """Reserved names with values of another form are left out, so that an evaluation can use the rest."""
    names = ("rounds", "evidences", "chance", "supporting_titles")
    metadata = {"type": "bridge", "other": value} | dict.fromkeys(names, value)
    (question,) = read_questions(write(tmp_path / "x.jsonl", [row(metadata=metadata)]))
    turn, tokens = Turn("x", "answer", True, answer="Ada", n_sampled=1), np.ones(1)
    trajectory = Trajectory(question, 0, "answered", (turn,), tokens, tokens, tokens, 0)
    assert question.metadata["other"] == value and summarise([score(trajectory)])["questions"] == 1


def test_array_of_multihop_rag(tmp_path):
    """Rows without ids are named by their index, which does not shift when a bad row is skipped."""
    kinds = ("comparison_query", "inference_query", "temporal_query", "null_query")
    rows = [{"query": f"q{i}?", "answer": "Yes", "question_type": kind} for i, kind in enumerate(kinds)]
    rows.insert(1, {"query": "no answer?", "question_type": "null_query"})
    file = tmp_path / "MultiHopRAG.json"
    file.write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"MultiHopRAG\.json: element 2: field golden_answers: nothing found"):
        read_questions(file)
    skipped = []
    questions = read_questions(file, "multihoprag", skipped)
    assert [(q.id, KINDS.index(q.kind)) for q in questions] == [("0", 0), ("2", 1), ("3", 3), ("4", 2)]
    assert len(skipped) == 1 and "element 2" in skipped[0]


def test_bad_rows_are_skipped_when_asked(tmp_path):
    """With `skipped`, bad rows are left out and reported one by one."""
    file = tmp_path / "x.jsonl"
    rows = [json.dumps(r) for r in (row(0), row(0), row(1, golden_answers=[]), row(2))]
    file.write_bytes("\n".join([rows[0], "{broken", *rows[1:]]).encode() + b'\n{"id": "\xe9"}\n')
    skipped = []
    assert [q.id for q in read_questions(file, skipped=skipped)] == ["q0", "q2"]
    expected = ("2: not JSON", "3: field id", "4: field golden_answers", "6: not UTF-8")
    assert all(f"x.jsonl:{words}" in line for words, line in zip(expected, skipped, strict=True))


BAD_ROWS = {
    "blank question": (row(question="  "), "field question: '  '"),
    "no answers": (row(golden_answers=None), "field golden_answers: nothing"),
    "blank answers": (row(golden_answers=["", " "]), r"field golden_answers: \['', ' '\] found"),
    "id of another type": (row(id=1.5), "field id: 1.5"),
    "unknown label": (row(label="hybrid"), "field metadata.type: 'hybrid' found, accepted: comparison, "),
    "metadata of another type": (row(metadata="bridge"), "field metadata: 'bridge'"),
    "duplicate id": (row(0), r"field id: 'q0' was already used in .*x\.jsonl:1$"),
    "not an object": (["q1"], "list found"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_names_file_line_and_field(tmp_path, name):
    """A bad row is refused in one line that names file, line and field."""
    bad, message = BAD_ROWS[name]
    file = write(tmp_path / "x.jsonl", [row(0), bad])
    with pytest.raises(UserError, match=r"x\.jsonl:2: " + message) as error:
        read_questions(file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"\n \n", "no questions found"),
        (b'{"id": "a", "ques', ":1: not JSON"),
        (b'["\xff"]', "not UTF-8 text"),
        (b'[{"_id": "a", "question": "?", "answer": "b"}, {"_id": "c", "ques', "element 2: not JSON"),
        (b'[{"_id": "a", "question": "?", "answer": "b"}', "element 2: not JSON"),
        (b'[{"_id": "a", "question": "?", "answer": "b"}] [1]', "element 2: not JSON"),
        (b"[]", "no questions found"),
        (b"PAR1 but not really", "not a readable parquet file"),
    ],
)
def test_bad_file(tmp_path, content, message):
    """Missing, empty and damaged files are refused by name."""
    file = tmp_path / ("x.parquet" if content and b"PAR1" in content else "x.jsonl")
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name}.*{message}"):
        read_questions(file)

"""Corpora in the formats of other projects."""

import gzip
import json

import pytest

from retrieval.corpora import PASSAGE_WORDS, open_corpus, split_text
from retrieval.protocol import CorpusError

ARTICLES = [
    {
        "title": "Harbor  opens",
        "source": "The Daily",
        "published_at": "2023-10-01T10:00:00+00:00",
        "body": " ".join(f"Sentence number {n} tells of the harbor and its ships." for n in range(40)),
    },
    {"title": "Short", "body": "One line."},
]


def test_jsonl_of_every_project(tmp_path):
    """Rows of FlashRAG, with title and text, and of Search-R1, with contents, keep their titles."""
    rows = [
        {"id": "1", "contents": '"Title"\nText one.'},
        {"id": 2, "title": "Two\n words", "text": "Text two."},
        {"id": "3", "title": None, "text": "Text three."},
        {"id": "4", "contents": "No title"},
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    passages = [(p.id, p.title, p.text) for p in open_corpus(path)]
    assert passages == [
        ("1", "Title", "Text one."),
        ("2", "Two words", "Text two."),
        ("3", "", "Text three."),
        ("4", "", "No title"),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]
    for bad, field in (({"id": "5", "title": 3, "text": "x"}, "title"), ({"id": "5", "title": "x"}, "text")):
        path.write_text(json.dumps(bad))
        with pytest.raises(CorpusError, match=f"line 1: field {field}"):
            open_corpus(path)


def test_articles_become_passages(tmp_path):
    """MultiHop-RAG's articles become passages that end with a sentence, and follow the file when it changes."""
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(ARTICLES, indent=1))
    corpus = open_corpus(path)
    assert [p.id for p in corpus][-2:] == ["0-3", "1-0"] and len({p.id for p in corpus}) == len(corpus)
    first = corpus[0]
    assert first.title == "Harbor opens" and first.text.startswith(
        "(The Daily, 2023-10-01T10:00:00+00:00) Sentence number 0"
    )
    assert all(len(p.text.split()) <= PASSAGE_WORDS + 3 and p.text.endswith(".") for p in corpus)
    joined = " ".join(p.text.split(") ", 1)[1] for p in corpus if p.id.startswith("0-"))
    assert joined == ARTICLES[0]["body"] and corpus[len(corpus) - 1].text == "One line."

    path.write_text(json.dumps(ARTICLES[1:]))
    assert len(open_corpus(path)) == 1


def test_cutting_text():
    """Splitting keeps every word once, and also splits sentences that are too long."""
    text = 'A "b c." D e (f g!) H? ' + "long " * 25 + "end. (He said: \"No.\" 'Why?') Tail."
    for words in (1, 3, 7, 10, 100):
        pieces = split_text(text, words)
        assert " ".join(pieces).split() == text.split()
        assert all(0 < len(piece.split()) <= words for piece in pieces)
    assert split_text("A b c. D e f g! H i.", 5) == ["A b c.", "D e f g!", "H i."]
    assert split_text("  ") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'[{"title": "a", "body": "b"}', "not a JSON array"),
        (b"[3]", "element 1: a int"),
        (b'[{"title": "a", "body": "b"}, {"title": "a"}]', "element 2: field body is missing"),
        (b'[{"title": 3, "body": "b"}]', "element 1: field title is 3"),
        (b"[]", "no rows"),
    ],
)
def test_damaged_articles(tmp_path, content, words):
    """A damaged file is refused with its element and field, and leaves no passages."""
    path = tmp_path / "corpus.json"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match="corpus.json.*" + words) as error:
        open_corpus(path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob(".*"))


def test_a_compressed_file_is_refused(tmp_path):
    """A compressed file is refused in one line that says what to do."""
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"[]"))
    with pytest.raises(CorpusError, match="c.jsonl.gz: is compressed, accepted: the file that `gunzip c.jsonl.gz`"):
        open_corpus(tmp_path / "c.jsonl.gz")

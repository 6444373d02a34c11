"""The memory-mapped corpus."""

import pytest
from helpers import people

from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.protocol import CorpusError, Passage


def test_corpus_round_trip(tmp_path):
    """Passages are read back unchanged: quotes, line breaks, non-ASCII text, an empty title."""
    passages = [
        Passage("a", 'Say "hi"', "first\nsecond line "),
        Passage("b", "Alû", "Café \u2028 東京"),
        Passage("c", "", "no title"),
        Passage("d", '"', "one quote"),
    ]
    write_corpus(tmp_path / "c.jsonl", passages)
    corpus = MemoryMappedCorpus(tmp_path / "c.jsonl")
    assert list(corpus) == passages and len(corpus) == 4


def test_corpus_refuses_rows_outside(tmp_path):
    """Row -1, by which a search reports no result, is not the last passage."""
    write_corpus(tmp_path / "c.jsonl", people()[:3])
    for row in (-1, 3):
        with pytest.raises(IndexError):
            MemoryMappedCorpus(tmp_path / "c.jsonl")[row]


def test_corpus_reads_foreign_rows(tmp_path):
    """Rows of other tools are read: integer ids, bare titles, blank lines, no last newline, a BOM."""
    text = (
        '\ufeff{"id": 7, "contents": "\\"A\\"\\nx"}\n\n{"id": "8", "contents": "B\\ny"}\r\n{"id": 9, "contents": "z"}'
        '\n{"id": 10, "contents": "\\"C\\" \\r\\nx"}'
    )
    (tmp_path / "c.jsonl").write_bytes(text.encode())
    corpus = MemoryMappedCorpus(tmp_path / "c.jsonl")
    expected = [Passage("7", "A", "x"), Passage("8", "B", "y"), Passage("9", "", "z"), Passage("10", "C", "x")]
    assert list(corpus) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "1"}', ["line 3", "contents", "missing"]),
        ('{"id": "1", "contents": "  "}', ["line 3", "contents"]),
        ('{"id": true, "contents": "t\\nx"}', ["line 3", "id", "true"]),
        ("[" * 100_000, ["line 3", "JSON"]),
        ('{"id": "0", "contents": "t\\nx"}', ["line 3", "id", "line 1"]),
    ],
)
def test_corpus_names_the_bad_row(tmp_path, line, words):
    """A bad row is refused with its line and field."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "0", "contents": "t\\nx"}\n\n' + line + "\n")
    with pytest.raises(CorpusError) as error:
        MemoryMappedCorpus(path)
    message = str(error.value)
    assert all(word in message for word in [str(path), *words]) and "\n" not in message, message


def test_empty_corpus(tmp_path):
    """An empty or absent file is refused."""
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(CorpusError, match="no rows"):
        MemoryMappedCorpus(tmp_path / "empty.jsonl")
    with pytest.raises(CorpusError, match="no such"):
        MemoryMappedCorpus(tmp_path / "absent.jsonl")

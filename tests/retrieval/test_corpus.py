"""The memory-mapped corpus."""

import gzip
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import people

import retrieval.corpus
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.protocol import CorpusError, Passage


def test_corpus_round_trip(tmp_path):
    """A passage would change on its way to disk and back: quotes, line breaks, non-ASCII text, an empty title."""
    passages = [
        Passage("a", 'Say "hi"', "first\nsecond line "),
        Passage("b", "Alû", "Café \u2028 東京"),
        Passage("c", "", "no title"),
        Passage("d", '"', "one quote"),
    ]
    write_corpus(tmp_path / "c.jsonl", passages)
    corpus = MemoryMappedCorpus(tmp_path / "c.jsonl")
    assert list(corpus) == passages and len(corpus) == 4
    assert list(corpus.passages(1, 3)) == passages[1:3] and list(corpus.passages(3, 99)) == passages[3:]


def test_a_repeated_id_is_found_in_little_memory(tmp_path):
    """The line numbers of the error are counted in the complete file: a dump of 14 GB ends without a message."""
    path, text = tmp_path / "c.jsonl", "x" * 2**20
    write_corpus(path, [Passage(str(n % 31), "", text) for n in range(32)])
    tracemalloc.start()
    with pytest.raises(CorpusError, match=r"c.jsonl: line 32: field id repeats '0' of line 1"):
        MemoryMappedCorpus(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20, peak


def test_corpus_refuses_rows_outside(tmp_path):
    """Row -1, by which a search reports "nothing found", would return the last passage."""
    write_corpus(tmp_path / "c.jsonl", people()[:3])
    for row in (-1, 3):
        with pytest.raises(IndexError):
            MemoryMappedCorpus(tmp_path / "c.jsonl")[row]


def test_corpus_reads_foreign_rows(tmp_path):
    """Other tools' rows would be refused or misread: integer ids, bare titles, blank lines, no last newline, a BOM."""
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
        ('{"id": "1", "contents": 5}', ["line 3", "contents", "5"]),
        ('{"contents": "t\\nx"}', ["line 3", "id", "missing"]),
        ('{"id": true, "contents": "t\\nx"}', ["line 3", "id", "true"]),
        ('{"id": "1", "contents": "t', ["line 3", "JSON"]),
        ('["1", "t"]', ["line 3", "list"]),
        ("[" * 100_000, ["line 3", "JSON"]),
        ('{"id": "0", "contents": "t\\nx"}', ["line 3", "id", "'0'", "line 1"]),
    ],
)
def test_corpus_names_the_bad_row(tmp_path, line, words):
    """A bad row would be skipped silently, or the message would not say where it is."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "0", "contents": "t\\nx"}\n\n' + line + "\n")
    with pytest.raises(CorpusError) as error:
        MemoryMappedCorpus(path)
    message = str(error.value)
    assert all(word in message for word in [str(path), *words]) and "\n" not in message, message


def test_corpus_refuses_bytes_that_are_not_text(tmp_path):
    """Invalid UTF-8 would raise a decoding error without the file's name."""
    (tmp_path / "c.jsonl").write_bytes(b'{"id": "0", "contents": "\xff"}\n')
    with pytest.raises(CorpusError, match="c.jsonl: line 1"):
        MemoryMappedCorpus(tmp_path / "c.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_corpus(tmp_path, content):
    """An empty file would fail in mmap, or later in ScaNN."""
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match="no rows"):
        MemoryMappedCorpus(tmp_path / "empty.jsonl")
    with pytest.raises(CorpusError, match="no such"):
        MemoryMappedCorpus(tmp_path / "absent.jsonl")


def test_gzip_corpus(tmp_path):
    """A .gz could not be opened, a new one be hidden by the old unpacked file, or a truncated one pass as complete."""
    write_corpus(tmp_path / "c.jsonl", people())
    packed = gzip.compress((tmp_path / "c.jsonl").read_bytes())
    os.remove(tmp_path / "c.jsonl")
    (tmp_path / "c.jsonl.gz").write_bytes(packed)
    for _ in range(2):
        assert list(MemoryMappedCorpus(tmp_path / "c.jsonl.gz")) == people()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl.gz", "c.jsonl.gz.unpacked"]
    unpacked = (tmp_path / "c.jsonl.gz.unpacked").stat()

    for text, seconds in (("newer", 1), ("older", -1)):
        row = f'{{"id": 1, "contents": "t\\n{text}"}}\n'
        (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(row.encode()))
        when = unpacked.st_mtime_ns + seconds * 10**9
        os.utime(tmp_path / "c.jsonl.gz", ns=(when, when))
        assert [p.text for p in MemoryMappedCorpus(tmp_path / "c.jsonl.gz")] == [text]

    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(CorpusError, match="cut.jsonl.gz"):
        MemoryMappedCorpus(tmp_path / "cut.jsonl.gz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl.gz", "c.jsonl.gz.unpacked", "cut.jsonl.gz"]


def test_several_processes_unpack_one_corpus(tmp_path):
    """The pods of a job open an archive on their shared volume, often with equal process numbers: one would rename
    the file that another is still writing."""
    write_corpus(tmp_path / "c.jsonl", people())
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "c.jsonl").read_bytes()))
    with ThreadPoolExecutor(8) as pool:  # threads have the same process number
        opened = pool.map(lambda _: list(MemoryMappedCorpus(tmp_path / "c.jsonl.gz")), range(8))
        assert all(passages == people() for passages in opened)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "c.jsonl.gz", "c.jsonl.gz.unpacked"]


def test_gzip_corpus_beside_a_file_of_the_same_name(tmp_path):
    """Opening c.jsonl.gz would overwrite the user's own c.jsonl, or read it instead."""
    (tmp_path / "c.jsonl").write_text('{"id": 1, "contents": "t\\nmine"}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"id": 1, "contents": "t\\npacked"}\n'))
    for seconds in (1, 2**32):  # older than the archive, and newer
        os.utime(tmp_path / "c.jsonl", (seconds, seconds))
        assert [p.text for p in MemoryMappedCorpus(tmp_path / "c.jsonl.gz")] == ["packed"]
        assert [p.text for p in MemoryMappedCorpus(tmp_path / "c.jsonl")] == ["mine"]


def test_cached_offsets_follow_the_file(tmp_path, monkeypatch):
    """Offsets cached for a large corpus would be used after the corpus, or the cache itself, has changed."""
    monkeypatch.setattr(retrieval.corpus, "CACHE_OFFSETS_ABOVE_BYTES", 0)
    path, cache = tmp_path / "c.jsonl", tmp_path / "c.jsonl.offsets.npy"
    write_corpus(path, people()[:5])
    assert list(MemoryMappedCorpus(path)) == people()[:5] and cache.is_file()
    with monkeypatch.context() as patch:
        patch.setattr(retrieval.corpus, "_scan", lambda path: pytest.fail("the cache was not used"))
        assert list(MemoryMappedCorpus(path)) == people()[:5]
    write_corpus(path, people()[100:107])
    assert list(MemoryMappedCorpus(path)) == people()[100:107]
    cache.write_bytes(b"\x93NUMPY damaged")
    assert list(MemoryMappedCorpus(path)) == people()[100:107]

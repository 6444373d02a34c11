"""Builds that are stopped and resumed: they keep what took hours, and end with the index of one build."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import people

import retrieval.indexing.directory
import retrieval.indexing.encoding
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import BuildOptions, build_index, open_index, verify_index
from retrieval.protocol import CorpusError, Passage
from retrieval.ranking.index import ScannIndex
from retrieval.service import RetrievalService

BUILD = """
import sys, time
from pathlib import Path
import retrieval.indexing.directory as d
import retrieval.indexing.encoding as e
from retrieval.corpus import MemoryMappedCorpus
from retrieval.encoders.hashing import HashingEncoder

class Hanging(HashingEncoder):
    blocks, block_rows = 0, 16

    def encode_passages(self, passages):
        print("encode", flush=True)
        self.blocks += 1
        if self.blocks > int(sys.argv[3]):
            time.sleep(600)
        return super().encode_passages(passages)

e.FLUSH_ROWS = 16
corpus = MemoryMappedCorpus(sys.argv[1])
idf = HashingEncoder(64).fit(corpus).idf
d.build_index(sys.argv[2], corpus, Hanging(64, idf=idf), d.BuildOptions(shards=2, exact_below_rows=100))
"""


def test_a_killed_build_goes_on(tmp_path):
    """A kill loses a day of encoding, or the partial index is taken for a complete one."""
    write_corpus(tmp_path / "people.jsonl", people())
    out = tmp_path / "index"

    def build(blocks: int) -> subprocess.Popen:
        arguments = [sys.executable, "-c", BUILD, str(tmp_path / "people.jsonl"), str(out), str(blocks)]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = build(13)
    for _ in range(14):  # reaches the second shard: a shard is ten blocks of 16 rows
        assert first.stdout.readline() == "encode\n"
    second = build(99)
    _, errors = second.communicate()
    assert second.returncode and "in use by another build" in errors
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not out.exists()
    with pytest.raises(CorpusError, match="manifest.json: missing"):
        RetrievalService.open(out)

    third = build(99)
    encoded, errors = third.communicate()
    assert third.returncode == 0, errors
    assert encoded.count("encode") == 20 - 13
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "people.jsonl"]
    fresh = BuildOptions(shards=2, exact_below_rows=100)
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    build_index(tmp_path / "fresh", corpus, HashingEncoder(64).fit(corpus), fresh)
    for shard in ("shard-000", "shard-001"):
        resumed, uninterrupted = (
            (tmp_path / name / shard / "vectors.npy").read_bytes() for name in ("index", "fresh")
        )
        assert resumed == uninterrupted


class Counting(HashingEncoder):
    """Counts the rows it encodes; the passage titled `ill` gets a vector that is not finite."""

    ill = ""
    rows = 0

    def encode_passages(self, passages):
        self.rows += len(passages)
        vectors = super().encode_passages(passages)
        vectors[[p.title == self.ill for p in passages]] = np.nan
        return vectors


@pytest.fixture
def hours(tmp_path, monkeypatch, caplog):
    """`hours(passages, options)` builds tmp_path/index; returns the rows encoded, the trees built and the error."""
    monkeypatch.setattr(HashingEncoder, "block_rows", 16)
    monkeypatch.setattr(retrieval.indexing.encoding, "FLUSH_ROWS", 32)
    caplog.set_level("INFO", "retrieval")
    idf = HashingEncoder(64).fit(people()).idf

    def build(passages, options: BuildOptions, seed: int = 0, ill: str = "") -> tuple[int, int, str]:
        caplog.clear()
        write_corpus(tmp_path / "people.jsonl", passages)
        encoder, error = Counting(64, seed, idf), ""
        encoder.ill = ill
        try:
            build_index(tmp_path / "index", MemoryMappedCorpus(tmp_path / "people.jsonl"), encoder, options)
        except (CorpusError, KeyboardInterrupt) as stopped:
            error = repr(stopped)
        return encoder.rows, caplog.text.count("building the tree"), error

    return build


def test_a_build_stopped_at_its_end_keeps_what_took_hours(hours, tmp_path, monkeypatch):
    """A kill during hashing, or a change of effort, tree or number of shards, encodes the corpus again."""
    tree = BuildOptions(shards=1, exact_below_rows=100)

    def stopped(options: BuildOptions) -> tuple[int, int]:
        with monkeypatch.context() as patch:
            patch.setattr(
                retrieval.indexing.directory, "write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            rows, trees, error = hours(people(), options)
        assert "KeyboardInterrupt" in error
        return rows, trees

    assert stopped(tree) == (320, 1)
    assert stopped(tree) == (0, 0)
    assert stopped(replace(tree, target_recall=0.5)) == (0, 0)
    assert stopped(replace(tree, tree={"searched_leaves": 7})) == (0, 0)
    assert stopped(replace(tree, tree={"leaves": 20})) == (0, 1)
    assert stopped(replace(tree, shards=2)) == (0, 1)  # the tree of the first of two shards
    rows, trees, error = hours(people(), replace(tree, tree={"leaves": 401}))
    assert (rows, trees) == (0, 0) and "leaves is 401" in error
    assert hours(people(), replace(tree, target_recall=0.9)) == (0, 1, "")
    fresh = HashingEncoder(64, idf=HashingEncoder(64).fit(people()).idf).encode_passages(people())
    assert np.array_equal(np.load(tmp_path / "index" / "vectors.npy"), fresh)
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert manifest["recall"]["recall"] >= 0.9 and manifest["tree"]["leaves"] != 20


def test_a_build_that_changes_its_mind_is_complete(hours, tmp_path, monkeypatch):
    """After settings A, B and A again, the manifest of the first A describes the files of the last, and the index that
    is put in the place of an old one cannot be opened."""
    a = BuildOptions(shards=2, exact_below_rows=100, tree={"leaves": 10})

    def killed(options: BuildOptions, method: str, call: int) -> None:
        """A build that is killed in a call of a method of ScannIndex."""
        original, calls = getattr(ScannIndex, method), iter(range(10))

        def stop(*arguments):
            if next(calls) == call:
                raise KeyboardInterrupt
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(ScannIndex, method, stop)
            assert "KeyboardInterrupt" in hours(people(), options)[2]

    killed(a, "save", call=1)  # in the second shard
    killed(replace(a, tree={"leaves": 12}), "load", call=0)  # the first shard has its tree, and no manifest yet
    assert hours(people(), a) == (0, 2, "")
    open_index(tmp_path / "index")
    assert verify_index(tmp_path / "index") > 0


def test_a_late_bad_row_keeps_the_rows_before(hours, tmp_path):
    """One passage that gets a NaN vector, or is edited, costs the encoding of all the others."""
    exact = BuildOptions()
    rows, _, error = hours(people(), exact, ill=people()[300].title)
    assert rows == 320 - 16 and "row 300" in error and "first 288 rows are kept" in error
    fixed = [*people(), *(replace(p, id=f"q{p.id}") for p in people()[:20])]
    fixed[300] = Passage("p300", "Zora Quill", "born")
    assert hours(fixed, exact) == (340 - 288, 0, "")
    fresh = HashingEncoder(64, idf=HashingEncoder(64).fit(people()).idf).encode_passages(fixed)
    assert np.array_equal(np.load(tmp_path / "index" / "vectors.npy"), fresh)


def test_another_encoder_or_text_starts_over(hours, tmp_path):
    """A build that resumes with another encoder or corpus mixes two kinds of vectors in one index."""
    ill = people()[300].title
    assert hours(people(), BuildOptions(), ill=ill)[0] == 304
    assert hours(people(), BuildOptions(), seed=1, ill=ill)[0] == 304
    changed = people()
    changed[40] = Passage("p40", "Another", "one")
    assert hours(changed, BuildOptions(), seed=1) == (320 - 32, 0, "")
    fresh = HashingEncoder(64, 1, HashingEncoder(64).fit(people()).idf).encode_passages(changed)
    assert np.array_equal(np.load(tmp_path / "index" / "vectors.npy"), fresh)


def test_a_published_index_is_not_written_by_the_next_build(hours, tmp_path, monkeypatch):
    """A kill between publishing and cleanup leaves a hard link, and the next build overwrites published vectors."""
    remove = shutil.rmtree

    def killed(path, **options):
        if Path(path).name == ".index.partial":
            raise KeyboardInterrupt
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        assert "KeyboardInterrupt" in hours(people(), BuildOptions())[2]
    linked = tmp_path / ".index.partial" / "vectors.npy"
    assert os.path.samefile(linked, tmp_path / "index" / "vectors.npy")
    (tmp_path / "index").rename(tmp_path / "published")
    assert hours(people()[:100] + people()[200:], BuildOptions())[2] == ""
    assert verify_index(tmp_path / "published") > 0 and RetrievalService.open(tmp_path / "published").rows == 320

"""What an index build needs: shards that fit the memory, container limits, disk space reserved before writing."""

import subprocess
import sys

import numpy as np
import pytest
from helpers import people

import retrieval.indexing.directory
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import BuildOptions, build_index
from retrieval.memory import available_memory
from retrieval.protocol import CorpusError
from retrieval.ranking.budget import peak_bytes, reserve
from retrieval.ranking.index import tree_bytes, tree_settings

WIKI18 = (21_015_324, 768)


def test_wiki18_on_a_machine_of_128_gib():
    """The documented command would need more memory than the machine it is documented for."""
    rows, dimensions = WIKI18
    full, half = (peak_bytes(n, dimensions, tree_settings(n, dimensions).leaves) for n in (rows, -(-rows // 2)))
    assert 132e9 < full < 136e9 and half < 0.8 * 120 * 2**30 < full
    assert 26e9 < tree_bytes(rows, dimensions, tree_settings(rows, dimensions)) < 28e9


def test_shards_come_from_the_memory_there_is(tmp_path, monkeypatch, caplog):
    """A build would take more memory than there is, not log its need before it starts, or override --shards."""
    caplog.set_level("INFO", "retrieval")
    write_corpus(tmp_path / "people.jsonl", people())
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    encoder = HashingEncoder(64).fit(corpus)
    spare, each = retrieval.ranking.budget.SPARE_BYTES, 4 * 64 * 3.05
    monkeypatch.setattr(retrieval.indexing.directory, "available_memory", lambda: int((spare + 130 * each) / 0.8))
    manifest = build_index(tmp_path / "auto", corpus, encoder, BuildOptions(exact_below_rows=50))
    assert manifest["shards"] == ["shard-000", "shard-001", "shard-002"]  # of 107 rows; 160 would not fit
    first = caplog.records[0].getMessage()
    assert first.startswith(
        "320 rows of 64 dimensions in 3 shards: the build is expected to take up to 0.3 GB of memory"
    )
    assert build_index(tmp_path / "one", corpus, encoder, BuildOptions(1, 50))["kind"] == "dense"
    assert "--shards=1 may need more memory than is available; 3 would fit" in caplog.text


def test_memory_of_a_container(tmp_path):
    """A container's memory limit would be missed, and the build killed at it."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       131072000 kB\nMemAvailable:   120000000 kB\n")
    assert available_memory(meminfo, tmp_path) == 120_000_000 * 1024
    for limit, use, stat, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        (tmp_path / limit).parent.mkdir(exist_ok=True)
        (tmp_path / limit).write_text("64000000000\n")
        (tmp_path / use).write_text("4000000000\n")
        assert available_memory(meminfo, tmp_path) == 60_000_000_000
        (tmp_path / stat).write_text(f"active_file 7\n{name} 1000000000\n")
        assert available_memory(meminfo, tmp_path) == 61_000_000_000, "the page cache counts as available"
        (tmp_path / limit).write_text("max\n")
        assert available_memory(meminfo, tmp_path) == 120_000_000 * 1024
    assert available_memory() > 0


def test_vectors_have_their_room_before_the_first_is_encoded(tmp_path):
    """A file with holes is memory-mapped: a disk that fills up hours later would kill the process by SIGBUS."""
    write_corpus(tmp_path / "people.jsonl", people())
    idf = HashingEncoder(4096).fit(people()).idf

    class Looking(HashingEncoder):
        def encode_passages(self, passages):
            (file,) = tmp_path.glob(".index.partial/**/vectors.npy")
            assert file.stat().st_size > 4 * 320 * 4096 and 512 * file.stat().st_blocks >= file.stat().st_size
            return super().encode_passages(passages)

    build_index(tmp_path / "index", MemoryMappedCorpus(tmp_path / "people.jsonl"), Looking(4096, idf=idf))
    assert len(np.load(tmp_path / "index" / "vectors.npy", mmap_mode="r")) == 320


FULL = """
import sys
from pathlib import Path
from retrieval.ranking.budget import reserve
from retrieval.corpus import MemoryMappedCorpus
from retrieval.indexing.directory import build_index
from retrieval.encoders.hashing import HashingEncoder

corpus = MemoryMappedCorpus(sys.argv[1])
try:
    build_index("full/index", corpus, HashingEncoder(4096).fit(corpus))
except ValueError as error:
    print(error)
Path("full/x").write_bytes(b"kept")
try:
    reserve(Path("full/x"), 3 * 2**20)
except OSError as error:
    print(error, Path("full/x").read_bytes())
"""


def test_a_full_disk_is_met_before_the_work(tmp_path):
    """A disk that cannot hold the index would end the build midway by a signal, without a message."""
    write_corpus(tmp_path / "people.jsonl", people())
    (tmp_path / "full").mkdir()
    mount = 'mount -t tmpfs -o size=2m tmpfs full && exec "$@"'
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*isolated, "true"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no disk of a chosen size can be mounted here")
    command = [*isolated, sys.executable, "-c", FULL, str(tmp_path / "people.jsonl")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result
    build, room = result.stdout.splitlines()
    assert "full/index: the index cannot be written" in build and "0.0 GB are free" in build
    assert "x takes 0.0 GB" in room and room.endswith("b'kept'")


def test_room_for_more_and_for_less(tmp_path):
    """A file resized for another number of rows would lose its content, or keep a tail of old rows."""
    path = tmp_path / "x"
    reserve(path, 10)
    path.write_bytes(b"0123456789")
    reserve(path, 2**20)
    assert path.read_bytes()[:10] == b"0123456789" and path.stat().st_size == 2**20
    reserve(path, 4)
    assert path.read_bytes() == b"0123"
    with pytest.raises(OSError):
        reserve(tmp_path / "absent" / "x", 4)


def test_a_disk_that_is_too_small_is_refused(tmp_path, monkeypatch):
    """Disk space for the tree and shards would be checked only after the vectors are encoded."""
    write_corpus(tmp_path / "people.jsonl", people())
    monkeypatch.setattr(retrieval.indexing.directory, "disk_bytes", lambda *_: 2**60)
    encoder = HashingEncoder(64).fit(people())
    encoder.encode_passages = lambda _: pytest.fail("encoded before the disk space was checked")
    with pytest.raises(CorpusError, match="it takes .* GB, .* GB are free"):
        build_index(tmp_path / "index", MemoryMappedCorpus(tmp_path / "people.jsonl"), encoder)

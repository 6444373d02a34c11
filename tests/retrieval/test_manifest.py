"""How much of an index is read when it opens, and which damage that detects."""

import os

import numpy as np
import pytest

from retrieval.manifest import BLOCK_BYTES, SAMPLE_ABOVE_BYTES, read_manifest, write_manifest
from retrieval.protocol import CorpusError

SIZE = SAMPLE_ABOVE_BYTES + 2**25
FIELDS = {"kind": "dense", "rows": 1, "encoder": {}, "corpus_sha256": ""}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An index with one large file and one small file."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "vectors.npy").write_bytes(np.random.default_rng(0).bytes(SIZE))
    (folder / "small").write_bytes(b"small")
    write_manifest(folder, FIELDS, [folder / "vectors.npy", folder / "small"])
    return folder


def bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_opening_reads_a_sample(directory):
    """Opening 21 million passages reads 106 GB, longer than the clients of a restarted server wait."""
    before = bytes_read()
    read_manifest(directory)
    assert bytes_read() - before < 65 * BLOCK_BYTES < SIZE / 20
    read_manifest(directory, complete=True)
    assert bytes_read() - before > SIZE


def test_what_a_sample_sees_and_what_only_all_of_it(directory):
    """A torn write passes as complete, or one flipped bit between the sampled blocks passes even a full check."""
    path, rng = directory / "vectors.npy", np.random.default_rng(0)

    def replaced(place: int, content: bytes) -> bytes:
        with open(path, "r+b") as file:
            before = os.pread(file.fileno(), len(content), place)
            os.pwrite(file.fileno(), content, place)
        return before

    stretch = SIZE // 30
    for place in [0, 1, SIZE - 1, *rng.integers(0, SIZE - stretch, 12).tolist()]:
        before = replaced(place, bytes(min(stretch, SIZE - place)))
        with pytest.raises(CorpusError, match="vectors.npy"):
            read_manifest(directory)
        replaced(place, before)
    read_manifest(directory)

    missed = 0
    for place in rng.integers(0, SIZE, 5).tolist():
        before = replaced(place, b"?")
        replaced(place, bytes([before[0] ^ 1]))
        try:
            read_manifest(directory)
            missed += 1
            with pytest.raises(CorpusError, match="vectors.npy"):
                read_manifest(directory, complete=True)
        except CorpusError:
            pass
        replaced(place, before)
    assert missed
    read_manifest(directory, complete=True)

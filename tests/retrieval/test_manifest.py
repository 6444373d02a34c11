"""How much of an index is read when it opens, and which damage that detects."""

import os

import numpy as np
import pytest

from retrieval import manifest
from retrieval.manifest import read_manifest, write_manifest
from retrieval.protocol import CorpusError

SIZE, BLOCK = 3 * 2**19, 2**10
FIELDS = {"kind": "dense", "rows": 1, "encoder": {}, "corpus_sha256": ""}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An index with one large file, of which blocks are sampled, and one small file."""
    monkeypatch.setattr(manifest, "SAMPLE_ABOVE_BYTES", 2**20)
    monkeypatch.setattr(manifest, "BLOCK_BYTES", BLOCK)
    (tmp_path / "vectors.npy").write_bytes(np.random.default_rng(0).bytes(SIZE))
    (tmp_path / "small").write_bytes(b"small")
    write_manifest(tmp_path, FIELDS, [tmp_path / "vectors.npy", tmp_path / "small"])
    return tmp_path


def test_a_sample_detects_long_damage_and_a_complete_check_any(directory):
    """A damaged thirtieth of a file is always detected, one flipped bit by a complete check."""
    path, rng = directory / "vectors.npy", np.random.default_rng(0)

    def replace(position: int, content: bytes) -> bytes:
        with open(path, "r+b") as file:
            before = os.pread(file.fileno(), len(content), position)
            os.pwrite(file.fileno(), content, position)
        return before

    stretch = SIZE // 30
    for position in [0, 1, SIZE - 1, *rng.integers(0, SIZE - stretch, 12).tolist()]:
        before = replace(position, bytes(min(stretch, SIZE - position)))
        with pytest.raises(CorpusError, match="vectors.npy"):
            read_manifest(directory)
        replace(position, before)
    for position in rng.integers(0, SIZE, 5).tolist():
        before = replace(position, b"?")
        replace(position, bytes([before[0] ^ 1]))
        with pytest.raises(CorpusError, match="vectors.npy"):
            read_manifest(directory, complete=True)
        replace(position, before)
    read_manifest(directory, complete=True)

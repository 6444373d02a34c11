"""Index directories are complete and movable, and are refused if anything in them has changed."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bert_models import write_model
from helpers import people

import retrieval.indexing.encoding
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.encoder import BertEncoder
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import BuildOptions, build_index
from retrieval.indexing.encoding import encode_to
from retrieval.indexing.faiss_flat import read_flat
from retrieval.protocol import CorpusError, Passage
from retrieval.service import RetrievalService


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    """One index of `people` of each kind."""
    root = tmp_path_factory.mktemp("indexes")
    write_corpus(root / "people.jsonl", people())
    corpus = MemoryMappedCorpus(root / "people.jsonl")
    encoder = HashingEncoder(256).fit(corpus)
    tree = BuildOptions(exact_below_rows=100)
    build_index(root / "exact", corpus, encoder)
    build_index(root / "tree", corpus, encoder, tree)
    build_index(root / "bm25", corpus, None)
    return {kind: root / kind for kind in ("exact", "tree", "bm25")}


KINDS = ["exact", "tree", "bm25"]


@pytest.mark.parametrize("kind", KINDS)
def test_directory_survives_a_move(kind, directories, tmp_path):
    """A copied index answers as before."""
    queries = [f"{p.title} born" for p in people()]
    before = RetrievalService.open(directories[kind]).search(queries, 3)
    moved = shutil.copytree(directories[kind], tmp_path / "elsewhere")
    assert RetrievalService.open(moved).search(queries, 3) == before
    assert (moved / "scann").is_dir() == (kind == "tree")
    hit_rate = np.mean([row[0].title == p.title for p, row in zip(people(), before, strict=True)])
    assert hit_rate == 1 if kind != "tree" else hit_rate > 0.9  # a tree is approximate


def test_target_recall_is_reached_and_recorded(tmp_path):
    """The stored effort is the tuned one, and the manifest states the recall that a search achieves."""
    write_corpus(tmp_path / "people.jsonl", people())
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    encoder = HashingEncoder(64).fit(corpus)
    options = [BuildOptions(exact_below_rows=100, target_recall=target) for target in (0.3, 1.0)]
    low, high = (
        build_index(tmp_path / str(n), corpus, encoder, option)["recall"]["recall"] for n, option in enumerate(options)
    )
    assert 0.3 <= low < high and high > 0.97
    service = RetrievalService.open(tmp_path / "1")
    rankings = service.search([p.title for p in people()], 1)
    assert np.mean([row[0].id == p.id for row, p in zip(rankings, people(), strict=True)]) > 0.9


def test_vectors_of_a_published_flat_index(tmp_path):
    """The vectors of a FAISS file give the index of our own; those of another model, order or corpus are refused."""
    faiss = pytest.importorskip("faiss")
    write_corpus(tmp_path / "people.jsonl", people())
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    encoder = HashingEncoder(64).fit(corpus)
    flat = faiss.IndexFlatIP(64)
    flat.add(encoder.encode_passages(people()))
    faiss.write_index(flat, str(tmp_path / "flat.index"))
    vectors = read_flat(tmp_path / "flat.index")
    build_index(tmp_path / "taken", corpus, encoder, vectors=vectors)
    build_index(tmp_path / "own", corpus, encoder)
    queries = [p.title for p in people()]
    rankings = [RetrievalService.open(tmp_path / name).search(queries, 3) for name in ("taken", "own")]
    assert rankings[0] == rankings[1]
    for foreign, message in ((vectors[::-1], "cosine"), (vectors[:-1], "319"), (vectors * np.nan, "cosine")):
        with pytest.raises(CorpusError, match=message):
            build_index(tmp_path / "foreign", corpus, encoder, vectors=foreign)
    assert not (tmp_path / "foreign").exists()

    content = (tmp_path / "flat.index").read_bytes()
    euclidean = faiss.IndexFlatL2(64)
    euclidean.add(encoder.encode_passages(people()))
    faiss.write_index(euclidean, str(tmp_path / "l2.index"))
    (tmp_path / "short.index").write_bytes(content[:-4])
    (tmp_path / "other.index").write_bytes(b"abcd" * 20)
    for name, message in (("l2", "Euclidean"), ("short", "the header says"), ("other", "begins with")):
        with pytest.raises(CorpusError, match=f"{name}.index.*{message}"):
            read_flat(tmp_path / f"{name}.index")


def test_a_rewritten_corpus_does_not_change_its_index(tmp_path):
    """An index does not share the user's file: rewriting that changes no index and no running server."""
    path = tmp_path / "people.jsonl"
    write_corpus(path, people())
    for encoder in (HashingEncoder(64).fit(people()), None):
        index = tmp_path / f"index-{encoder is None}"
        build_index(index, MemoryMappedCorpus(path), encoder)
        running, original = RetrievalService.open(index), path.read_bytes()
        path.write_bytes(b"")
        for service in (running, RetrievalService.open(index)):
            assert service.search(["Zora Crane"], 1)[0][0].title == "Zora Crane"
        path.write_bytes(original)


def test_links_of_a_snapshot(tmp_path):
    """An index holds copies of what the symbolic links of a hub snapshot point to."""
    model, snapshot = write_model(tmp_path / "blobs" / "tiny-e5"), tmp_path / "snapshots" / "tiny-e5"
    write_corpus(tmp_path / "blobs" / "people.jsonl", people()[:20])
    snapshot.mkdir(parents=True)
    for path in [*model.iterdir(), tmp_path / "blobs" / "people.jsonl"]:
        (snapshot / path.name).symlink_to(Path("..") / ".." / path.relative_to(tmp_path))
    encoder = BertEncoder.from_model(snapshot)
    build_index(tmp_path / "index", MemoryMappedCorpus(snapshot / "people.jsonl"), encoder)
    assert not [p for p in (tmp_path / "index").rglob("*") if p.is_symlink()]
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "index", tmp_path / "elsewhere" / "index")
    shutil.rmtree(tmp_path / "blobs")
    assert RetrievalService.open(moved).search(["Baro Quill"], 1)


def _flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_flip_last_bit, Path.unlink])
@pytest.mark.parametrize("kind", KINDS)
def test_every_damaged_file_is_refused_by_name(damage, kind, directories, tmp_path):
    """No damaged file reaches ScaNN, which would return wrong results or abort the process."""
    copy = shutil.copytree(directories[kind], tmp_path / "copy")
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    assert len(files) >= 4
    for path in files:
        if path.name == "manifest.json" and damage is _flip_last_bit:
            continue  # its last byte is only a line break
        content = path.read_bytes()
        damage(path)
        with pytest.raises(CorpusError, match=path.name):
            RetrievalService.open(copy)
        path.write_bytes(content)
    RetrievalService.open(copy)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("rows", 319, "manifest.json"),
        ("dimensions", 128, "manifest.json"),
        ("format", 1, "manifest.json"),
        ("tree", {"branches": 3}, "manifest.json"),
        ("files", {}, "manifest.json"),
        ("encoder", {"name": "other"}, "manifest.json"),
        ("encoder", {"name": "hashing", "dimensions": 256, "seed": 1}, "encoder_weights.npy"),
    ],
)
def test_manifest_fields_are_checked(directories, tmp_path, field, value, word):
    """An edited manifest, or one with an unknown encoder, is refused in one line."""
    copy = shutil.copytree(directories["exact"], tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {field: value}))
    with pytest.raises(CorpusError, match=word) as error:
        RetrievalService.open(copy)
    assert "\n" not in str(error.value)


def test_a_planted_pickle_is_never_loaded(directories, tmp_path):
    """ScaNN would unpickle scann_docids.pkl and so run its code; an index with one is refused."""
    copy = shutil.copytree(directories["tree"], tmp_path / "copy")
    (copy / "scann" / "scann_docids.pkl").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path) + b"/ran'\ntR.")
    with pytest.raises(CorpusError, match="scann_docids.pkl"):
        RetrievalService.open(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["scann/scann_docids.pkl"] = {"bytes": 0, "sha256": ""}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match="scann_docids.pkl"):
        RetrievalService.open(copy)
    assert not (tmp_path / "ran").exists()


BUILD = """
import sys, time
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
d.build_index(sys.argv[2], corpus, Hanging(64, idf=idf), d.BuildOptions(exact_below_rows=100))
"""


def test_a_killed_build_resumes_its_encoding(tmp_path):
    """A kill loses no finished block of the encoding, and no partial index is taken for a complete one."""
    write_corpus(tmp_path / "people.jsonl", people())
    out = tmp_path / "index"

    def build(blocks: int) -> subprocess.Popen:
        arguments = [sys.executable, "-c", BUILD, str(tmp_path / "people.jsonl"), str(out), str(blocks)]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = build(13)
    for _ in range(14):
        assert first.stdout.readline() == "encode\n"
    with pytest.raises(CorpusError, match="in use by another build"):
        build_index(out, MemoryMappedCorpus(tmp_path / "people.jsonl"), None)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    with pytest.raises(CorpusError, match="manifest.json: missing"):
        RetrievalService.open(out)

    second = build(99)
    encoded, errors = second.communicate()
    assert second.returncode == 0, errors
    assert encoded.count("encode") == 20 - 13
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "people.jsonl"]
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    build_index(tmp_path / "fresh", corpus, HashingEncoder(64).fit(corpus))
    assert (out / "vectors.npy").read_bytes() == (tmp_path / "fresh" / "vectors.npy").read_bytes()


class Counting(HashingEncoder):
    """Counts the rows it encodes; the passage titled `ill` gets a vector that is not finite."""

    block_rows, rows, ill = 16, 0, ""

    def encode_passages(self, passages):
        self.rows += len(passages)
        vectors = super().encode_passages(passages)
        vectors[[p.title == self.ill for p in passages]] = np.nan
        return vectors


def test_encoding_resumes_only_with_the_same_corpus_and_encoder(tmp_path, monkeypatch):
    """Rows of an interrupted encoding are reused if the corpus and the encoder are the same, and no others."""
    monkeypatch.setattr(retrieval.indexing.encoding, "FLUSH_ROWS", 32)
    idf, path = HashingEncoder(64).fit(people()).idf, tmp_path / "people.jsonl"
    vectors, record = tmp_path / "vectors.npy", tmp_path / "encoded.json"

    def encode(passages, seed: int = 0, ill: str = "") -> int:
        write_corpus(path, passages)
        encoder = Counting(64, seed, idf)
        encoder.ill = ill
        try:
            encode_to(vectors, record, MemoryMappedCorpus(path), encoder)
        except CorpusError as error:
            assert "row 100 is not finite" in str(error)
        else:
            fresh = encoder.encode_passages(passages)
            encoder.rows -= len(passages)
            assert np.array_equal(np.load(vectors), fresh)
        return encoder.rows

    passages = people()
    assert encode(passages, ill=passages[100].title) == 112  # up to the block of 16 with the bad passage
    assert encode(passages) == 320 - 96
    assert encode(passages) == 0
    changed = [*passages[:200], Passage("new", "New", "Another text."), *passages[201:]]
    assert encode(changed) == 320 and encode(changed[:100]) == 100
    assert encode(passages, seed=1) == 320
    record.write_text("[]")
    assert encode(passages, seed=1) == 320


def test_disk_space_is_reserved_before_the_first_passage_is_encoded(tmp_path):
    """A file without holes: a disk that fills up hours later would kill the process by SIGBUS."""
    write_corpus(tmp_path / "people.jsonl", people())
    idf = HashingEncoder(4096).fit(people()).idf

    class Checking(HashingEncoder):
        def encode_passages(self, passages):
            (file,) = tmp_path.glob(".index.partial/**/vectors.npy")
            assert file.stat().st_size > 4 * 320 * 4096 and 512 * file.stat().st_blocks >= file.stat().st_size
            return super().encode_passages(passages)

    build_index(tmp_path / "index", MemoryMappedCorpus(tmp_path / "people.jsonl"), Checking(4096, idf=idf))
    assert len(np.load(tmp_path / "index" / "vectors.npy", mmap_mode="r")) == 320

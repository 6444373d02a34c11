"""Index directories are complete and movable, and are refused if anything in them has changed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bert_models import write_model
from helpers import people

from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.encoder import BertEncoder
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import BuildOptions, build_index, open_index, verify_index
from retrieval.indexing.faiss_flat import read_flat
from retrieval.protocol import CorpusError
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
    build_index(root / "sharded", corpus, encoder, BuildOptions(shards=3))
    build_index(root / "bm25", corpus, None)
    return {kind: root / kind for kind in ("exact", "tree", "sharded", "bm25")}


KINDS = ["exact", "tree", "sharded", "bm25"]


@pytest.mark.parametrize("kind", KINDS)
def test_directory_survives_a_move(kind, directories, tmp_path):
    """An index has absolute paths or depends on the original corpus, and breaks when it is copied elsewhere."""
    queries = [f"{p.title} born" for p in people()]
    before = RetrievalService.open(directories[kind]).search(queries, 3)
    moved = shutil.copytree(directories[kind], tmp_path / "elsewhere")
    assert RetrievalService.open(moved).search(queries, 3) == before
    assert (moved / "scann").is_dir() == (kind == "tree")
    hit_rate = np.mean([row[0].title == p.title for p, row in zip(people(), before, strict=True)])
    assert hit_rate == 1 if kind != "tree" else hit_rate > 0.9  # a tree is approximate


def test_shards_answer_as_one_index(directories):
    """Merged shards lose or repeat a passage, break ties differently, or name the passage of another row."""
    queries = [f"{p.title} born" for p in people()] + ["born", ""]
    single, sharded = (RetrievalService.open(directories[kind]) for kind in ("exact", "sharded"))
    for k in (1, 3, 200):  # 200 is more than a shard contains
        assert sharded.search(queries, k) == single.search(queries, k)
    shard = RetrievalService.open(directories["sharded"] / "shard-001")
    assert shard.rows < single.rows and shard.search(["Baro"], 3)


def test_shards_of_a_corpus_with_blank_lines(tmp_path):
    """A shard looks for its rows at their offsets in the full file."""
    write_corpus(tmp_path / "people.jsonl", people())
    text = (tmp_path / "people.jsonl").read_text()
    (tmp_path / "people.jsonl").write_text("\n" + text.replace("\n", "\n\n"))
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    build_index(tmp_path / "index", corpus, HashingEncoder(64).fit(corpus), BuildOptions(shards=3))
    assert list(open_index(tmp_path / "index")[1]) == people()


def test_indexes_of_one_corpus_are_fused(directories, tmp_path):
    """A hybrid index opens over two corpora, so that one row number stands for two passages."""
    fused = RetrievalService.open(f"{directories['exact']},{directories['bm25']}")
    rankings = fused.search([f"{p.title} born" for p in people()], 3)
    assert [row[0].id for row in rankings] == [p.id for p in people()]
    assert RetrievalService.open(f"{directories['sharded']},{directories['bm25']}").search(["Baro Quill"], 1)
    write_corpus(tmp_path / "other.jsonl", people()[::-1])
    build_index(tmp_path / "other", MemoryMappedCorpus(tmp_path / "other.jsonl"), None)
    with pytest.raises(CorpusError, match="different corpora"):
        RetrievalService.open(f"{directories['exact']},{tmp_path / 'other'}")


def test_target_recall_is_reached_and_recorded(tmp_path):
    """The stored effort is not the tuned one, or the manifest's recall is not what a search achieves."""
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
    """Vectors of another model, order or corpus are accepted, and every search is wrong."""
    faiss = pytest.importorskip("faiss")
    write_corpus(tmp_path / "people.jsonl", people())
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    encoder = HashingEncoder(64).fit(corpus)
    flat = faiss.IndexFlatIP(64)
    flat.add(encoder.encode_passages(people()))
    faiss.write_index(flat, str(tmp_path / "flat.index"))
    vectors = read_flat(tmp_path / "flat.index")
    build_index(tmp_path / "taken", corpus, encoder, vectors=vectors)
    build_index(tmp_path / "sharded", corpus, encoder, BuildOptions(shards=2), vectors)
    build_index(tmp_path / "own", corpus, encoder)
    queries = [p.title for p in people()]
    own = RetrievalService.open(tmp_path / "own").search(queries, 3)
    for name in ("taken", "sharded"):
        assert RetrievalService.open(tmp_path / name).search(queries, 3) == own
    for foreign, message in ((vectors[::-1], "cosine"), (vectors[:-1], "319"), (vectors * np.nan, "cosine")):
        with pytest.raises(CorpusError, match=message):
            build_index(tmp_path / "foreign", corpus, encoder, vectors=foreign)
    assert not (tmp_path / "foreign").exists()

    content = (tmp_path / "flat.index").read_bytes()
    euclidean = faiss.IndexFlatL2(64)
    euclidean.add(encoder.encode_passages(people()))
    faiss.write_index(euclidean, str(tmp_path / "l2.index"))
    (tmp_path / "short.index").write_bytes(content[:-4])
    (tmp_path / "head.index").write_bytes(content[:20])
    (tmp_path / "other.index").write_bytes(b"abcd" * 20)
    for name, message in (
        ("l2", "Euclidean"),
        ("short", "the header says"),
        ("head", "begins with"),
        ("other", "begins with"),
        ("absent", "no such"),
    ):
        with pytest.raises(CorpusError, match=f"{name}.index.*{message}"):
            read_flat(tmp_path / f"{name}.index")


def test_options_that_do_not_fit(tmp_path):
    """Options that exceed the corpus end in an abort inside ScaNN, or in an index with empty shards."""
    write_corpus(tmp_path / "people.jsonl", people())
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    encoder = HashingEncoder(64).fit(corpus)
    for options, chosen, message in (
        (BuildOptions(shards=321), encoder, "shards is 321"),
        (BuildOptions(shards=2), None, "BM25"),
        (BuildOptions(target_recall=1.5), encoder, "target_recall is 1.5"),
        (BuildOptions(shards=4, exact_below_rows=0, tree={"leaves": 81}), encoder, "leaves is 81"),
        (BuildOptions(exact_below_rows=0, tree={"leaves": 400}), encoder, "leaves is 400"),
        (BuildOptions(exact_below_rows=0, tree={"reorder": "int4"}), encoder, "int8"),
    ):
        with pytest.raises(CorpusError, match=message):
            build_index(tmp_path / "index", corpus, chosen, options)
        assert [p.name for p in tmp_path.iterdir()] == ["people.jsonl"]


def test_a_rewritten_corpus_does_not_change_its_index(tmp_path):
    """An index that shares the user's file is damaged when that is rewritten; a server that has it open is killed."""
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
    """A hub snapshot contains symbolic links; copying them as links gives an index that leads nowhere once moved."""
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


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def _flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [_truncate, _zero, _flip_last_bit, _remove])
@pytest.mark.parametrize("kind", KINDS)
def test_every_damaged_file_is_refused_by_name(damage, kind, directories, tmp_path):
    """ScaNN silently loads a damaged file and returns wrong results, or aborts the process."""
    source = directories[kind]
    names = sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file())
    assert len(names) >= 4
    for name in names:
        if name.name == "manifest.json" and damage is _flip_last_bit:
            continue  # its last byte is only a line break
        copy = shutil.copytree(source, tmp_path / "copy")
        damage(copy / name)
        with pytest.raises(CorpusError, match=name.name):
            RetrievalService.open(copy)
        shutil.rmtree(copy)


def test_verify_reads_every_byte(directories, tmp_path):
    """Damage between the sampled blocks of a large file, or in a shard, is never detected."""
    for kind in KINDS:
        files = [p for p in directories[kind].rglob("*") if p.is_file() and p.name != "manifest.json"]
        shards = list(directories[kind].glob("shard-*/manifest.json"))
        assert verify_index(directories[kind]) == sum(p.stat().st_size for p in [*files, *shards])
    copy = shutil.copytree(directories["sharded"], tmp_path / "copy")
    _flip_last_bit(copy / "shard-001" / "vectors.npy")
    with pytest.raises(CorpusError, match="shard-001/vectors.npy"):
        verify_index(copy)


def test_what_scann_says_is_kept(directories, tmp_path, capfd):
    """ScaNN's build log is lost or printed to the terminal, or opening an index changes it."""
    log = (directories["tree"] / "scann.log").read_text()
    assert "Size of sampled dataset" in log or len(log.splitlines()) > 3, log
    before = sorted(directories["tree"].rglob("*"))
    copy = shutil.copytree(directories["tree"], tmp_path / "copy")
    RetrievalService.open(copy).search(["Baro Quill"], 1)
    assert sorted(directories["tree"].rglob("*")) == before and len(list(copy.rglob("*"))) == len(before)
    assert capfd.readouterr() == ("", "")


def test_every_swapped_file_is_refused_by_name(directories, tmp_path):
    """A file from another index of the same shape is accepted, so that queries return the wrong passages."""
    write_corpus(tmp_path / "other.jsonl", reversed(people()))
    corpus = MemoryMappedCorpus(tmp_path / "other.jsonl")
    build_index(tmp_path / "other", corpus, HashingEncoder(256).fit(people()[:300]))
    for name in ("corpus.jsonl", "corpus.offsets.npy", "vectors.npy", "encoder_weights.npy"):
        copy = shutil.copytree(directories["exact"], tmp_path / "copy")
        shutil.copyfile(tmp_path / "other" / name, copy / name)
        with pytest.raises(CorpusError, match=name):
            RetrievalService.open(copy)
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("rows", 319, "manifest.json"),
        ("rows", "320", "manifest.json"),
        ("dimensions", 128, "manifest.json"),
        ("metric", "cosine", "manifest.json"),
        ("format", 1, "manifest.json"),
        ("kind", "other", "manifest.json"),
        ("tree", {"branches": 3}, "manifest.json"),
        ("files", {}, "manifest.json"),
        ("files", [], "manifest.json"),
        ("encoder", {"name": "other"}, "manifest.json"),
        ("encoder", {"name": "hashing", "dimensions": 256, "seed": 1}, "encoder_weights.npy"),
        ("encoder", {"name": "hashing", "dimensions": 10**30, "seed": 0}, "encoder_weights.npy"),
    ],
)
def test_manifest_fields_are_checked(directories, tmp_path, field, value, word):
    """An edited manifest, or one with an encoder that this program does not have, is trusted."""
    copy = shutil.copytree(directories["exact"], tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {field: value}))
    with pytest.raises(CorpusError, match=word) as error:
        RetrievalService.open(copy)
    assert "\n" not in str(error.value)


def test_an_index_and_its_encoder_are_as_wide(directories, tmp_path):
    """A width of `true` in the manifest counts as 1, and the error does not say which index it is."""
    copy = shutil.copytree(directories["exact"], tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["encoder"]["dimensions"] = True
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match=r"copy.manifest\.json: .* the encoder makes True"):
        RetrievalService.open(copy)


def test_a_planted_pickle_is_never_loaded(directories, tmp_path):
    """ScaNN unpickles scann_docids.pkl if there is one, so opening an untrusted index would run its code."""
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

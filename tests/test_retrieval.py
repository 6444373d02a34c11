"""Corpus, hashing encoder, ScaNN index and service, with the real ScaNN throughout."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import retrieval.corpus
import retrieval.index
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.hashing import HashingEncoder
from retrieval.index import ScannIndex
from retrieval.protocol import CorpusError, Passage, RetrievalError
from retrieval.service import RetrievalService

FIRST = "Baro Lena Quil Tavi Moro Sela Dorn Ivra Kest Palo Runa Vex Zora Hale Nimo Orin Pell Brisa Cato Edda".split()
LAST = "Quill Wend Harrow Stone Vale Marsh Thorn Brook Field Crane Lark Finch Moss Reed Slate Frost".split()


def people() -> list[Passage]:
    """320 one-sentence passages whose titles share their words with dozens of others."""
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    return [
        Passage(f"p{i}", name, f"{name} was born in {1800 + i % 150} in Vel{LAST[i % 7].lower()}.")
        for i, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def index_directory(tmp_path_factory):
    """An exact index of `people`."""
    root = tmp_path_factory.mktemp("exact")
    write_corpus(root / "people.jsonl", people())
    corpus = MemoryMappedCorpus(root / "people.jsonl")
    ScannIndex.build(root / "index", corpus, HashingEncoder(256).fit(corpus))
    return root / "index"


@pytest.fixture(scope="module")
def tree_directory(tmp_path_factory):
    """An index of `people` forced into the tree that large corpora get."""
    root = tmp_path_factory.mktemp("tree")
    write_corpus(root / "people.jsonl", people())
    corpus = MemoryMappedCorpus(root / "people.jsonl")
    ScannIndex.build(root / "index", corpus, HashingEncoder(256).fit(corpus), exact_below_rows=100)
    return root / "index"


def unit_rows(rows: int, dimensions: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dimensions)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# --- corpus


def test_corpus_round_trip(tmp_path):
    """A passage changes on its way to disk and back: quotes, line breaks in the text, non-ASCII, an empty title."""
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


def test_corpus_refuses_rows_outside(tmp_path):
    """Row -1, a search's "nothing found", returns the last passage."""
    write_corpus(tmp_path / "c.jsonl", people()[:3])
    for row in (-1, 3):
        with pytest.raises(IndexError):
            MemoryMappedCorpus(tmp_path / "c.jsonl")[row]


def test_corpus_reads_foreign_rows(tmp_path):
    """Rows of other tools are refused or misread: integer ids, bare titles, blank lines, no last line break, a BOM."""
    text = (
        '\ufeff{"id": 7, "contents": "\\"A\\"\\nx"}\n\n{"id": "8", "contents": "B\\ny"}\r\n{"id": 9, "contents": "z"}'
    )
    (tmp_path / "c.jsonl").write_bytes(text.encode())
    corpus = MemoryMappedCorpus(tmp_path / "c.jsonl")
    assert list(corpus) == [Passage("7", "A", "x"), Passage("8", "B", "y"), Passage("9", "", "z")]


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
    """A bad row is skipped silently, or the message does not say where it is."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "0", "contents": "t\\nx"}\n\n' + line + "\n")
    with pytest.raises(CorpusError) as error:
        MemoryMappedCorpus(path)
    message = str(error.value)
    assert all(word in message for word in [str(path), *words]) and "\n" not in message, message


def test_corpus_refuses_bytes_that_are_not_text(tmp_path):
    """Invalid UTF-8 raises a decoding error without the file's name."""
    (tmp_path / "c.jsonl").write_bytes(b'{"id": "0", "contents": "\xff"}\n')
    with pytest.raises(CorpusError, match="c.jsonl: line 1"):
        MemoryMappedCorpus(tmp_path / "c.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_corpus(tmp_path, content):
    """An empty file fails in mmap, or later in ScaNN."""
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match="no rows"):
        MemoryMappedCorpus(tmp_path / "empty.jsonl")
    with pytest.raises(CorpusError, match="no such"):
        MemoryMappedCorpus(tmp_path / "absent.jsonl")


def test_gzip_corpus(tmp_path):
    """A .gz cannot be mapped; a newer one is shadowed by the old decompressed file; a cut one passes as whole."""
    write_corpus(tmp_path / "c.jsonl", people())
    packed = gzip.compress((tmp_path / "c.jsonl").read_bytes())
    os.remove(tmp_path / "c.jsonl")
    (tmp_path / "c.jsonl.gz").write_bytes(packed)
    assert list(MemoryMappedCorpus(tmp_path / "c.jsonl.gz")) == people()

    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"id": 1, "contents": "t\\nnew"}\n'))
    newer = (tmp_path / "c.jsonl").stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "c.jsonl.gz", ns=(newer, newer))
    assert [p.text for p in MemoryMappedCorpus(tmp_path / "c.jsonl.gz")] == ["new"]

    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(CorpusError, match="cut.jsonl.gz"):
        MemoryMappedCorpus(tmp_path / "cut.jsonl.gz")
    assert not (tmp_path / "cut.jsonl").exists()


def test_cached_offsets_follow_the_file(tmp_path, monkeypatch):
    """Offsets kept for a large corpus are used after the corpus, or the cache itself, has changed."""
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


# --- encoder


def test_encoder_is_the_same_in_every_process():
    """Vectors depend on the process (string hashing, global random state): an index made elsewhere is then useless."""
    code = (
        "import hashlib; from retrieval.hashing import HashingEncoder;"
        "v = HashingEncoder(64, seed=3).encode_queries(['Baro Quill born']);"
        "print(hashlib.sha256(v.tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == 64


def test_encoder_rows_do_not_depend_on_the_batch():
    """A query's vector changes with its neighbours, so that a replayed rollout sees other passages."""
    encoder = HashingEncoder(128).fit(people())
    texts = [p.text for p in people()]
    together = encoder.encode_queries(texts)
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    assert np.array_equal(together, alone)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_encoder_texts_that_say_nothing():
    """Empty, unknown or unprintable text raises, or gets a vector that matches something."""
    encoder = HashingEncoder(64).fit(people())
    vectors = encoder.encode_queries(["", "?!", "zzyzx", "\ud800\x00"])
    assert vectors.shape == (4, 64) and not vectors.any()
    assert encoder.encode_queries([]).shape == (0, 64)
    assert not encoder.encode_passages([Passage("1", "", "...")]).any()


def test_encoder_identity_pins_the_vectors(tmp_path):
    """Two encoders that make other vectors share an identity, so that an index is searched with the wrong one."""
    plain, fitted = HashingEncoder(64), HashingEncoder(64).fit(people())
    others = [fitted, HashingEncoder(64, seed=1), HashingEncoder(65), HashingEncoder(64).fit(people()[:9])]
    assert all(plain.identity != other.identity for other in others)
    fitted.save(tmp_path)
    loaded = HashingEncoder.load(tmp_path, json.loads(json.dumps(fitted.identity)))
    assert np.array_equal(loaded.encode_passages(people()), fitted.encode_passages(people()))
    for identity in (plain.identity, {}, fitted.identity | {"version": 0}):
        with pytest.raises(CorpusError, match="encoder_weights.npy"):
            HashingEncoder.load(tmp_path, identity)


# --- index


def test_exact_search_equals_numpy():
    """The index returns other rows or scores than the definition: largest inner products, ties to the lower row."""
    vectors, queries = unit_rows(500, 32), unit_rows(40, 32, seed=1)
    ids, scores = ScannIndex.from_vectors(vectors).search(queries, 5)
    exact = np.round(queries.astype(np.float64) @ vectors.T.astype(np.float64), 4)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :5]
    assert np.array_equal(ids, order)
    assert np.array_equal(scores, np.take_along_axis(exact, order, axis=1).astype(np.float32))


@pytest.mark.parametrize("exact_below_rows", [16, 10**6])
def test_equal_scores_go_to_the_lower_row(exact_below_rows):
    """More equal passages than candidates: which of them come back is left to chance."""
    vectors = unit_rows(300, 32)
    vectors[50:250] = vectors[50]
    index = ScannIndex.from_vectors(vectors, exact_below_rows)
    ids, scores = index.search(vectors[[60, 249]], 3)
    assert ids.tolist() == [[50, 51, 52]] * 2 and (scores == 1).all()


def test_ties_by_rounding_go_to_the_lower_row():
    """Rows whose scores differ by float noise are cut by that noise, before rounding makes them equal."""
    vectors = np.zeros((300, 4), np.float32)
    vectors[:, 0] = 0.5 + 1e-7 * np.arange(300)
    ids, scores = ScannIndex.from_vectors(vectors).search(np.eye(4)[:1], 3)
    assert ids.tolist() == [[0, 1, 2]] and scores.tolist() == [[0.5, 0.5, 0.5]]


def test_search_does_not_depend_on_the_batch():
    """ScaNN's last bits change with the batch size; results must not, or a rollout cannot be replayed."""
    vectors, queries = unit_rows(2000, 64), unit_rows(130, 64, seed=1)
    index = ScannIndex.from_vectors(vectors)
    ids, scores = index.search(queries, 4)
    for size in (1, 7, 64):
        parts = [index.search(queries[start : start + size], 4) for start in range(0, len(queries), size)]
        assert np.array_equal(np.concatenate([p[0] for p in parts]), ids)
        assert np.array_equal(np.concatenate([p[1] for p in parts]), scores)


@pytest.mark.parametrize("exact_below_rows", [16, 10**6])
def test_search_guards(exact_below_rows):
    """ScaNN answers a zero or NaN query with row 0, pads with row 0, and narrows the result when k > n."""
    vectors = unit_rows(40, 32)
    index = ScannIndex.from_vectors(vectors, exact_below_rows)
    ids, scores = index.search(np.stack([np.zeros(32), vectors[7]]), 60)
    assert ids.shape == scores.shape == (2, 60)
    assert (ids[0] == -1).all() and np.isneginf(scores[0]).all()
    found = ids[1][ids[1] >= 0]
    assert found[0] == 7 and len(set(found)) == len(found) and np.isneginf(scores[1][len(found) :]).all()
    assert exact_below_rows == 16 or len(found) == 40
    assert len(found) >= 1
    empty_ids, empty_scores = index.search(np.zeros((0, 32)), 3)
    assert empty_ids.shape == empty_scores.shape == (0, 3)
    for bad in (np.nan, np.inf):
        with pytest.raises(RetrievalError, match="not finite"):
            index.search(np.full((1, 32), bad), 3)
    for queries, k in ((np.ones((1, 31)), 3), (np.ones(32), 3), (np.ones((1, 32)), 0)):
        with pytest.raises(ValueError, match="expected"):
            index.search(queries, k)


def test_vectors_that_cannot_be_indexed():
    """A NaN row aborts the whole process inside ScaNN; no rows fail without a word on why."""
    vectors = unit_rows(40, 8)
    vectors[31, 2] = np.nan
    with pytest.raises(CorpusError, match="row 31"):
        ScannIndex.from_vectors(vectors, exact_below_rows=16)
    with pytest.raises(CorpusError, match="N >= 1"):
        ScannIndex.from_vectors(np.zeros((0, 8), np.float32))


def test_one_passage():
    """A corpus of one breaks the exact search or the tree's minimum size."""
    index = ScannIndex.from_vectors(unit_rows(1, 8), exact_below_rows=1)
    assert index.search(unit_rows(1, 8), 2)[0].tolist() == [[0, -1]]
    (found,) = RetrievalService.from_corpus(people()[:1]).search(["Baro Quill"], 3)
    assert [p.id for p in found] == ["p0"]


def test_build_is_silent(capfd):
    """ScaNN writes its build log over the progress bar of a run."""
    ScannIndex.from_vectors(unit_rows(300, 32), exact_below_rows=16).search(unit_rows(2, 32), 3)
    assert capfd.readouterr() == ("", "")


# --- index directories


@pytest.mark.parametrize("kind", ["index_directory", "tree_directory"])
def test_directory_survives_a_move(kind, request, tmp_path):
    """An index holds absolute paths or leans on the original corpus, and breaks when it is copied elsewhere."""
    source = request.getfixturevalue(kind)
    queries = [f"{p.title} born" for p in people()]
    before = RetrievalService.open(source).search(queries, 3)
    moved = shutil.copytree(source, tmp_path / "elsewhere")
    assert RetrievalService.open(moved).search(queries, 3) == before
    assert (moved / "scann").is_dir() == (kind == "tree_directory")
    found = np.mean([row[0].title == p.title for p, row in zip(people(), before, strict=True)])
    assert found == 1 if kind == "index_directory" else found > 0.9  # a tree is approximate


def test_linked_corpus(tmp_path, monkeypatch):
    """A large corpus is linked, not copied: writing the original anew must not reach into the index."""
    monkeypatch.setattr(retrieval.index, "COPY_BELOW_BYTES", 0)
    path = tmp_path / "people.jsonl"
    write_corpus(path, people())
    ScannIndex.build(tmp_path / "index", MemoryMappedCorpus(path), HashingEncoder(64).fit(people()))
    assert os.path.samefile(path, tmp_path / "index" / "corpus.jsonl")
    write_corpus(path, people()[:5])
    (found,) = RetrievalService.open(tmp_path / "index").search(["Zora Crane"], 1)
    assert found[0].title == "Zora Crane"


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
@pytest.mark.parametrize("kind", ["index_directory", "tree_directory"])
def test_every_damaged_file_is_refused_by_name(damage, kind, request, tmp_path):
    """ScaNN loads damaged files without a word and answers wrongly, or aborts the process."""
    source = request.getfixturevalue(kind)
    names = sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file())
    assert len(names) >= 5
    for name in names:
        if name.name == "manifest.json" and damage is _flip_last_bit:
            continue  # its last byte is a line break
        copy = shutil.copytree(source, tmp_path / "copy")
        damage(copy / name)
        with pytest.raises(CorpusError, match=name.name):
            RetrievalService.open(copy)
        shutil.rmtree(copy)


def test_every_swapped_file_is_refused_by_name(index_directory, tmp_path):
    """A file of another index of the same shape is accepted: passages then answer other passages' queries."""
    write_corpus(tmp_path / "other.jsonl", reversed(people()))
    corpus = MemoryMappedCorpus(tmp_path / "other.jsonl")
    ScannIndex.build(tmp_path / "other", corpus, HashingEncoder(256).fit(people()[:300]))
    for name in ("corpus.jsonl", "corpus.offsets.npy", "vectors.npy", "encoder_weights.npy"):
        copy = shutil.copytree(index_directory, tmp_path / "copy")
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
        ("format", 0, "manifest.json"),
        ("files", {}, "manifest.json"),
        ("files", [], "manifest.json"),
        ("encoder", {"name": "other"}, "manifest.json"),
        ("encoder", {"name": "hashing", "dimensions": 256, "seed": 1}, "encoder_weights.npy"),
    ],
)
def test_manifest_fields_are_checked(index_directory, tmp_path, field, value, word):
    """An edited manifest, or one of an encoder this program does not have, is believed."""
    copy = shutil.copytree(index_directory, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {field: value}))
    with pytest.raises(CorpusError, match=word) as error:
        RetrievalService.open(copy)
    assert "\n" not in str(error.value)


def test_a_planted_pickle_is_never_loaded(tree_directory, tmp_path):
    """ScaNN unpickles scann_docids.pkl when there is one: opening a foreign index would run foreign code."""
    copy = shutil.copytree(tree_directory, tmp_path / "copy")
    (copy / "scann" / "scann_docids.pkl").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path) + b"/ran'\ntR.")
    with pytest.raises(CorpusError, match="scann_docids.pkl"):
        RetrievalService.open(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["scann/scann_docids.pkl"] = {"bytes": 0, "sha256": ""}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match="scann_docids.pkl"):
        RetrievalService.open(copy)
    assert not (tmp_path / "ran").exists()


# --- service


def test_service_finds_the_passage_among_look_alikes():
    """Shared name words or the question's own words outweigh the title, so the right passage is missing."""
    service = RetrievalService.from_corpus(people())
    for template in ("{} born", "When was {} born?", "birthplace of {}"):
        found = service.search([template.format(p.title) for p in people()], 3)
        assert [row[0].id for row in found] == [p.id for p in people()]
        assert all(len(row) == 3 for row in found)


def test_title_outweighs_a_mention():
    """A query for a name returns whoever mentions it before the passage that is about it."""
    passages = [
        Passage("mention", "Red Harbor", "Baro Quill directed it."),
        Passage("subject", "Baro Quill", "A painter of the far north who lived in Veldt until the great fire."),
    ]
    (found,) = RetrievalService.from_corpus(passages + people()[1:]).search(["Baro Quill"], 1)
    assert found[0].id == "subject"


def test_service_searches_once_per_batch():
    """Repeated sub-queries are searched again, or the batch is cut into several ScaNN calls."""
    service = RetrievalService.from_corpus(people())
    batch = ["Baro Quill born", " Baro  Quill\tborn ", "", "  ", "Lena Wend", "Baro Quill born"]
    found = service.search(batch, 2)
    assert [len(row) for row in found] == [2, 2, 0, 0, 2, 2]
    assert found[0] == found[1] == found[5] and found[4][0].title == "Lena Wend"
    assert service.counters == {"queries": 6, "unique": 2, "hits": 0, "searches": 1}
    assert service.search(batch, 2) == found
    assert service.counters == {"queries": 12, "unique": 4, "hits": 2, "searches": 1}
    assert service.search(["", " "], 2) == [[], []] and service.search([], 2) == []
    assert service.counters["searches"] == 1


def test_cache_hit_equals_miss():
    """A cached answer differs from a searched one in a score's last bit, its order, or its k."""
    cached, uncached = RetrievalService.from_corpus(people()), RetrievalService.from_corpus(people(), cache_size=0)
    queries = [f"{p.title} born" for p in people()[:50]]
    cached.search(queries[::2], 3)
    mixed = cached.search(queries, 3)
    assert mixed == [uncached.search([query], 3)[0] for query in queries]
    assert cached.search(queries, 2) == [row[:2] for row in mixed]
    assert cached.counters["hits"] == 25 and uncached.counters["hits"] == 0


def test_cached_answers_are_not_shared():
    """A caller that cuts its list of passages changes what later callers get."""
    service = RetrievalService.from_corpus(people())
    service.search(["Baro Quill"], 3)[0].clear()
    assert len(service.search(["Baro Quill"], 3)[0]) == 3


def test_cache_keeps_the_most_recently_used():
    """The cache grows without bound, or throws out what is in use."""
    service = RetrievalService.from_corpus(people(), cache_size=2)
    for query in ("Baro Quill", "Lena Wend", "Baro Quill", "Zora Crane", "Baro Quill", "Lena Wend"):
        service.search([query], 3)
    assert service.counters["hits"] == 2 and service.counters["searches"] == 4


def test_queries_of_any_kind():
    """Model output (control characters, half surrogates, huge texts, unknown words) raises inside a rollout."""
    service = RetrievalService.from_corpus(people())
    found = service.search(["\x00", "\ud800 Baro Quill", "word " * 20_000, "## ##", "zzyzx", "東京"], 3)
    assert [bool(row) for row in found] == [False, True, False, False, False, False]
    assert found[1][0].id == "p0"
    with pytest.raises(ValueError, match="k is 0"):
        service.search(["Baro Quill"], 0)


def test_scores_are_rounded_and_ordered():
    """Scores carry float noise that breaks equal replays, or the worst passage comes first."""
    (row,) = RetrievalService.from_corpus(people()).search(["Baro Quill born"], 8)
    scores = [p.score for p in row]
    assert scores == sorted(scores, reverse=True) and all(s == round(s, 4) for s in scores)


def test_mismatched_parts_are_refused(index_directory):
    """An index is served with another corpus or encoder: every answer is then a wrong passage."""
    index = ScannIndex.open(index_directory)
    encoder = HashingEncoder(256)
    for corpus, other in ((people()[:-1], encoder), (people(), HashingEncoder(128))):
        with pytest.raises(CorpusError, match="320 rows of 256"):
            RetrievalService(index, corpus, other)
    with pytest.raises(CorpusError, match="no passages"):
        RetrievalService.from_corpus([])


def test_real_questions_and_passages(shared_data, tmp_path):
    """Real text (accents, brackets, long passages) is not found by its title, or hardly by real questions."""
    path = shutil.copyfile(shared_data / "hotpotqa100" / "corpus.jsonl", tmp_path / "corpus.jsonl")
    service, corpus = RetrievalService.from_corpus(path), MemoryMappedCorpus(path)
    queries = [" ".join([p.title, *p.text.split()[:6]]) for p in corpus]
    found = service.search(queries, 3)
    assert np.mean([p.id in [f.id for f in row] for p, row in zip(corpus, found, strict=True)]) >= 0.99
    lines = (shared_data / "hotpotqa100" / "questions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    wanted = [set(row["metadata"]["supporting_titles"]) for row in rows]
    titles = [{p.title for p in row} for row in service.search([row["question"] for row in rows], 3)]
    assert np.mean([bool(w & t) for w, t in zip(wanted, titles, strict=True)]) >= 0.85

"""The command that builds an index, launch/build_index.py."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from bert_models import write_model
from helpers import people
from programs import ROOT, completed

from retrieval.corpus import write_corpus
from retrieval.protocol import Passage
from retrieval.service import RetrievalService

PROGRAM = ROOT / "launch" / "build_index.py"
PASSAGES = [Passage(str(i), f"Title {word}", f"The {word} was seen.") for i, word in enumerate("owl fox elk".split())]


def build_index(*flags: str) -> subprocess.CompletedProcess:
    return completed([PROGRAM, *flags])


def refused(*flags: str) -> str:
    """Runs with bad flags; returns the one line on stderr."""
    result = build_index(*flags)
    assert result.returncode == 2 and result.stdout == "", result
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def corpus(tmp_path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", PASSAGES)
    return tmp_path / "corpus.jsonl"


def test_build_then_serve(corpus, tmp_path):
    """The built index needs nothing but its directory."""
    result = build_index(f"--corpus={corpus}", "--encoder=hashing", f"--out={tmp_path / 'index'}")
    assert result.returncode == 0 and result.stderr == "", result
    for words in ("3 rows", "1024 dimensions", " s\n", "3 of 3"):
        assert words in result.stdout
    assert json.loads((tmp_path / "index" / "manifest.json").read_text())["self_check"] == {"queries": 3, "found": 3}
    corpus.unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["index"]
    (passages,) = RetrievalService.open(tmp_path / "index").search(["fox"], 1)
    assert (passages[0].id, passages[0].title, passages[0].text) == ("1", PASSAGES[1].title, PASSAGES[1].text)


def test_existing_directory(corpus, tmp_path):
    """A directory is overwritten only with --overwrite, and only if it is an index."""
    flags = f"--corpus={corpus}", f"--out={tmp_path / 'index'}"
    (tmp_path / "index").mkdir()
    assert build_index(*flags).returncode == 0  # an empty one is fine
    before = (tmp_path / "index" / "manifest.json").read_text()
    assert "--overwrite" in refused(*flags)
    assert (tmp_path / "index" / "manifest.json").read_text() == before

    write_corpus(corpus, PASSAGES[:2])
    assert "2 rows" in build_index(*flags, "--overwrite").stdout
    assert "match the manifest" in build_index("--verify", flags[1]).stdout
    with open(tmp_path / "index" / "vectors.npy", "ab") as file:
        file.write(b"more")
    assert "vectors.npy: differs" in refused("--verify", flags[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "index"]

    own = f"--corpus={tmp_path / 'index' / 'corpus.jsonl'}"
    assert "holds the corpus" in refused(own, flags[1], "--overwrite")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    assert "not an index" in refused(flags[0], f"--out={tmp_path / 'precious'}", "--overwrite")
    assert (tmp_path / "precious" / "thesis.tex").exists()


def test_bad_input_is_one_line(corpus, tmp_path):
    """Bad input ends with code 2 and one line, and leaves nothing behind."""
    out = f"--out={tmp_path / 'index'}"
    assert "flag --corpus" in refused(out)
    assert "e6: no such directory; accepted: hashing, bm25 or" in refused(f"--corpus={corpus}", "--encoder=e6", out)
    assert "--from_faiss" in refused(f"--corpus={corpus}", "--encoder=bm25", "--from_faiss=x.index", out)
    assert "x.index: no such" in refused(f"--corpus={corpus}", "--from_faiss=x.index", out)
    assert "absent.jsonl" in refused("--corpus=absent.jsonl", out)
    assert "is a directory, accepted: a jsonl file" in refused("--corpus=/", out)
    corpus.write_text(corpus.read_text() + '{"id": "9"}\n')
    assert "line 4: field contents is missing (found: id)" in refused(f"--corpus={corpus}", out)
    write_corpus(corpus, PASSAGES)
    assert "cannot be written" in refused(f"--corpus={corpus}", f"--out={corpus}/index")
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_every_encoder(tmp_path):
    """Every encoder's index opens and answers without the files it was made from."""
    write_corpus(tmp_path / "people.jsonl", people())
    model = write_model(tmp_path / "tiny-e5")
    for name, *flags in (("words", "--encoder=bm25"), ("bert", f"--encoder={model}")):
        result = build_index(f"--corpus={tmp_path / 'people.jsonl'}", f"--out={tmp_path / name}", *flags)
        assert result.returncode == 0 and "320 rows" in result.stdout, result
    shutil.rmtree(model)
    queries = [f"{p.title} born" for p in people()]
    assert [r[0].id for r in RetrievalService.open(tmp_path / "words").search(queries, 1)] == [p.id for p in people()]
    assert all(RetrievalService.open(tmp_path / "bert").search(queries, 1))
    manifest = json.loads((tmp_path / "bert" / "manifest.json").read_text())
    assert manifest["encoder"]["query_prefix"] == "query: " and manifest["dimensions"] == 48

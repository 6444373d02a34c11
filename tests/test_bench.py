"""The benchmarks run, at sizes that say nothing about speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "launch" / "bench.py"


SUBJECTS = ("retrieval", "recall", "corpus", "questions", "baselines", "scale", "weights")


def bench(*arguments: str) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_searches_and_batching(tmp_path):
    """A benchmark that nobody can run any more measures nothing; methods at different recall are no comparison."""
    pytest.importorskip("faiss")
    sizes = ["--rows", "3000", "--queries", "64", "--dimensions", "32", "--batching_rows", "500", "--http_rows", "50"]
    sizes += ["--bm25_rows", "500", "--bm25_queries", "40"]
    done = bench("retrieval", "--parts", "vectors", "bm25", "batching", f"--json={tmp_path / 'out.json'}", *sizes)
    report = json.loads((tmp_path / "out.json").read_text())
    lines = {(line["method"], line["target"]): line for line in report["vectors"]}
    assert lines["faiss Flat", None]["recall"] == 1
    assert lines["scann", None]["recall"] > 0.97  # of scores equal in four decimals, the lower row comes first
    for method in ("faiss IVF-Flat", "faiss IVF-PQ", "faiss HNSW"):
        for target in (0.95, 0.99):
            assert lines[method, target]["recall"] >= target
    assert report["bm25"][0]["method"] == "this project" and all(line["same_best"] > 0.9 for line in report["bm25"])
    assert len(report["batching"]) == 7 and all(line["seconds"] > 0 for line in report["batching"])
    assert "| 3000 | scann |" in done.stdout and "over HTTP" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_encoder(tmp_path):
    """The encoder is compared with a PyTorch model of other weights, or pools in another way."""
    pytest.importorskip("torch")
    bench("retrieval", "--parts", "encoder", "--sentences", "24", f"--json={tmp_path / 'out.json'}")
    for line in json.loads((tmp_path / "out.json").read_text())["encoder"]:
        assert line["max_difference"] < 1e-5 and line["ratio"] > 0


def test_corpus(tmp_path):
    """A measurement that leaves a gigabyte behind."""
    (tmp_path / "work").mkdir()
    flags = ["--rows=2000", f"--folder={tmp_path / 'work'}", f"--json={tmp_path / 'out.json'}"]
    bench("corpus", *flags)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == 2000
    assert not list((tmp_path / "work").iterdir())


def test_recall(shared_data, tmp_path):
    """Each retriever finds what it should on real questions: a broken one would still give a table."""
    folder = shared_data / "hotpotqa100"
    files = [f"--questions={folder / 'questions.jsonl'}", f"--corpus={folder / 'corpus.jsonl'}"]
    done = bench("recall", *files, f"--json={tmp_path / 'out.json'}")
    found = json.loads((tmp_path / "out.json").read_text())["retrievers"]
    shares = {name: figures["supporting titles in the top 3"] for name, figures in found.items()}
    assert shares["hashing"] > 0.6 and shares["BM25"] > 0.65 and shares["hashing + BM25"] > 0.65
    assert all(figures["passages found by title and first eight words"] >= 0.95 for figures in found.values())
    assert "| hashing + BM25 |" in done.stdout


def test_help_lists_every_benchmark():
    """`--help` taken for the name of a benchmark, or one that nobody learns of."""
    spoken = bench("--help").stdout
    assert all(f"launch/bench.py {subject} --" in spoken for subject in SUBJECTS) and "SUBJECT --help" in spoken


def test_other_subjects_are_refused():
    """A misspelt subject ends in a traceback."""
    done = subprocess.run([sys.executable, str(PROGRAM), "retreival"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "accepted: retrieval, recall, corpus" in done.stderr


def test_questions(tmp_path):
    """The figures of docs/data.md that nobody can measure again."""
    bench("questions", "--rows", "2000", f"--json={tmp_path / 'out.json'}")
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["rows"] == 2000 and all(figures[key]["peak_mb"] > 10 for key in list(figures)[1:])

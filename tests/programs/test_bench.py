"""Runs the benchmarks, at sizes too small to measure speed: contenders do the same work, and figures are complete."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from programs import ROOT, completed

PROGRAM = ROOT / "launch" / "bench.py"


def bench(name: str, out: Path, *flags: str) -> list[dict]:
    """The lines of a benchmark that runs in this process."""
    importlib.import_module(f"benchmarks.{name}").main([*flags, f"--json={out / 'out.json'}"])
    report = json.loads((out / "out.json").read_text())
    assert report["machine"]["cores"] > 0
    return report[name]


QUICK = ("--sizes=tiny", "--scale=0.05", "--repeats=2")


def test_rollouts_have_the_scripted_lengths(tmp_path, capsys):
    """Both contenders sample the scripted tokens from the same weights, and row use counts the tokens sampled."""
    pytest.importorskip("torch")
    from benchmarks.scripted import WORKS

    lines = {(line["work"], line["contender"]): line for line in bench("rollout", tmp_path, *QUICK)}
    assert list(lines) == [("equal", "this project"), ("equal", "torch"), ("ragged", "this project")]
    assert all(lines["equal", name]["max_difference"] < 1e-4 for name in ("this project", "torch"))
    for (name, contender), line in lines.items():
        work = WORKS[name](0.05)
        if contender == "this project":
            assert line["relative_speed"] == 1 and 0 < line["extend_use"] <= 1
            assert line["decode_steps"] * work.slots * line["row_use"] == pytest.approx(work.sampled, rel=2e-3)
    assert "| tiny | equal | torch |" in capsys.readouterr().out


def test_updates_are_equal(tmp_path):
    """All contenders take the same optimizer step; a model's directory trains adapters."""
    pytest.importorskip("torch")
    lines = bench("update", tmp_path, *QUICK, "--rows=4")
    assert [line["contender"] for line in lines] == ["this project", "torch"] * 2
    for line in lines:
        assert line["loss"] == pytest.approx(lines[0 if line["work"] == "equal" else 2]["loss"], abs=1e-5) != 0


def test_searches_are_compared_at_equal_recall(tmp_path):
    for peer in ("faiss", "bm25s", "numba"):
        pytest.importorskip(peer)
    lines = {line["method"]: line for line in bench("retrieval", tmp_path, "--rows=3000", "--dimensions=32")}
    assert lines["this project"]["recall"] > 0.97  # ties in four decimals go to the lower row
    assert lines["faiss IVF-Flat"]["recall"] >= 0.95
    assert lines["BM25, bm25s"]["same_first"] > 0.9


def test_recall_on_real_questions(shared_data, tmp_path):
    folder = shared_data / "hotpotqa100"
    files = [f"--questions={folder / 'questions.jsonl'}", f"--corpus={folder / 'corpus.jsonl'}"]
    lines = {line["retriever"]: line for line in bench("recall", tmp_path, *files) if line["type"] == "all"}
    assert lines["hashing"]["titles in the top 3"] > 0.6 and lines["BM25"]["titles in the top 3"] > 0.65
    assert all(line["titles@3"] > line["question@3"] for line in lines.values())


@pytest.mark.slow
def test_the_device_benchmark_measures_every_program(tmp_path):
    lines = bench("device", tmp_path, "--sizes", "tiny", "--scale=0.05", "--slots=8", "--dtype=float32")
    figures = {line["what"]: line for line in lines}
    assert {"prefilled tokens", "decode steps", "observed tokens", "rollouts", "tokens"} < set(figures)
    assert figures["rollouts"]["logp_gap"] < 1e-4


def test_other_names_are_refused():
    done = completed([sys.executable, PROGRAM, "retreival"])
    assert done.returncode == 2 and "accepted: rollout, update, retrieval, recall, device" in done.stderr


def test_a_missing_file_is_one_line():
    done = completed([sys.executable, PROGRAM, "recall", "--questions=nowhere.jsonl", "--corpus=nowhere.jsonl"])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "nowhere.jsonl" in done.stderr

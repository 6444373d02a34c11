"""Policies on data that they were not trained on: unseen names, and the files of MultiHop-RAG."""

import json
import re
import sys

import pytest
from multihop_files import write_multihop_rag
from programs import ROOT, completed

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.names import is_new
from psearch_jax.data.sources import read_questions
from psearch_jax.eval.evaluate import read_scores

TOY = ("--model=toy", "--config=configs/smoke.py", "--config.rollout.slots=16", "--config.rollout.num_buckets=1")


def run(program, *arguments):
    command = [sys.executable, str(ROOT / "launch" / program), *map(str, arguments)]
    done = completed(command)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """MultiHopRAG.json with 12 questions of each type, and the entire closed world as corpus.json."""
    return write_multihop_rag(ClosedWorld.make(0), tmp_path_factory.mktemp("multihop"), 12)


def test_questions_of_the_files(files):
    """Inference queries are trained on or reported as comparison queries."""
    questions = read_questions(files[0], "multihoprag")
    assert [q.kind for q in questions] == ["parallel"] * 12 + ["sequential"] * 12
    assert questions[0].metadata["type"] == "comparison_query" and questions[23].id == "23"


@pytest.mark.slow
def test_files_and_memory_give_the_same_answers(files, tmp_path):
    """A policy that is right in the closed world is wrong when corpus, index and questions come from files."""
    run("build_index.py", f"--corpus={files[1]}", "--encoder=hashing", f"--out={tmp_path / 'index'}")
    benchmark = f"--benchmark=multihoprag:{files[0]}"
    output = run("eval.py", *TOY, benchmark, f"--index={tmp_path / 'index'}", f"--out={tmp_path / 'files'}")
    assert (
        "| multihoprag | parallel | ParallelSearch, Qwen2.5-7B-Instruct (published, arXiv 2508.09303) | .641 |"
        in output
    )
    closed_world = [f"--benchmark=closed_world:{kind}" for kind in ("parallel", "sequential")]
    run("eval.py", *TOY, *closed_world, "--count=12", f"--out={tmp_path / 'memory'}")
    (through_files,) = read_scores(tmp_path / "files").values()
    in_memory = [s for group in read_scores(tmp_path / "memory").values() for s in group]
    # Article titles affect search scores, so another distractor may be retrieved along with the relevant fact.
    same = [(a.answer, a.turns) == (b.answer, b.turns) for a, b in zip(through_files, in_memory, strict=True)]
    assert sum(same) >= 22 and sum(s.em for s in through_files) >= 20


@pytest.mark.slow
def test_training_and_evaluation_on_the_files(files, tmp_path):
    """A run on MultiHop-RAG fails at the first row because of another field name, or in the evaluation."""
    run("prepare_data.py", f"--source=multihoprag:{files[0]}", f"--out={tmp_path / 'data'}")
    run("build_index.py", f"--corpus={files[1]}", "--encoder=hashing", f"--out={tmp_path / 'index'}")
    small = ["--config.train.steps=1", "--config.train.prompts=2", "--config.rollout.slots=16"]
    small += ["--config.learning.mini_batch_rollouts=16", "--config.learning.micro_batch_rows=8"]
    small += ["--config.rollout.num_buckets=1"]
    paths = [f"--config.data.source={tmp_path / 'data'}", f"--config.retrieval.index={tmp_path / 'index'}"]
    run("train.py", "--config=configs/smoke.py", *small, *paths, f"--workdir={tmp_path / 'run'}")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["reward"] > 0 and row["status/answered"] > 0.5
    arguments = (f"--model={tmp_path / 'run'}", f"--benchmark=dev:{files[0]}", f"--out={tmp_path / 'out'}")
    assert "LEAK: 24 of the 24 questions of dev were trained on." in run("eval.py", *arguments)


@pytest.mark.slow
def test_names_never_seen_are_read(tmp_path):
    """The policy recalls words from its weights, so that it is right only on the names of its cold start."""
    flags = (
        "--benchmark=closed_world:single",
        "--count=40",
        "--config.data.world_names=new",
        "--config.data.world_seed=1",
    )
    run("eval.py", *TOY, *flags, f"--out={tmp_path / 'out'}")
    rows = [json.loads(line) for line in (tmp_path / "out" / "closed_world_single.jsonl").read_text().splitlines()]
    names = [name for row in rows for name in re.findall(r"\b[A-Z][a-z]{6}\b", row["question"])]
    assert len(rows) == 40 and names and all(is_new(name) for name in names)
    assert sum(row["em"] for row in rows) >= 28

"""launch/eval.py as a program: complete evaluations, resumed ones, and refused arguments."""

import hashlib
import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest
from helpers import PASSAGES, one_device_mesh, random_params, tiny_config
from programs import ROOT, Program, completed, wait_until
from serving import Running

from psearch_jax.config import Config, to_mapping
from psearch_jax.eval.evaluate import read_scores
from psearch_jax.models.hf import save_hf
from psearch_jax.train.checkpointing.checkpoint import Checkpoints, model_record
from psearch_jax.train.state import init_state, make_optimizer
from retrieval.corpus import MemoryMappedCorpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index
from retrieval.remote.server import make_app
from retrieval.service import RetrievalService


def run_eval(*arguments):
    command = [sys.executable, str(ROOT / "launch" / "eval.py"), *map(str, arguments)]
    return completed(command)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three questions and four passages, in the formats of real files."""
    directory = tmp_path_factory.mktemp("files")
    questions, corpus = directory / "questions.jsonl", directory / "corpus.jsonl"
    rows = [
        {"id": f"q{i}", "question": "Who is older?", "golden_answers": ["Ada"], "metadata": {"type": "bridge"}}
        for i in range(3)
    ]
    questions.write_text("".join(json.dumps(r) + "\n" for r in rows))
    passages = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in PASSAGES]
    corpus.write_text("".join(json.dumps(p) + "\n" for p in passages))
    return questions, corpus


def small_run_config(corpus):
    """The config.json of a run with tiny budgets."""
    values = to_mapping(Config())
    values["data"]["template"] = "toy"
    values["retrieval"]["corpus"] = str(corpus)
    values["model"]["sampling_dtype"] = "float32"
    values["rollout"] |= {"slots": 4, "samples": 2, "context_tokens": 160, "prompt_tokens": 48}
    values["rollout"] |= {"turn_tokens": 12, "obs_tokens": 48, "search_turns": 1}
    return values


@pytest.fixture(scope="module")
def evaluated(tiny_tokenizer, tmp_path_factory, files):
    """A run directory with one checkpoint of random weights, its evaluation by launch/eval.py, and the weights in HF
    format. Returns (directory, finished process, arguments)."""
    (questions, corpus), directory = files, tmp_path_factory.mktemp("evaluated")
    config = tiny_config(tiny_tokenizer.size + 6, max_positions=256)
    params, run = random_params(config), directory / "run"
    checkpoints = Checkpoints(run / "checkpoints")
    state = init_state(params, make_optimizer(Config().learning, 1), one_device_mesh())
    checkpoints.save(3, state, {"model": model_record(config), "tokenizer": tiny_tokenizer.name})
    checkpoints.close()
    (run / "config.json").write_text(json.dumps(small_run_config(corpus)))
    save_hf(params, config, tiny_tokenizer.name, directory / "hf", jnp.float32)
    common = (f"--benchmark=nq:{questions}", "--temperature=1", "--samples=2", f"--corpus={corpus}")
    return directory, run_eval(f"--model={run}", f"--out={directory / 'a'}", *common), common


def test_program_evaluates_a_run(evaluated):
    """All questions and samples are in the files, which agree with each other and with the output."""
    directory, done, _ = evaluated
    assert done.returncode == 0, done.stderr
    out = directory / "a"
    assert sorted(p.name for p in out.iterdir()) == ["nq.jsonl", "report.html", "results.json", "results.md"]
    rows = [json.loads(line) for line in (out / "nq.jsonl").read_text().splitlines()]
    assert json.loads((out / "results.json").read_text())["benchmarks"]["nq"]["all"]["questions"] == 3
    assert [(r["id"], r["sample"]) for r in rows] == [(f"q{i}", s) for i in range(3) for s in range(2)]
    assert all(sum(turn["n_sampled"] for turn in row["actions"]) == row["tokens"] > 0 for row in rows)
    assert all(row["turns"] <= 2 and row["context"] <= 160 for row in rows), "the budgets are not those of the run"
    assert done.stdout == (out / "results.md").read_text()
    assert not any(word in row for row in rows for word in ("seconds", "time")), "rows must compare byte for byte"
    assert len(read_scores(out)["nq"]) == 6


def config_file(path, corpus):
    """A config module with tiny budgets."""
    values = small_run_config(corpus)
    path.write_text(f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({values!r})\n")
    return path


@pytest.mark.slow
def test_program_evaluates_an_export_alike(evaluated, tmp_path, files):
    """A checkpoint and its HF export give equal rows, and settings that identify the weights by their bits."""
    directory, _, common = evaluated
    config = config_file(tmp_path / "config.py", files[1])
    done = run_eval(f"--model={directory / 'hf'}", f"--out={tmp_path / 'b'}", f"--config={config}", *common)
    assert done.returncode == 0, done.stderr
    ours, theirs = directory / "a", tmp_path / "b"
    assert (ours / "nq.jsonl").read_bytes() == (theirs / "nq.jsonl").read_bytes()
    settings = [json.loads((out / "results.json").read_text())["settings"] for out in (ours, theirs)]
    assert settings[0] == settings[1]


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(evaluated, tmp_path, files):
    """A killed evaluation ends with the rows of an uninterrupted one."""
    directory, _, _ = evaluated
    row, many = json.loads(files[0].read_text().splitlines()[0]), tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps(row | {"id": f"q{i}"}) + "\n" for i in range(200)))
    sets = [f"--benchmark={name}:{many}" for name in ("nq", "popqa")]
    flags = [f"--model={directory / 'run'}", "--temperature=1", f"--corpus={files[1]}", "--config.rollout.slots=4"]
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    assert run_eval(*flags, *sets, f"--out={uninterrupted}").returncode == 0
    command = [sys.executable, str(ROOT / "launch" / "eval.py"), *flags, *sets, f"--out={resumed}"]
    process = Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list((resumed / "parts").glob("*.jsonl"))) >= 3, 120)
    process.kill()
    process.wait()
    assert (resumed / "parts").is_dir() and not (resumed / "results.json").exists()
    done = run_eval(*flags, *sets, f"--out={resumed}")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in resumed.iterdir()} == {p.name for p in uninterrupted.iterdir()}
    for file in {*uninterrupted.iterdir()} - {uninterrupted / "report.html"}:  # the report names its directory
        assert file.read_bytes() == (resumed / file.name).read_bytes(), file.name


@pytest.mark.slow
def test_program_evaluates_without_a_search(evaluated, tmp_path, files):
    """The baseline without search needs no passages; other methods do."""
    directory, _, _ = evaluated
    config = config_file(tmp_path / "config.py", "")
    common = (f"--model={directory / 'hf'}", f"--config={config}", f"--benchmark=nq:{files[0]}")
    done = run_eval(*common, f"--out={tmp_path / 'r1'}", "--config.method=r1")
    assert done.returncode == 0, done.stderr
    (scores,) = read_scores(tmp_path / "r1").values()
    assert {s.searches for s in scores} == {0} and {s.turns for s in scores} == {1} and "| r1 |" in done.stdout
    assert "--index: none given" in run_eval(*common, f"--out={tmp_path / 'x'}", "--config.method=search_r1").stderr


@pytest.mark.slow
def test_leaks_and_the_corpus_of_a_server_are_reported(evaluated, tmp_path, files):
    """Trained-on questions, skipped rows and the corpus of a retrieval server are reported."""
    directory, _, common = evaluated
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"id": "t", "question": "who is the OLDER", "golden_answers": ["Ada"]}) + "\n")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(files[0].read_text() + "{broken\n")
    arguments = [f"--benchmark=popqa:{bad}", "--skip_bad_rows", f"--training_data={train}"]
    corpus = MemoryMappedCorpus(files[1])
    build_index(tmp_path / "index", corpus, HashingEncoder().fit(corpus))
    service = RetrievalService.open(tmp_path / "index")
    with Running(make_app(service)) as running:
        arguments.append(f"--retriever_url={running.url}/retrieve")
        done = run_eval(f"--model={directory / 'run'}", f"--out={tmp_path / 'out'}", *arguments)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    digest = hashlib.sha256(files[1].read_bytes()).hexdigest()
    named = {name: service.describe()[name] for name in ("corpus_sha256", "ranking_sha256", "rows")}
    assert results["passages"] == {"corpus": "index", **named} and named["corpus_sha256"] == digest
    assert results["settings"]["retrieval"].items() >= named.items() and f"(sha256 {digest})" in done.stdout
    assert "LEAK: 3 of the 3 questions of popqa were trained on." in done.stdout
    assert results["leaked"] == {"popqa": ["q0", "q1", "q2"]}
    named = {"data": small_run_config(files[1])["data"] | {"source": str(train)}}
    shutil.copytree(directory / "run", tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(small_run_config(files[1]) | named))
    config = config_file(tmp_path / "config.py", files[1])  # names no questions, unlike the run
    again = run_eval(f"--model={tmp_path / 'run'}", f"--config={config}", f"--out={tmp_path / 'again'}", *common)
    assert "LEAK: 3 of the 3 questions of nq were trained on." in again.stdout, again.stderr
    assert "1 bad rows were skipped" in done.stdout and "bad.jsonl:4" in (tmp_path / "out" / "skipped.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model=toy",), "--benchmark: none found"),
        (("--model=toy", "--benchmark=nq:{questions}"), "--index: none given"),
        (("--model=toy", "--benchmark=nq:/nope.jsonl"), "/nope.jsonl: no such file"),
        (("--model=toy", "--benchmark=closed_world", "--index=x"), "found x with the closed world"),
        (("--model=toy", "--benchmark=closed_world", "--config.seed=7"), "config.seed: found 7, which has no effect"),
        (("--model=toy", "--benchmark=closed_world", "--config.rollout.samples=2"), "--samples is the number"),
    ],
)
def test_program_refuses_in_one_line(tmp_path, files, arguments, message):
    """Bad input ends at once, in one line, with exit code 2."""
    arguments = [a.format(questions=files[0]) for a in arguments]
    done = run_eval(*arguments, f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "out").exists()

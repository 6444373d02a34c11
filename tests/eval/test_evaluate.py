"""Evaluation: metrics, rows on disk, benchmarks, published figures, and launch/eval.py itself."""

import copy
import hashlib
import json
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uvicorn
from helpers import (
    PASSAGES,
    ScriptedSampler,
    make_collector,
    make_sampler,
    one_device_mesh,
    random_params,
    rollout_section,
    tiny_config,
)
from helpers import question as plain_question
from programs import ROOT, Program, completed, wait_until

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.config import Config, Lora, from_mapping, to_mapping
from psearch_jax.eval.benchmarks import (
    PAPER,
    PUBLISHED,
    closed_world_benchmark,
    dependency_labels,
    load_benchmarks,
    published,
)
from psearch_jax.eval.evaluate import (
    Evaluation,
    evaluate,
    policy_settings,
    read_scores,
    trajectory_row,
    weights_digest,
)
from psearch_jax.eval.scores import by_kind, score, summarise
from psearch_jax.models import lora
from psearch_jax.models.hf import save_hf
from psearch_jax.rollout.sampling import id_words, row_keys
from psearch_jax.train.checkpointing.checkpoint import Checkpoints, model_record
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.types import KINDS, Question, RewardParts, Trajectory, Turn, UserError
from retrieval.corpus import MemoryMappedCorpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index
from retrieval.remote.server import make_app
from retrieval.service import RetrievalService


def search(*queries, n=5):
    return Turn("<search>", "search", True, queries, tuple((PASSAGES[0],) for _ in queries), None, n)


SPLIT = Trajectory(
    Question("test", "0", "Who is older?", ("Ada Lovelace",), "parallel"),
    0,
    "answered",
    (search("a", "b"), Turn("<answer>", "answer", True, answer="Ada Lovelace", n_sampled=4)),
    np.zeros(3, np.int32),
    np.zeros(3, bool),
    np.zeros(3, np.float32),
    3,
)


# ---- rows ----


def test_row_holds_what_was_done():
    """A row is not valid JSON, or lacks what a reader needs to follow the rollout."""
    reward = RewardParts(1.0, -0.1, 0.45, 0.35)
    row = json.loads(json.dumps(trajectory_row(SPLIT, reward, 7)))
    parts = {
        "outcome": 1,
        "format": -0.1,
        "decomposition": 0.45,
        "search_count": 0.35,
        "critical_path": 0,
        "total": 1.7,
    }
    assert row["reward"] == pytest.approx(parts)
    fields = {key: row[key] for key in ("question_id", "kind", "sample", "step", "status")}
    assert fields == {"question_id": "0", "kind": "parallel", "sample": 0, "step": 7, "status": "answered"}
    assert row["turns"][0] == {
        "text": "<search>",
        "queries": ["a", "b"],
        "passages": [[{"id": "p0", "title": "Ada Lovelace"}]] * 2,
        "n_sampled": 5,
    }
    assert (row["ids"], row["mask"], row["logprobs"]) == ([0, 0, 0], [0, 0, 0], [0.0, 0.0, 0.0])
    assert trajectory_row(SPLIT, None, 0)["reward"] == {}


# ---- the real engine ----


def scripted(tokenizer, texts, rollout):
    """Collector, parameters and questions; the rollout of question i samples the i-th list of turns."""
    config = tiny_config(tokenizer.size + 6)
    sampler = make_sampler(tokenizer, config, cls=ScriptedSampler)
    sampler.after = min(tokenizer.stop_ids)
    questions = [plain_question(i, kind=kind) for i, (kind, _) in enumerate(texts)]
    keys = row_keys(3, 5, [id_words(q.source, q.id) for q in questions], [0] * len(questions))
    token_ids = [[i for turn in turns for i in tokenizer.encode_foreign(turn)] for _, turns in texts]
    sampler.scripts = {(int(a), int(b)): ids for (a, b), ids in zip(keys, token_ids, strict=True)}
    return make_collector(tokenizer, sampler, rollout), random_params(config), questions


def test_evaluation_runs_the_training_engine(tiny_tokenizer):
    """Evaluation on another code path than training measures another policy, or slots change order or counts."""
    a_search = "<think> x </think><search> Ada ## Alan </search>"
    an_answer = "<think> y </think><answer> Ada Lovelace </answer>"
    texts = [("parallel", (a_search, an_answer)), ("sequential", (an_answer,)), ("parallel", (an_answer,))]
    collector, params, questions = scripted(tiny_tokenizer, texts, rollout_section(slots=2, context_tokens=256))
    seen = []
    trajectories = evaluate(
        collector,
        collector.sampler.weights(params),
        questions,
        seed=3,
        step=5,
        temperature=1.0,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert [t.question.id for t in trajectories] == ["0", "1", "2"] and seen[-1] == (3, 3)
    kinds = {kind: summarise(group) for kind, group in by_kind(map(score, trajectories)).items()}
    assert kinds["parallel"] | {"turns": 0, "tokens": 0, "context": 0} == {
        "em": 1.0,
        "f1": 1.0,
        "decomposition_ratio": 0.5,
        "searches": 0.5,
        "sub_queries": 1.0,
        "turns": 0,
        "tokens": 0,
        "context": 0,
        "valid_format": 1.0,
        "decomposition_accuracy": 0.5,
        "llm_calls": 3,
        "questions": 2,
    }
    assert kinds["parallel"]["turns"] == 1.5 and kinds["sequential"]["turns"] == 1
    row = trajectory_row(trajectories[0], None, 5)
    assert len(row["ids"]) == len(row["mask"]) == len(row["logprobs"]) > 0
    assert sum(row["mask"]) == sum(turn["n_sampled"] for turn in row["turns"])
    assert [p["title"] for p in row["turns"][0]["passages"][1]][0] == "Alan Turing"


# ---- benchmarks ----


def test_closed_world_benchmarks_are_fixed_and_held_out():
    """A benchmark changes from call to call, or asks about entities seen in training."""
    world = small_world()
    held_out = {e.name for e in world.entities if e.held_out}
    for kind in KINDS:
        asked = closed_world_benchmark(world, kind, 10)
        assert asked == closed_world_benchmark(world, kind, 10) and len(asked) == 10
        assert {q.kind for q in asked} == {kind}
        assert all(any(name in q.text for name in held_out) for q in asked)
    asked = closed_world_benchmark(world, "many", 20)
    assert {len(q.metadata["options"]) for q in asked} == {5, 6, 7, 8} and {q.kind for q in asked} == {"parallel"}
    pairs = closed_world_benchmark(world, "pairs", 10)
    assert [q.kind for q in pairs] == ["parallel"] * 5 + ["sequential"] * 5
    assert {q.source for q in pairs} == {"closed_world:pairs"}
    known = closed_world_benchmark(world, "known", 30)
    assert len({q.text for q in known}) == 30 and not any(name in q.text for q in known for name in held_out)


def small_world():
    return ClosedWorld.make(0, persons=80, films=80, cities=60)


def test_closed_world_arguments():
    """A set is evaluated under the name of another, or two benchmarks of one kind get the same questions."""
    benchmarks = load_benchmarks(["closed_world", "closed_world:many"], small_world, 5)
    assert [b.name for b in benchmarks] == [f"closed_world:{kind}" for kind in (*KINDS, "many")]
    assert all(b.closed_world and len(b.questions) == 5 for b in benchmarks)
    assert benchmarks[0].questions == closed_world_benchmark(small_world(), "parallel", 5)
    nq, popqa, hotpot = load_benchmarks(
        ["nq:closed_world:single", "popqa:closed_world:single", "hotpotqa:closed_world:parallel+sequential"],
        small_world,
        6,
    )
    assert {q.source for q in nq.questions} == {"nq"} and {q.kind for q in nq.questions} == {"single"}
    assert {q.id for q in nq.questions} != {q.id for q in popqa.questions}
    assert [q.kind for q in hotpot.questions] == ["parallel"] * 6 + ["sequential"] * 6
    with pytest.raises(UserError, match="set 'double' found, accepted: parallel"):
        load_benchmarks(["closed_world:double"], small_world)
    with pytest.raises(UserError, match="each name once"):
        load_benchmarks(["closed_world:mixed", "closed_world:mixed"], small_world, 3)
    with pytest.raises(UserError, match="a set is named twice"):
        load_benchmarks(["x:closed_world:many+many"], small_world, 3)
    (both,) = load_benchmarks(["x:closed_world:parallel+entities2"], small_world, 400)
    assert len({(q.source, q.id) for q in both.questions}) == len(both.questions) < 800, "a question of both sets"


def test_benchmark_from_a_file(shared_data):
    """The path is cut off at a colon, or the benchmark does not get the name that the user gave."""
    file = shared_data / "hotpotqa100" / "questions.jsonl"
    (benchmark,) = load_benchmarks([f"hotpotqa:{file}"], small_world)
    assert (
        benchmark.name == "hotpotqa"
        and len(benchmark.questions) == 100
        and benchmark.questions[0].source == "hotpotqa"
    )
    assert [sum(q.kind == kind for q in benchmark.questions) for kind in ("parallel", "sequential")] == [22, 78]
    ids = {q.id for q in benchmark.questions}
    assert set(dependency_labels()) <= ids and len(dependency_labels()) > 50
    assert {q.id for q in benchmark.questions if "dependency" in q.metadata} == set(dependency_labels())


def test_a_count_is_drawn_from_the_whole_file(tmp_path):
    """The first rows of a merged file are all from one set, and every seed would select the same ones."""
    rows = [{"id": i, "question": f"Who is {i}?", "golden_answers": ["Ada"]} for i in range(100)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sampled(count, seed=1):
        (benchmark,) = load_benchmarks([f"all:{tmp_path / 'all.jsonl'}"], small_world, count, seed=seed)
        return [int(q.id) for q in benchmark.questions]

    assert sampled(20) == sorted(sampled(20)) and len(sampled(20)) == 20 and max(sampled(20)) > 50
    assert sampled(20) != sampled(20, seed=2) and set(sampled(20)) < set(sampled(40))
    assert sampled(0) == sampled(100) == sampled(500) == list(range(100))


@pytest.mark.parametrize("argument", ["nq", "nq:", ":file.jsonl", ""])
def test_benchmark_of_another_form(argument):
    """A forgotten name evaluates nothing, or the path of the file becomes the name of the benchmark."""
    with pytest.raises(UserError, match="accepted: NAME:FILE"):
        load_benchmarks([argument], small_world)


def test_published_figures():
    """A transposed column shows the result of another set; the averages must be those of the paper."""
    averages = {}
    for (_, kind), rows in PUBLISHED.items():
        for row in rows if kind is None else ():
            if row.source != PAPER:
                continue
            averages.setdefault((row.method, row.model), []).append(row.em)
    instruct, base = "Qwen2.5-7B-Instruct", "Qwen2.5-7B"
    expected = {
        ("R1 (no search)", instruct): 0.271,
        ("Search-R1", instruct): 0.370,
        ("ZeroSearch", instruct): 0.391,
        ("ParallelSearch", instruct): 0.425,
        ("R1 (no search)", base): 0.276,
        ("Search-R1", base): 0.434,
        ("ParallelSearch", base): 0.458,
    }
    assert {key: len(value) for key, value in averages.items()} == dict.fromkeys(expected, 7)
    for key, average in expected.items():
        assert np.mean(averages[key]) == pytest.approx(average, abs=0.0011), key
    newer = [[row.em for row in PUBLISHED[name, None] if row.source == "tinker-cookbook"] for name in ("nq", "popqa")]
    assert newer == [[0.516], []], "a set for which nothing was reported"
    assert published("HotpotQA", "parallel")[1].decomposition_ratio == 0.943
    assert published("2Wiki") == published("2wikimultihopqa") != ()
    assert published("hotpotqa100") == (), "a sample of a set is not the set"


# ---- resuming ----


def test_parts_are_not_done_twice(tmp_path):
    """A resumed evaluation repeats more than its unfinished part, or does not end with every question once."""
    all_questions = [Question("set", str(i), f"{i}?", ("x",), "single") for i in range(7)]
    sets = {"a": all_questions[:4], "b": all_questions[4:]}
    seen, progress = [], []

    def roll_out(questions, tell):
        seen.append([q.id for q in questions])
        if len(seen) == 3:
            raise KeyboardInterrupt
        tell(1, 2 * len(questions))
        return [replace(SPLIT, question=q, sample=s) for q in questions for s in range(2)]

    with pytest.raises(KeyboardInterrupt):
        Evaluation(tmp_path / "out", sets, {"seed": 1}).run(roll_out, 3, lambda done, of: progress.append((done, of)))
    with pytest.raises(UserError, match="holds an evaluation with seed 1, found 2"):
        Evaluation(tmp_path / "out", sets, {"seed": 2})
    with pytest.raises(UserError, match="questions.b '3 .*, found None"):
        Evaluation(tmp_path / "out", {"a": all_questions[:4]}, {"seed": 1})
    other_order = dict(reversed(sets.items()))
    evaluation = Evaluation(tmp_path / "out", other_order, {"seed": 1})
    scores = evaluation.run(roll_out, 3, lambda done, of: progress.append((done, of)))
    assert seen == [["0", "1", "2"], ["3", "4", "5"], ["6"], ["6"]] and progress[-1] == (7, 7)
    assert {name: [(s.id, s.sample) for s in group] for name, group in scores.items()} == {
        "a": [(str(i), s) for i in range(4) for s in range(2)],
        "b": [(str(i), s) for i in range(4, 7) for s in range(2)],
    }
    evaluation.finish({"benchmarks": {name: {} for name in sets}}, "table")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a.jsonl", "b.jsonl", "results.json", "results.md"]
    assert (
        Evaluation(tmp_path / "out", sets, {"seed": 1}).run(None, 3, None) == scores == read_scores(tmp_path / "out")
    )
    for line in ('{"benchmark": "a", "sou', "[1]"):
        (tmp_path / "out" / "a.jsonl").write_text(line)
        with pytest.raises(UserError, match="a.jsonl: line 1: .*accepted: a row of an evaluation"):
            Evaluation(tmp_path / "out", sets, {"seed": 1}).run(None, 3, None)
        with pytest.raises(UserError, match="a.jsonl: line 1: "):
            read_scores(tmp_path / "out")


@pytest.mark.parametrize("content", ["{}", "nonsense", "[1]"])
def test_the_results_of_something_else_are_not_an_evaluation(tmp_path, content):
    """A directory with a foreign results.json would count as a finished evaluation, whose rows are missing."""
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match="results.json: not the results of an evaluation"):
        Evaluation(tmp_path, {"a": [Question("set", "1", "1?", ("x",), "single")]}, {"seed": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_other_gold_facts_are_another_evaluation(tmp_path):
    """Corrected titles or evidences of a question would leave the results of the wrong ones in place."""
    asked = Question("set", "1", "1?", ("x",), "single", {"supporting_titles": ["A"]})
    Evaluation(tmp_path / "out", {"a": [asked]}, {"seed": 1})
    Evaluation(tmp_path / "out", {"a": [replace(asked)]}, {"seed": 1})
    with pytest.raises(UserError, match=r"questions\.a"):
        Evaluation(tmp_path / "out", {"a": [replace(asked, metadata={"supporting_titles": ["B"]})]}, {"seed": 1})


def test_settings_of_a_policy_name_contents(tiny_tokenizer, tmp_path):
    """An evaluation with an edited prompt, or another ranking of the same passages, would pass as finished."""
    params = random_params(tiny_config(tied=True))
    prompt = tmp_path / "prompt.txt"
    settings = []
    for text, ranking in [("As asked: {question}", "r"), ("Briefly: {question}", "r"), ("As asked: {question}", "s")]:
        prompt.write_text(text)
        own = from_mapping({"data": {"template": str(prompt)}})
        settings.append(
            policy_settings(own, tiny_tokenizer, params, {"corpus": "c", "ranking_sha256": ranking, "rows": 3})
        )
    assert settings[0] != settings[1] and settings[0] != settings[2]
    assert settings[0]["retrieval"]["corpus"] == "", "the config's field, not the name that a server gives"


def test_settings_of_a_policy_name_what_changes_its_rollouts(tiny_tokenizer):
    """An evaluation with fewer sub-queries, another tokenizer or another scale of its adapters would pass as the
    same, and a resumed one would mix both."""
    shape = tiny_config()
    params = lora.join_adapters(random_params(shape), lora.init_adapters(shape, Lora(2, 4.0), 0))
    other = copy.copy(tiny_tokenizer)
    other.identity = (*tiny_tokenizer.identity[:1], "[0]", tiny_tokenizer.identity[2])
    changes = [{}, {"retrieval": {"max_sub_queries": 1}}, {"model": {"lora_alpha": 8.0}}, {"model": {"lora_rank": 2}}]
    settings = [policy_settings(from_mapping(one), tiny_tokenizer, params, {}) for one in changes]
    settings.append(policy_settings(from_mapping({}), other, params, {}))
    assert settings[0] == settings[3] and len({json.dumps(one, sort_keys=True) for one in settings}) == 4


def test_digest_of_weights(tiny_tokenizer):
    """Two checkpoints have the same digest, or one has two because it is stored or sharded differently."""
    config = tiny_config(tiny_tokenizer.size + 6)
    params = random_params(config)
    changed = jax.tree.map(lambda x: x, params)
    leaves, tree = jax.tree.flatten(changed)
    leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].multiply(1 + 1e-6)
    assert weights_digest(params) == weights_digest(random_params(config))
    assert weights_digest(jax.tree.unflatten(tree, leaves)) != weights_digest(params)
    leaves = [x[::-1] for x in jax.tree.leaves(params)]
    assert weights_digest(jax.tree.unflatten(tree, leaves)) != weights_digest(params), (
        "reordered values have the same digest"
    )


# ---- the program ----


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
    """The program leaves out questions or samples, or its files disagree with each other."""
    directory, done, _ = evaluated
    assert done.returncode == 0, done.stderr
    out = directory / "a"
    assert sorted(p.name for p in out.iterdir()) == ["nq.jsonl", "report.html", "results.json", "results.md"]
    results = json.loads((out / "results.json").read_text())
    rows = [json.loads(line) for line in (out / "nq.jsonl").read_text().splitlines()]
    assert results["benchmarks"]["nq"]["all"]["questions"] == 3
    assert [(r["id"], r["sample"]) for r in rows] == [(f"q{i}", s) for i in range(3) for s in range(2)]
    assert all(sum(turn["n_sampled"] for turn in row["actions"]) == row["tokens"] > 0 for row in rows)
    assert all(row["turns"] <= 2 and row["context"] <= 160 for row in rows), "the budgets are not those of the run"
    assert done.stdout == (out / "results.md").read_text()
    assert not any(word in row for row in rows for word in ("seconds", "time")), "rows must compare byte for byte"
    assert len(read_scores(out)["nq"]) == 6


def test_program_is_asked_again(evaluated):
    """A second call repeats the rollouts, or mixes rows of two settings in one directory."""
    directory, first, common = evaluated
    again = run_eval(f"--model={directory / 'run'}", f"--out={directory / 'a'}", *common, "--k=2")
    assert again.returncode == 0 and "| nq | .000 | .000 |" in again.stdout, again.stderr
    other = run_eval(f"--model={directory / 'run'}", f"--out={directory / 'a'}", *common, "--seed=5")
    assert other.returncode == 2 and "holds an evaluation with seed 1, found 5" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_program_evaluates_an_export_alike(evaluated, tmp_path, files):
    """A checkpoint and its HF export are evaluated with different weights, prompts or keys."""
    directory, _, common = evaluated
    config = tmp_path / "config.py"
    values = small_run_config(files[1])
    config.write_text(
        f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({values!r})\n"
    )
    done = run_eval(f"--model={directory / 'hf'}", f"--out={tmp_path / 'b'}", f"--config={config}", *common)
    assert done.returncode == 0, done.stderr
    assert (directory / "a" / "nq.jsonl").read_bytes() == (tmp_path / "b" / "nq.jsonl").read_bytes()
    settings = [
        json.loads((out / "results.json").read_text())["settings"] for out in (directory / "a", tmp_path / "b")
    ]
    assert settings[0] == settings[1], "the settings must identify weights only by their bits"


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(evaluated, tmp_path, files):
    """A killed evaluation starts over, loses or repeats questions, or samples other answers than it would have."""
    directory, _, _ = evaluated
    rows = [json.loads(files[0].read_text().splitlines()[0]) | {"id": f"q{i}"} for i in range(200)]
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps(r) + "\n" for r in rows))
    sets = [f"--benchmark={name}:{many}" for name in ("nq", "popqa")]
    common = [
        f"--model={directory / 'run'}",
        *sets,
        "--temperature=1",
        f"--corpus={files[1]}",
        "--config.rollout.slots=4",
    ]
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "cut"
    assert run_eval(*common, f"--out={uninterrupted}").returncode == 0
    command = [sys.executable, str(ROOT / "launch" / "eval.py"), *common, f"--out={resumed}"]
    for parts in (2, 5):
        process = Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda parts=parts: len(list((resumed / "parts").glob("*.jsonl"))) >= parts, 120)
        process.kill()
        process.wait()
        assert (resumed / "parts").is_dir() and not (resumed / "results.json").exists()
    (resumed / "parts" / "000001.jsonl").rename(resumed / "kept")  # a finished part must not be evaluated again
    (resumed / "parts" / "000001.jsonl").write_bytes((resumed / "kept").read_bytes())
    (resumed / "kept").unlink()
    done = run_eval(*common, f"--out={resumed}")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in resumed.iterdir()} == {p.name for p in uninterrupted.iterdir()}
    for file in {*uninterrupted.iterdir()} - {uninterrupted / "report.html"}:  # the report names its directory
        assert file.read_bytes() == (resumed / file.name).read_bytes(), file.name


@pytest.mark.slow
def test_program_evaluates_without_a_search(evaluated, tmp_path, files):
    """The baseline without search requires an index, or is given one to search."""
    directory, _, _ = evaluated
    config = tmp_path / "config.py"
    values = small_run_config("")
    config.write_text(
        f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({values!r})\n"
    )
    common = (f"--model={directory / 'hf'}", f"--config={config}", f"--benchmark=nq:{files[0]}")
    done = run_eval(*common, f"--out={tmp_path / 'r1'}", "--config.method=r1")
    assert done.returncode == 0, done.stderr
    (scores,) = read_scores(tmp_path / "r1").values()
    assert {s.searches for s in scores} == {0} and {s.turns for s in scores} == {1} and "| r1 |" in done.stdout
    assert "--index: none given" in run_eval(*common, f"--out={tmp_path / 'x'}", "--config.method=search_r1").stderr
    refused = run_eval(*common, f"--out={tmp_path / 'x'}", "--config.method=r2")
    assert (
        refused.returncode == 2
        and "config.method: found 'r2'" in refused.stderr
        and "parallelsearch" in refused.stderr
    )


@contextmanager
def serving(index):
    """Serves an index directory in a thread as launch/serve_retriever.py does, and yields its URL."""
    service = RetrievalService.open(index)
    app = make_app(service)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
        server.should_exit = True
        thread.join()


@pytest.mark.slow
def test_leaks_and_the_corpus_behind_an_address_are_reported(evaluated, tmp_path, files):
    """A benchmark that was trained on looks like a success, or evaluations over two corpora look the same because both
    retrievers were served at port 8000."""
    directory, _, common = evaluated
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"id": "t", "question": "who is the OLDER", "golden_answers": ["Ada"]}) + "\n")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(files[0].read_text() + "{broken\n")
    arguments = [f"--benchmark=popqa:{bad}", "--skip_bad_rows", f"--training_data={train}"]
    corpus = MemoryMappedCorpus(files[1])
    build_index(tmp_path / "index", corpus, HashingEncoder().fit(corpus))
    with serving(tmp_path / "index") as url:
        arguments.append(f"--retriever_url={url}")
        done = run_eval(f"--model={directory / 'run'}", f"--out={tmp_path / 'out'}", *arguments)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    digest = hashlib.sha256(files[1].read_bytes()).hexdigest()
    ranking = RetrievalService.open(tmp_path / "index").describe()["ranking_sha256"]
    named = {"corpus_sha256": digest, "ranking_sha256": ranking, "rows": len(PASSAGES)}
    assert results["passages"] == {"corpus": "index", **named}
    assert results["settings"]["retrieval"].items() >= named.items() and f"(sha256 {digest})" in done.stdout
    assert "LEAK: 3 of the 3 questions of popqa were trained on." in done.stdout
    assert json.loads((tmp_path / "out" / "results.json").read_text())["leaked"] == {"popqa": ["q0", "q1", "q2"]}
    assert "1 bad rows were skipped" in done.stdout and "bad.jsonl:4" in (tmp_path / "out" / "skipped.txt").read_text()


@pytest.mark.slow
def test_two_evaluations_are_compared(evaluated, tmp_path):
    """The documented paired table cannot be made from the files of two evaluations."""
    directory, _, common = evaluated
    done = run_eval(f"--model={directory / 'run'}", f"--out={tmp_path / 'b'}", *common, "--seed=2")
    assert done.returncode == 0, done.stderr
    report = [sys.executable, str(ROOT / "launch" / "report.py"), str(directory / "a"), str(tmp_path / "b")]
    both = completed(report)
    assert both.returncode == 0 and "| nq | EM | 0.000 | 0.000 |" in both.stdout, both.stderr
    single = completed(report[:3])
    assert single.stdout == (directory / "a" / "results.md").read_text()
    wrong = completed([*report, str(directory / "hf")])
    assert wrong.returncode == 2 and len(wrong.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model=toy",), "--benchmark: none found"),
        (("--model=toy", "--benchmark=nq:{questions}"), "--index: none given"),
        (("--model=toy", "--benchmark=nq:/nope.jsonl"), "/nope.jsonl: no such file"),
        (("--benchmark=closed_world",), "--model must have a value"),
    ],
)
def test_program_refuses_in_one_line(tmp_path, files, arguments, message):
    """Bad input ends in a traceback, in exit code 1, or only after minutes of work."""
    arguments = [a.format(questions=files[0]) for a in arguments]
    done = run_eval(*arguments, f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "out").exists()

"""Evaluation: what is counted, the rows on disk, benchmarks and published figures, and launch/eval.py itself."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
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

from psearch_jax.config import Config, to_mapping
from psearch_jax.data.closed_world import ClosedWorld
from psearch_jax.eval.benchmarks import (
    PUBLISHED,
    closed_world_benchmark,
    closed_world_sets,
    load_benchmark,
    published,
)
from psearch_jax.eval.evaluate import (
    by_kind,
    em_interval,
    evaluate,
    figures,
    finished_by_turn,
    results_table,
    summarise,
    trajectory_row,
)
from psearch_jax.models.hf import save_hf
from psearch_jax.rollout.sampling import id_words, row_keys
from psearch_jax.train.checkpoint import Checkpoints, model_record
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.types import KINDS, Question, RewardParts, Trajectory, Turn, UserError

ROOT = Path(__file__).resolve().parents[1]


def search(*queries, n=5):
    return Turn("<search>", "search", True, queries, tuple((PASSAGES[0],) for _ in queries), None, n)


def answer(text, well_formed=True):
    return Turn("<answer>", "answer", well_formed, answer=text, n_sampled=4)


def trajectory(*turns, kind="parallel", status="answered", id=0, sample=0):
    asked = Question("test", str(id), "Who is older?", ("Ada Lovelace",), kind)
    empty = np.zeros(3)
    return Trajectory(asked, sample, status, turns, empty.astype(np.int32), empty.astype(bool), empty, 3)


# Four hand-worked trajectories: (em, f1, split, searches, sub-queries, turns, valid).
SPLIT = trajectory(search("a", "b"), answer("Ada Lovelace"), id=0)  # 1, 1, yes, 1, 2, 2, yes
SLOW = trajectory(search("a"), search("b", "c"), answer("Ada", False), id=1)  # 0, 2/3, no, 2, 3, 3, no
LOST = trajectory(search("a", "b", "c"), Turn("", "search", True, n_sampled=5), status="out_of_turns", id=2)  # 1, 3, 2
DIRECT = trajectory(answer("the ada  lovelace!"), kind="single", id=3)  # 1, 1, no, 0, 0, 1, yes
FOUR = [SPLIT, SLOW, LOST, DIRECT]


# ---- figures ----


def test_summary_by_hand():
    """A ratio over the wrong denominator, a search that never ran counted, or a missing answer taken for right."""
    assert summarise(FOUR) == {
        "em": 0.5,
        "f1": round((1 + 2 / 3 + 0 + 1) / 4, 6),
        "decomposition_ratio": 0.5,
        "searches": 1.0,
        "sub_queries": 2.0,
        "turns": 2.0,
        "valid_format": 0.5,
        "questions": 4,
    }
    assert summarise([]) == {"questions": 0}


def test_initial_search_is_not_the_models():
    """With rollout.initial_search a policy that never searches would look as if it searched and split."""
    found = summarise([trajectory(search("a", "b", n=0), answer("Ada Lovelace"))])
    assert (found["searches"], found["sub_queries"], found["decomposition_ratio"], found["turns"]) == (0, 0, 0, 1)


def test_only_the_first_search_decomposes():
    """The published rule reads the first executed search; a later split must not count."""
    assert summarise([SLOW])["decomposition_ratio"] == 0
    assert summarise([LOST])["decomposition_ratio"] == 1


def test_by_kind_keeps_kinds_apart():
    """Single-hop questions averaged into the figures of parallel ones."""
    found = by_kind(FOUR)
    assert list(found) == ["parallel", "single"]
    assert found["parallel"]["questions"] == 3 and found["single"]["em"] == 1
    assert found["parallel"]["em"] == pytest.approx(1 / 3, abs=1e-6)


def test_several_samples_are_one_question():
    """Counting samples as questions would make a small benchmark look large."""
    found = summarise([SPLIT, trajectory(answer("Alan"), id=0, sample=1)])
    assert found["questions"] == 1 and found["em"] == 0.5


def test_finished_by_turn_is_cumulative():
    """The share must grow with the turns, and a trajectory that gave no answer never finishes."""
    assert finished_by_turn(FOUR) == [0.25, 0.5, 0.75, 0.75, 0.75, 0.75]
    assert finished_by_turn([]) == []


def test_interval_of_em():
    """An interval that changes between runs, is wrong in width, or treats samples of a question as independent."""
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.6
    many = [trajectory(answer("Ada Lovelace" if r else "no"), id=i) for i, r in enumerate(right)]
    low, high = em_interval(many)
    assert (low, high) == em_interval(many)
    half_width = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 400)
    assert low == pytest.approx(right.mean() - half_width, abs=0.012)
    assert high == pytest.approx(right.mean() + half_width, abs=0.012)
    assert em_interval([SPLIT, SPLIT]) == (1, 1)
    copies = [trajectory(answer(t.answer), id=t.question.id, sample=s) for t in many for s in range(4)]
    low4, high4 = em_interval(copies)
    assert high4 - low4 == pytest.approx(high - low, abs=0.012), "copies of an answer are no new evidence"
    with pytest.raises(ValueError, match="no trajectories"):
        em_interval([])


# ---- rows ----


def test_row_holds_what_was_done():
    """A row that cannot be written as JSON, or lacks what a person needs to follow the rollout."""
    reward = RewardParts(1.0, -0.1, 0.45, 0.35)
    row = json.loads(json.dumps(trajectory_row(SPLIT, reward, 7)))
    parts = {"outcome": 1, "format": -0.1, "decomposition": 0.45, "search_count": 0.35, "total": 1.7}
    assert row["reward"] == pytest.approx(parts)
    named = {key: row[key] for key in ("question_id", "kind", "sample", "step", "status")}
    assert named == {"question_id": "0", "kind": "parallel", "sample": 0, "step": 7, "status": "answered"}
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
    """Collector, params and questions; the i-th question's rollout samples the i-th list of turns."""
    config = tiny_config(tokenizer.size + 6)
    sampler = make_sampler(tokenizer, config, cls=ScriptedSampler)
    sampler.after = min(tokenizer.stop_ids)
    asked = [plain_question(i, kind=kind) for i, (kind, _) in enumerate(texts)]
    keys = row_keys(3, 5, [id_words(q.source, q.id) for q in asked], [0] * len(asked))
    spoken = [[i for turn in turns for i in tokenizer.encode_foreign(turn)] for _, turns in texts]
    sampler.scripts = {(int(a), int(b)): ids for (a, b), ids in zip(keys, spoken, strict=True)}
    return make_collector(tokenizer, sampler, rollout), random_params(config), asked


def test_evaluation_runs_the_training_engine(tiny_tokenizer):
    """Evaluation by another path than training's measures another policy; order and counts must survive slots."""
    a_search = "<think> x </think><search> Ada ## Alan </search>"
    an_answer = "<think> y </think><answer> Ada Lovelace </answer>"
    texts = [("parallel", (a_search, an_answer)), ("sequential", (an_answer,)), ("parallel", (an_answer,))]
    collector, params, asked = scripted(tiny_tokenizer, texts, rollout_section(slots=2, context_tokens=256))
    seen = []
    found = evaluate(
        collector, params, asked, seed=3, step=5, temperature=1.0, progress=lambda done, of: seen.append((done, of))
    )
    assert [t.question.id for t in found] == ["0", "1", "2"] and seen[-1] == (3, 3)
    kinds = by_kind(found)
    assert kinds["parallel"] | {"turns": 0} == {
        "em": 1.0,
        "f1": 1.0,
        "decomposition_ratio": 0.5,
        "searches": 0.5,
        "sub_queries": 1.0,
        "turns": 0,
        "valid_format": 1.0,
        "questions": 2,
    }
    assert kinds["parallel"]["turns"] == 1.5 and kinds["sequential"]["turns"] == 1
    row = trajectory_row(found[0], None, 5)
    assert len(row["ids"]) == len(row["mask"]) == len(row["logprobs"]) > 0
    assert sum(row["mask"]) == sum(turn["n_sampled"] for turn in row["turns"])
    assert [p["title"] for p in row["turns"][0]["passages"][1]][0] == "Alan Turing"


# ---- benchmarks ----


def test_closed_world_benchmarks_are_fixed_and_held_out():
    """A benchmark that changes from call to call, or asks about entities seen in training."""
    world = ClosedWorld.make(0, people=60, films=60, cities=30)
    held_out = world.held_out_names
    for kind in KINDS:
        asked = closed_world_benchmark(world, kind, 10)
        assert asked == closed_world_benchmark(world, kind, 10) and len(asked) == 10
        assert {q.kind for q in asked} == {kind}
        assert all(any(name in q.text for name in held_out) for q in asked)
    asked = closed_world_benchmark(world, "parallel4", 5)
    assert all(q.kind == "parallel" and len(q.metadata["names"]) == 4 for q in asked)
    assert closed_world_sets("closed_world") == KINDS
    assert closed_world_sets("closed_world:parallel4") == ("parallel4",)
    assert closed_world_sets("closed_world:mixed") == ("mixed",)
    assert closed_world_sets("nq:file.jsonl") is None
    with pytest.raises(UserError, match="set 'double' found, accepted: parallel"):
        closed_world_sets("closed_world:double")


def test_benchmark_from_a_file(shared_data):
    """A colon in the path cut off, or a benchmark that is not named after what the user called it."""
    file = shared_data / "hotpotqa100" / "questions.jsonl"
    name, asked = load_benchmark(f"hotpotqa:{file}")
    assert name == "hotpotqa" and len(asked) == 100 and asked[0].source == "hotpotqa"
    assert len(load_benchmark(f"hotpotqa:{file}", count=7)[1]) == 7


@pytest.mark.parametrize("argument", ["nq", "nq:", ":file.jsonl", ""])
def test_benchmark_of_another_form(argument):
    """A forgotten name would evaluate nothing, or a file called by its path."""
    with pytest.raises(UserError, match="accepted: NAME:FILE"):
        load_benchmark(argument)


def test_published_figures():
    """A transposed column would put another set's result beside ours: the paper's own averages must come out."""
    averages = {}
    for (_, kind), rows in PUBLISHED.items():
        for row in rows if kind is None else ():
            averages.setdefault((row.method, row.model), []).append(row.em)
    instruct, base = "Qwen2.5-7B-Instruct", "Qwen2.5-7B"
    wanted = {
        ("R1 (no search)", instruct): 0.271,
        ("Search-R1", instruct): 0.370,
        ("ZeroSearch", instruct): 0.391,
        ("ParallelSearch", instruct): 0.425,
        ("R1 (no search)", base): 0.276,
        ("Search-R1", base): 0.434,
        ("ParallelSearch", base): 0.458,
    }
    assert {key: len(value) for key, value in averages.items()} == dict.fromkeys(wanted, 7)
    for key, average in wanted.items():
        assert np.mean(averages[key]) == pytest.approx(average, abs=0.0011), key
    assert published("HotpotQA", "parallel")[1].decomposition_ratio == 0.943
    assert published("2Wiki") == published("2wikimultihopqa") != ()
    assert published("hotpotqa100") == (), "a sample of a set is not the set"


def test_results_table():
    """A table whose rows do not fit its head, or that sets the whole set's figure beside one kind of it."""
    mixed = [trajectory(answer("Ada Lovelace"), id=i, kind=kind) for i, kind in enumerate(("parallel", "sequential"))]
    table = results_table({"HotpotQA": figures(mixed), "mine": figures([DIRECT])})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {len(row) for row in rows} == {11}
    ours = [row[:2] for row in rows if row[2] == "this policy"]
    assert ours == [["HotpotQA", "all"], ["HotpotQA", "parallel"], ["HotpotQA", "sequential"], ["mine", "single"]]
    theirs = [row for row in rows if "published" in row[2]]
    assert len([r for r in theirs if r[1] == "all"]) == 7 and len([r for r in theirs if r[1] == "parallel"]) == 4
    only_parallel = results_table({"HotpotQA": figures(mixed[:1])})
    assert "| all |" not in only_parallel and "0.656" in only_parallel and "0.429" not in only_parallel


# ---- the program ----


def run_eval(*arguments):
    command = [sys.executable, str(ROOT / "launch" / "eval.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


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
    """A run directory with one checkpoint of random weights, what launch/eval.py makes of it, and the same weights
    in HF format. Returns (directory, finished process, arguments)."""
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
    """A program that leaves out questions or samples, or whose files disagree with each other."""
    directory, done, _ = evaluated
    assert done.returncode == 0, done.stderr
    out = directory / "a"
    assert sorted(p.name for p in out.iterdir()) == ["nq.jsonl", "results.json", "results.md"]
    results = json.loads((out / "results.json").read_text())
    rows = [json.loads(line) for line in (out / "nq.jsonl").read_text().splitlines()]
    assert results["benchmarks"]["nq"]["all"]["questions"] == 3
    assert [(r["question_id"], r["sample"]) for r in rows] == [(f"q{i}", s) for i in range(3) for s in range(2)]
    assert all(sum(turn["n_sampled"] for turn in row["turns"]) == sum(row["mask"]) > 0 for row in rows)
    assert all(len(row["turns"]) <= 2 and len(row["ids"]) <= 160 for row in rows), "the run's own budgets"
    assert done.stdout.strip() in (out / "results.md").read_text()


@pytest.mark.slow
def test_program_evaluates_an_export_alike(evaluated, tmp_path, files):
    """Other weights, prompts or keys for a checkpoint than for its HF export."""
    directory, _, common = evaluated
    config = tmp_path / "config.py"
    values = small_run_config(files[1])
    config.write_text(
        f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({values!r})\n"
    )
    done = run_eval(f"--model={directory / 'hf'}", f"--out={tmp_path / 'b'}", f"--config={config}", *common)
    assert done.returncode == 0, done.stderr
    assert (directory / "a" / "nq.jsonl").read_bytes() == (tmp_path / "b" / "nq.jsonl").read_bytes()


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
    """Bad input that ends in a traceback, with exit code 1, or after minutes of work."""
    arguments = [a.format(questions=files[0]) for a in arguments]
    done = run_eval(*arguments, f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "out").exists()

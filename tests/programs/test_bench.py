"""Runs the benchmarks, at sizes too small to measure speed."""

import json
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from programs import ROOT, Program, completed, wait_until

from benchmarks.quality import methods, stale_cache, transplant
from benchmarks.speed import latency, staleness, users
from psearch_jax.types import Question, UserError

PROGRAM = ROOT / "launch" / "bench.py"
SUBJECTS = runpy.run_path(str(PROGRAM))["SUBJECTS"]


def bench(*arguments: str) -> subprocess.CompletedProcess:
    done = completed([PROGRAM, *arguments], timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_searches_and_batching(tmp_path):
    """A benchmark would no longer run, or would compare methods at different recall."""
    pytest.importorskip("faiss")
    sizes = ["--rows", "3000", "--queries", "64", "--dimensions", "32", "--batching_rows", "500", "--http_rows", "50"]
    sizes += ["--bm25_rows", "500", "--bm25_queries", "40"]
    done = bench("retrieval", "--parts", "vectors", "bm25", "batching", f"--json={tmp_path / 'out.json'}", *sizes)
    report = json.loads((tmp_path / "out.json").read_text())
    lines = {(line["method"], line["target"]): line for line in report["vectors"]}
    assert lines["faiss Flat", None]["recall"] == 1
    assert lines["scann", None]["recall"] > 0.97  # ties in four decimals go to the lower row
    for method in ("faiss IVF-Flat", "faiss IVF-PQ", "faiss HNSW"):
        for target in (0.95, 0.99):
            assert lines[method, target]["recall"] >= target
    assert report["bm25"][0]["method"] == "this project" and all(
        line["top1_agreement"] > 0.9 for line in report["bm25"]
    )
    assert len(report["batching"]) == 7 and all(line["seconds"] > 0 for line in report["batching"])
    assert "| 3000 | scann |" in done.stdout and "over HTTP" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_encoder(tmp_path):
    """The encoder would be compared with a PyTorch model of other weights or other pooling."""
    pytest.importorskip("torch")
    bench("retrieval", "--parts", "encoder", "--sentences", "24", f"--json={tmp_path / 'out.json'}")
    for line in json.loads((tmp_path / "out.json").read_text())["encoder"]:
        assert line["max_difference"] < 1e-5 and line["ratio"] > 0


def test_corpus(tmp_path):
    """A measurement would leave a gigabyte of files behind."""
    (tmp_path / "work").mkdir()
    flags = ["--rows=2000", f"--folder={tmp_path / 'work'}", f"--json={tmp_path / 'out.json'}"]
    bench("corpus", *flags)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == 2000
    assert not list((tmp_path / "work").iterdir())


def test_recall(shared_data, tmp_path):
    """A broken retriever would still give a table, but find less than it should on real questions."""
    folder = shared_data / "hotpotqa100"
    files = [f"--questions={folder / 'questions.jsonl'}", f"--corpus={folder / 'corpus.jsonl'}"]
    done = bench("recall", *files, f"--json={tmp_path / 'out.json'}")
    retrievers = json.loads((tmp_path / "out.json").read_text())["retrievers"]
    shares = {name: figures["supporting titles in the top 3"] for name, figures in retrievers.items()}
    assert shares["hashing"] > 0.6 and shares["BM25"] > 0.65 and shares["hashing + BM25"] > 0.65
    assert all(figures["passages found by title and first eight words"] >= 0.95 for figures in retrievers.values())
    assert "| hashing + BM25 |" in done.stdout


def test_merging(tmp_path, wordy_policy):
    """Facts would count as shown though the budget cut them, or a passage shown once would count as missing."""
    rows = [
        {"id": "a", "title": "Ada Lovelace", "text": "She wrote notes. " * 30 + "Born in London."},
        {"id": "b", "title": "Alan Turing", "text": "Alan Turing, born in Maida Vale, read Ada Lovelace."},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evidences = [["Ada Lovelace", "birthplace", "London"], ["Alan Turing", "birthplace", "Maida Vale"]]
    asked = {"id": "1", "question": "Were Ada Lovelace and Alan Turing born in the same city?"}
    asked |= {"golden_answers": ["yes"], "metadata": {"type": "comparison", "evidences": evidences}}
    (tmp_path / "asked.jsonl").write_text(json.dumps(asked) + "\n")
    build = [f"--corpus={tmp_path / 'corpus.jsonl'}", "--encoder=bm25", f"--out={tmp_path / 'index'}"]
    assert completed([PROGRAM.parent / "build_index.py", *build]).returncode == 0
    files = [f"--questions={tmp_path / 'asked.jsonl'}", f"--index={tmp_path / 'index'}", f"--tokenizer={wordy_policy}"]
    done = bench("merging", *files, "--topk=2", f"--json={tmp_path / 'out.json'}")
    lines = json.loads((tmp_path / "out.json").read_text())["merging"]
    by_search = {(line["search"], line["deduplicate"]): line for line in lines if line["kind"] == "all"}
    assert [line["facts"] for line in lines] == [2] * 10, "all questions, and those of the kind parallel"
    for line in by_search.values():
        assert line["facts_shown"][-1] == 1, "without a budget every passage is there, as text or as a reference"
        assert line["facts_shown"] == sorted(line["facts_shown"]) and line["facts_shown"][0] < 1
    for search in ("sub-queries", "both"):
        assert by_search[search, True]["tokens"] < by_search[search, False]["tokens"]
    assert "| all | 2 | both | yes |" in done.stdout


def test_drafts(tmp_path):
    """Rollouts would be compared that sampled something else, or with a policy that drafts nothing."""
    flags = ["--count=8", "--slots=4", "--drafts", "3", "--repeats=2", f"--json={tmp_path / 'out.json'}"]
    done = bench("drafts", *flags)
    plain, drafted = json.loads((tmp_path / "out.json").read_text())["drafts"]
    assert plain["equal"] == drafted["equal"] == drafted["trajectories"] == 8
    assert drafted["first_differences"] == [] and drafted["logprob_rounding"] < 1e-3
    assert plain["sampled"] == drafted["sampled"] == plain["row_steps"] and plain["accepted"] is None
    assert drafted["tokens_per_step"] > 1.2 and 0.1 < drafted["accepted"] <= 1 and len(drafted["speed"]) == 2
    assert drafted["decode_steps"] < plain["decode_steps"] and "| 4 | 3 | 8 of 8 |" in done.stdout


def test_staleness(tmp_path):
    """A gain where sampling takes no time, or a mesh of its own that makes the slower half faster."""
    (tmp_path / "run" / "trajectories").mkdir(parents=True)
    rows = [
        {"status": "answered", "ids": [0] * 9, "turns": [{"n_sampled": 4}, {"n_sampled": n}]} for n in (3, 5, 90, 4)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "run" / "trajectories" / "000000.jsonl").write_text(text)
    flags = [f"--rollouts={tmp_path / 'run'}", "--preset=1.5b", "--config=configs/qwen1p5b.py", "--machines", "h100:8"]
    done = bench("staleness", *flags, "--staleness", "0", "1", f"--json={tmp_path / 'out.json'}")
    alone, ahead, split = json.loads((tmp_path / "out.json").read_text())["staleness"]
    assert ahead["decode steps"] < alone["decode steps"] and ahead["row use"] > alone["row use"]
    assert (
        alone["learning s"] == ahead["learning s"] < split["learning s"] and split["sampling s"] > ahead["sampling s"]
    )
    assert alone["step s"] == alone["sampling s"] + alone["learning s"]
    assert split["step s"] == max(split["sampling s"], split["learning s"]) and "| gain |" in done.stdout
    (tmp_path / "run" / "trajectories" / "000000.jsonl").unlink()
    with pytest.raises(UserError, match="has no recorded rollouts"):
        staleness.recorded_lengths(tmp_path / "run", 100)


def test_thoughts_are_given_to_other_questions():
    """A question that gets its own thought as a foreign one would look as if the policy decided by the question."""
    asked = [
        Question("pairs", f"{kind}{i}", "?", ("a",), kind) for kind in ("parallel", "sequential") for i in range(4)
    ]
    for origin, same_kind in (("same type", True), ("other type", False)):
        donors = transplant.donors_of(asked, origin)
        assert all((donors[q.id].kind == q.kind) == same_kind and donors[q.id] != q for q in asked)
        assert len({donor.id for donor in donors.values()}) >= 4
    assert all(donor.id == asker for asker, donor in transplant.donors_of(asked, "own").items())


@pytest.mark.slow
def test_transplant(tmp_path):
    """A thought that is cut or tokenised differently when it is written into the prompt: with its own thought, a
    question must be answered as without."""
    done = bench("transplant", "--count=24", f"--json={tmp_path / 'out.json'}")
    lines = {line["thought"]: line for line in json.loads((tmp_path / "out.json").read_text())["transplant"]}
    figures = ("questions", "parallel", "sequential", "accuracy")
    assert [lines["own"][name] for name in figures] == [lines["none written"][name] for name in figures]
    assert lines["own"]["questions"] >= 20 and "| toy | other type |" in done.stdout


def test_a_stale_cache_matters_only_between_different_policies():
    """Log-probs of other positions are compared: then a policy would differ from itself."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape = Qwen2Config(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)
    policies = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        policies.append(Qwen2ForCausalLM(shape).eval())
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(64, size=40), rng.random(40) < 0.5
    mask[0] = False
    with torch.no_grad():
        scores = torch.log_softmax(policies[0](torch.tensor(ids[None])).logits[0], -1).numpy()
    recorded = np.concatenate([[0.0], scores[np.arange(39), ids[1:]]])
    stale, policy, other = stale_cache._gaps(policies[0], policies[0], ids, mask, recorded)
    later = mask.sum() - mask.sum() // 2 - 1
    assert len(stale) == len(policy) == later and stale.max() < 1e-5 and policy.max() == 0 and other.max() < 1e-5
    stale, policy, other = stale_cache._gaps(*policies, ids, mask, recorded)
    assert stale.min() > 1e-6 and policy.min() > 1e-6 and other.max() < 1e-5
    with pytest.raises(UserError, match="accepted: two 1 apart"):
        stale_cache.measured(ROOT / "nowhere", [1], 4)


TINY = ("device", "--sizes", "tiny", "--scale=0.05", "--slots=4", "--dtype=float32")


@pytest.mark.slow
def test_the_first_hour_with_a_device(tmp_path):
    """On the day when a GPU is lent, a part of the one command would fail, or repeat what was measured before."""
    out, parts = tmp_path / "device", ["versions", "peaks", "kernels", "rollout-tiny", "update-tiny", "demo"]
    done = bench(*TINY, f"--out={out}", "--parts", *parts)
    results = json.loads((out / "device.json").read_text())["parts"]
    assert list(results) == parts and not any("error" in result for result in results.values()), done.stderr[-3000:]
    assert results["versions"]["platform"] == "cpu" and results["peaks"]["measured"]["bytes_per_s"] > 1e8
    lines = {line["what"]: line for result in results.values() for line in result.get("lines", ())}
    assert {"prefill", "decode steps", "extend", "update", "1 of 1 steps"} < set(lines)
    assert all(line["seconds"] > 0 for line in lines.values() if line["seconds"] is not None)
    assert lines["all rollouts"]["amount"] == 4  # --slots
    assert lines["decode steps"]["lower_bound_s"] > 0 and "| rollout-tiny | prefill |" in done.stdout
    again = bench(*TINY, f"--out={out}", "--parts", *parts)
    assert again.stderr.count("done before") == len(parts) and again.stdout == done.stdout


def test_a_part_that_fails_is_repeated(tmp_path):
    """A part that took too long would count as done, or end the command before the other parts."""
    out, parts = tmp_path / "device", ["--parts", "peaks", "versions"]
    done = bench(*TINY, f"--out={out}", *parts, "--minutes=0.002")
    assert done.stdout.count("FAILED: not done after 0.002 minutes") == 2
    done = bench(*TINY, f"--out={out}", *parts)
    assert "FAILED" not in done.stdout and "done before" not in done.stderr
    assert json.loads((out / "device.json").read_text())["parts"]["versions"]["devices"] == 1
    wrong = completed([PROGRAM, *TINY, f"--out={out}", "--parts", "all"])
    assert wrong.returncode == 2 and "accepted: versions, peaks, kernels, rollout-tiny" in wrong.stderr


def test_ctrl_c_ends_the_part_that_runs(tmp_path):
    """The part keeps running without its parent: the next call finds the accelerator in use."""
    out = tmp_path / "device"
    program = Program([PROGRAM, *TINY, f"--out={out}", "--parts", "rollout-tiny"])

    def of_the_part() -> list[str]:
        lines = (_command(place) for place in Path("/proc").glob("[0-9]*"))
        return [line for line in lines if str(out) in line and "--run=rollout-tiny" in line]

    wait_until(lambda: bool(of_the_part()), 60)
    program.send_signal(signal.SIGINT)
    program.communicate(60)
    assert program.returncode != 0 and of_the_part() == []


def _command(place: Path) -> str:
    try:
        return (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has just ended
        return ""


def test_help_lists_every_benchmark():
    """`--help` would be taken for a benchmark's name, or would not list every benchmark."""
    help_text = bench("--help").stdout
    assert all(f"launch/bench.py {subject} --" in help_text for subject in SUBJECTS) and "SUBJECT --help" in help_text


def test_other_subjects_are_refused():
    """A misspelt subject would end in a traceback."""
    done = completed([PROGRAM, "retreival"], timeout=60)
    assert done.returncode == 2 and f"accepted: {', '.join(SUBJECTS)}" in done.stderr


def test_questions(tmp_path):
    """The figures of docs/performance.md could not be measured again."""
    bench("questions", "--rows", "2000", f"--json={tmp_path / 'out.json'}")
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["rows"] == 2000 and all(figures[key]["peak_mb"] > 10 for key in list(figures)[1:])


def test_rollouts(tmp_path, monkeypatch, capsys):
    """Contenders would do different work or sample from other weights, row use would count rows that nobody ran, or
    time spent waiting for passages would be missed."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(PROGRAM.parents[1])
    from benchmarks.speed import rollout
    from benchmarks.speed.scripted import ragged

    out, work = tmp_path / "out.json", ragged(0.05)
    rollout.main(["--sizes=tiny", "--works=ragged", "--scale=0.05", "--repeats=2", "--search_s=0.05", f"--json={out}"])
    lines = {line["contender"]: line for line in json.loads(out.read_text())["rollout"]}
    assert list(lines) == ["this project", "torch", "torch, re-prefilling"]
    for line in lines.values():
        speed = line["rollouts_per_s"]
        assert len(line["seconds"]) == 2 and 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert line["max_difference"] < 1e-4
    ours = lines["this project"]
    assert ours["relative_speed"] == 1 and 0 < ours["row_use"] <= 1 and 0 < ours["extend_use"] <= 1
    assert ours["decode_steps"] * work.slots * ours["row_use"] == pytest.approx(work.sampled, rel=2e-3)
    assert ours["decode_steps"] >= work.sampled / work.slots and ours["extend_calls"] >= 3
    assert 0.1 / max(ours["seconds"]) < ours["search_share"] < 1 and ours["host_share"] > 0
    table = capsys.readouterr().out
    assert "| tiny | ragged | torch, re-prefilling |" in table and "left out" not in table


def test_rollouts_of_a_model_in_16_bits(tiny_policy, tmp_path, monkeypatch):
    """Figures of random weights, or of float32, would be reported for a model in bfloat16."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(PROGRAM.parents[1])
    from benchmarks.speed import rollout

    out = tmp_path / "out.json"
    flags = [f"--model={tiny_policy}", "--dtype=bfloat16", "--slots=8", "--works=equal", "--scale=0.05", "--repeats=1"]
    rollout.main([*flags, "--peers", "torch", f"--json={out}"])
    ours, theirs = json.loads(out.read_text())["rollout"]
    assert ours["size"] == theirs["size"] == tiny_policy.name
    for line in (ours, theirs):
        assert line["max_difference"] < 0.5 and line["products_gflops"] > 0
        assert line["rollouts_per_s"]["median"] == pytest.approx(8 / line["seconds"][0], rel=0.1)
    assert ours["max_difference"] > 1e-5, "computed in 16 bits; PyTorch's steps may equal its full pass exactly"
    with pytest.raises(SystemExit):
        rollout.main([*flags, "--slots=12"])


def test_methods(tmp_path, monkeypatch, capsys):
    """A method would get another's name or another benchmark's figures, or flags could change what a method is."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    chosen = ["--methods", "closed book", "parallel", f"--out={tmp_path}"]
    flags = ["--config=configs/smoke.py", "--benchmark=closed_world:parallel", "--benchmark=closed_world:sequential"]
    flags += ["--config.rollout.num_buckets=1", "--config.rollout.slots=16"]  # compiled sooner
    methods.main(["--policy", "toy", "toy", *chosen, *flags, "--count=8"])
    lines = json.loads((tmp_path / "methods.json").read_text())["methods"]
    assert [(line["method"], line["benchmark"]) for line in lines] == [
        (method, f"closed_world:{kind}")
        for method in ("closed book", "parallel")
        for kind in ("parallel", "sequential")
    ]
    for line in lines:
        out = tmp_path / "toy" / line["method"].replace(" ", "_")
        results = json.loads((out / "results.json").read_text())
        assert results["settings"]["method"] == {"closed book": "r1", "parallel": "parallel_prompt"}[line["method"]]
        assert line["em"] == results["benchmarks"][line["benchmark"]]["all"]["em"] and line["questions"] == 8
        assert (line["searches"] > 0) == (line["method"] == "parallel")
    assert "| toy | closed book | closed_world:parallel | 8 |" in capsys.readouterr().out
    for wrong in (["--policy", "toy", *chosen], ["--policy", "toy", "toy", *chosen, "--config.method=r1"]):
        with pytest.raises(SystemExit):
            methods.main(wrong)
    with pytest.raises(UserError, match="eval.py .*--benchmark=nothing.* ended with 2"):
        methods.main(["--policy", "toy", "toy", *chosen, "--benchmark=nothing"])


def test_growth(tmp_path, monkeypatch, capsys):
    """`relative_to_linear` would refer to the previous line or to another kind, or the chart would lack its lines."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(PROGRAM.parents[1])
    from benchmarks.speed import growth, rollout

    monkeypatch.setattr(growth, "GROWTH", {"rows": (8, 16), "turns": (1, 2)})
    flags = ["--sizes=tiny", "--scale=0.05", "--repeats=1", f"--json={tmp_path / 'out.json'}"]
    rollout.main([*flags, f"--figure={tmp_path / 'out.svg'}"])
    with pytest.raises(UserError, match="--figure=.*out.xyz: "):
        growth.plot(json.loads((tmp_path / "out.json").read_text())["rollout"], str(tmp_path / "out.xyz"))
    assert (tmp_path / "out.svg").read_text().count('id="axes_') == 2
    lines = json.loads((tmp_path / "out.json").read_text())["rollout"]
    assert [(line["grows"], line["value"]) for line in lines] == [
        ("rows", 8),
        ("rows", 16),
        ("turns", 1),
        ("turns", 2),
    ]
    for first, second in (lines[:2], lines[2:]):
        share = second["seconds"] / first["seconds"] * first["value"] / second["value"]
        rounded = 0.01 + share * sum(0.0005 / line["seconds"] for line in (first, second))  # to milliseconds
        assert first["relative_to_linear"] == 1 and second["relative_to_linear"] == pytest.approx(share, abs=rounded)
    assert "| tiny | turns | 2 |" in capsys.readouterr().out


def test_updates(tmp_path, monkeypatch, capsys):
    """A peer would compute another step, real tokens would be miscounted, or a missing peer be left out silently."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(PROGRAM.parents[1])
    from benchmarks.speed import update

    rows = [[0] * 4 + [1] * n for n in (3, 9, 20)]
    (tmp_path / "000000.jsonl").write_text("".join(json.dumps({"mask": row}) + "\n" for row in rows))
    monkeypatch.setattr(update, "missing", lambda *names: ", ".join({"trl"} & set(names)))
    flags = [
        f"--lengths={tmp_path / '000000.jsonl'}",
        f"--json={tmp_path / 'out.json'}",
        "--peers",
        "padded",
        "torch",
        "trl",
    ]
    update.main(["--sizes=tiny", "--works=ragged", "--repeats=2", *flags])
    report = json.loads((tmp_path / "out.json").read_text())
    ours, padded, torch = report["update"]
    assert [line["contender"] for line in (ours, padded, torch)] == ["this project", "padded", "torch"]
    for peer in (padded, torch):
        assert peer["loss"] == pytest.approx(ours["loss"], abs=1e-5) and ours["loss"] != 0
        assert peer["gradient_norm"] == pytest.approx(ours["gradient_norm"], rel=1e-3)
    assert torch["tokens_per_s"]["max"] == pytest.approx(sum(map(len, rows)) / min(torch["seconds"]), rel=0.2)
    assert "trl: left out, trl is not installed" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("dtype", "work"), [("float32", "ragged"), ("bfloat16", "equal")])
def test_updates_of_adapters(dtype, work, tiny_policy, tmp_path, monkeypatch):
    """A peer would lack the adapters, have them on other weights, or train everything."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(PROGRAM.parents[1])
    from benchmarks.speed import update

    out = tmp_path / "out.json"
    flags = [f"--model={tiny_policy}", f"--dtype={dtype}", "--rows=2", "--scale=0.1", "--repeats=1"]
    update.main([*flags, "--works", work, "--peers", "torch", f"--json={out}"])
    lines = json.loads(out.read_text())["update"]
    assert [(line["work"], line["contender"]) for line in lines] == [(work, "this project"), (work, "torch")]
    ours, theirs = lines
    assert theirs["gradient_norm"] == pytest.approx(ours["gradient_norm"], rel=1e-3 if dtype == "float32" else 5e-2)
    assert ours["size"] == tiny_policy.name and ours["products_gflops"] > 0
    with pytest.raises(SystemExit):
        update.main(["--dtype=bfloat16"])


def test_steps(tmp_path, monkeypatch, capsys):
    """A contender would train on other tokens than it sampled, or its compilation would be timed."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(PROGRAM.parents[1])
    from benchmarks.speed import step

    out = tmp_path / "out.json"
    flags = ["--sizes=tiny", "--works=ragged", "--scale=0.05", "--repeats=2", "--peers", "torch", f"--json={out}"]
    step.main(flags)
    ours, torch = json.loads(out.read_text())["step"]
    assert (ours["contender"], torch["contender"]) == ("this project", "torch")
    assert ours["loss"] == pytest.approx(torch["loss"], abs=1e-3) and ours["loss"] != 0
    for line in (ours, torch):
        parts = sum(line[f"{phase}_s"] for phase in step.PHASES)
        assert 0 < parts < 1.5 * max(line["seconds"])
    assert "| tiny | ragged | torch |" in capsys.readouterr().out


def test_a_file_without_lengths_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    """Bad input would end in a traceback."""
    monkeypatch.setattr(sys, "argv", ["bench.py", "update", "--works=ragged", f"--lengths={tmp_path / 'none.jsonl'}"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(str(PROGRAM))["main"]() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "none.jsonl" in error and "accepted: a file of WORKDIR/trajectories" in error


def test_a_corpus_that_is_missing_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    """An error of the retrieval package would end in a traceback, because its class is not the package's own."""
    questions_file = tmp_path / "asked.jsonl"
    questions_file.write_text(json.dumps({"id": "1", "question": "Who?", "golden_answers": ["Ada"]}) + "\n")
    arguments = ["recall", f"--questions={questions_file}", f"--corpus={tmp_path / 'none.jsonl'}"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(str(PROGRAM))["main"]() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "none.jsonl" in error


@dataclass
class Asking:
    """A stand-in for a collector: only its retriever calls take time."""

    at_once: bool
    retriever: object = None

    def with_retriever(self, retriever):
        return replace(self, retriever=retriever)


def test_only_what_can_be_split_counts_as_saved(monkeypatch):
    """One-fact questions in the average would hide what splitting saves; miscounted facts would fake a saving."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(latency, "time", clock)

    def answered(asking, params, group, **_):
        needed = [len(q.metadata["rounds"][0]) for q in group]
        for facts in needed:
            for _ in range(1 if asking.at_once else facts):
                asking.retriever.search([], 1)
        return [SimpleNamespace(turns=1 + (1 if asking.at_once else facts), em=1.0) for facts in needed]

    monkeypatch.setattr(latency, "evaluate", answered)
    monkeypatch.setattr(latency, "score", lambda rolled: rolled)
    silent = SimpleNamespace(search=lambda queries, k: [])
    engines = {"one by one": (Asking(False, silent), None), "parallel": (Asking(True, silent), None)}
    groups = [[SimpleNamespace(metadata={"rounds": [[0] * facts]})] for facts in (1, 1, 2, 3, 4, 4)]
    line = latency._measured(engines, groups, "in process", "", 1000, 1)
    assert line["one by one"] == {"seconds": 3.5, "turns": 4.25, "calls": 3.25, "em": 1.0}
    assert line["parallel"] == {"seconds": 1.0, "turns": 2.0, "calls": 1.0, "em": 1.0}
    assert line["faster"][0] == 3.25
    assert line["faster_by_facts"] == {n: [n, n, n] for n in (1, 2, 3, 4)}
    assert "| in process | 1000 | 1.00 (1.00-1.00) | 2.00 (2.00-2.00) |" in latency.by_facts([line])


@pytest.mark.slow
def test_latency(tmp_path):
    """The delay would be added to no call or to one policy's only, or an uncounted call would look like a saving."""
    flags = [
        "--parallel=toy",
        "--count=1",
        "--batch_questions=2",
        "--delays",
        "0",
        "300",
        f"--json={tmp_path / 'out.json'}",
    ]
    done = bench("latency", *flags)
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    assert [(line["place"], line["added_ms"], line["batch"]) for line in lines] == [
        (place, delay, batch) for batch in (1, 2) for place in ("in process", "HTTP") for delay in (0, 300)
    ]
    for line in lines:
        for name in ("one by one", "parallel"):  # the same policy twice: the same calls, and each of them waits
            assert line[name]["calls"] == lines[0][name]["calls"] or line["batch"] > 1
            assert line[name]["seconds"] >= line["added_ms"] / 1000
            assert line[name]["turns"] > 1
        if line["batch"] == 1:
            assert (
                line["one by one"]["calls"]
                == line["parallel"]["calls"]
                == pytest.approx(line["parallel"]["turns"] - 1)
            )
            assert list(line["faster_by_facts"]) == ["1", "2", "3", "4"]
    assert "| in process | 300 | 1 |" in done.stdout


@pytest.mark.slow
def test_users(tmp_path, monkeypatch):
    """Answers that differ from those of single requests would count as equal, or a user would never send a request."""
    done = bench("users", "--users=6", "--slots=3", "--seconds=2", "--count=3", f"--json={tmp_path / 'out.json'}")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["outcomes"] == {"identical": sum(report["by_user"]), "different": 0, "failed": 0}
    assert min(report["by_user"]) > 0 and len(report["seconds"]) == sum(report["by_user"])
    assert f"| identical to the single request | {sum(report['by_user'])} |" in done.stdout
    monkeypatch.setattr(users, "response", lambda pool, url, requests, stream: ("alone",) if url else None)
    requests = [{"seed": 0}]
    assert users.answer_concurrently(None, "there", requests, [("alone",)], 2, 0.1)["outcomes"]["different"] == 0
    report = users.answer_concurrently(None, "there", requests, [("something else",)], 2, 0.1)
    assert (
        report["outcomes"]["different"] > 0 == report["outcomes"]["identical"] and "something else" in report["first"]
    )

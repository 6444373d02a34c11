"""launch/doctor.py reports every item that a run needs and lacks before it starts, with a fix for each."""

import json
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from programs import completed
from runs import start

from configs import qwen7b, smoke
from psearch_jax.config import from_mapping
from psearch_jax.planning import doctor
from psearch_jax.planning.doctor import examine
from psearch_jax.runtime.accelerators import GIB
from psearch_jax.runtime.paths import TOY_POLICY
from psearch_jax.train.checkpointing import settings
from psearch_jax.types import UserError


def config(**sections):
    values = smoke.get_config().to_dict()
    for name, fields in sections.items():
        values[name] |= fields
    return from_mapping(values)


def findings(config, workdir, **more) -> dict[str, list[doctor.Finding]]:
    by_name: dict[str, list[doctor.Finding]] = {}
    for finding in examine(config, str(workdir), **more):
        by_name.setdefault(finding.name, []).append(finding)
    return by_name


def wrong(by_name) -> str:
    return "\n".join(str(f) for findings in by_name.values() for f in findings if f.wrong)


def test_the_demo_needs_nothing(tmp_path):
    """A fix is requested on a machine where the demo runs, or a check is left out."""
    by_name = findings(config(), tmp_path)
    assert not wrong(by_name)
    checks = "packages devices config model mesh memory questions prompt passages disk cache workdir"
    assert set(by_name) == set(checks.split())
    assert "starts a new run" in by_name["workdir"][0].text


def test_the_packaged_tokenizer_has_a_name(tmp_path):
    """Without a connection to the hub, no file of one's own can be checked before weights are there."""
    by_name = findings(config(model={"path": "", "preset": "toy", "tokenizer": "toy"}), tmp_path)
    assert not wrong(by_name)


def test_every_lack_has_its_line_and_its_mending(tmp_path):
    """A TPU run that lacks three files reports only one of them at each start."""
    text = wrong(findings(from_mapping(qwen7b.get_config().to_dict()), tmp_path))
    for name in ("config.model.path", "config.data.source", "config.retrieval.index"):
        assert sum(line.startswith(f"FIX   config     {name}") for line in text.splitlines()) == 1, text
    assert text.count("config.mesh:") == 1 and "--config.mesh.tensor=1" in text
    assert (
        "hf download" in text
        and "build_index.py" in text
        and all(line.startswith("FIX") for line in text.splitlines())
    )


def test_half_a_model_and_a_foreign_tokenizer_are_seen(tmp_path):
    """An incomplete download is noticed only when the weights load, on every host of a pod."""
    model = tmp_path / "model"
    shutil.copytree(TOY_POLICY, model)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    assert "1 of 2 files of weights" in wrong(findings(config(model={"path": str(model)}), tmp_path))
    (model / "model-00001-of-00002.safetensors").rename(model / "model.safetensors")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"vocab_size": 512}))
    assert "ids for 512 embedding rows" in wrong(findings(config(model={"path": str(model)}), tmp_path))


def test_passages_that_do_not_answer_are_seen_at_once(tmp_path):
    """A run waits for a server that is down, or notices a truncated index only after loading the weights."""
    gone = {"url": "http://127.0.0.1:9/retrieve", "timeout_s": 1.0}
    assert "127.0.0.1:9" in wrong(findings(config(data={"source": ""}, retrieval=gone), tmp_path))
    (tmp_path / "index").mkdir()
    text = wrong(findings(config(retrieval={"index": str(tmp_path / "index")}), tmp_path))
    assert "passages" in text and "index" in text


def test_questions_that_the_reward_or_the_tokenizer_does_not_suit(tmp_path):
    """A label in the wrong place, with which splitting is never rewarded, or a tokenizer of single bytes, and all is
    reported as well."""
    file = tmp_path / "asked.jsonl"

    def text(metadata, name):
        rows = [
            {
                "id": str(i),
                "question": "Which painter finished earlier?",
                "golden_answers": ["I"],
                "metadata": metadata,
            }
            for i in range(48)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return " ".join(f.text for f in findings(config(data={"source": str(file)}), tmp_path)[name])

    assert "(48 single; " in text({"kind": "parallel"}, "questions")
    assert "needs questions with metadata.type parallel" in text({"kind": "parallel"}, "questions")
    labelled = text({"type": "parallel"}, "questions")
    assert "(48 parallel)" in labelled and "needs questions" not in labelled
    assert re.search(r"(0\.[7-9]|1\.0) tokens per byte", text({"type": "parallel"}, "prompt"))
    critical = config(data={"source": str(file)}, reward={"parallelism": "critical_path"})
    text({"kind": "parallel"}, "questions")
    assert "needs questions" not in findings(critical, tmp_path)["questions"][0].text
    twice = wrong(findings(config(data={"source": str(tmp_path / "none.jsonl")}), tmp_path))
    assert len(set(twice.splitlines())) == len(twice.splitlines())
    file.write_text("{")
    text = wrong(findings(config(data={"source": str(file)}), tmp_path))
    assert text.count("not JSON") == 1, "one fault is one line"


def test_too_few_questions_too_little_memory_and_disk(tmp_path, monkeypatch):
    """Each of these ends a run hours after its start, or in its first step without an explanation."""
    few = tmp_path / "few.jsonl"
    few.write_text(
        "".join(json.dumps({"id": str(i), "question": "Who?", "golden_answers": ["I"]}) + "\n" for i in range(3))
    )
    run_config = config(data={"source": str(few)}, retrieval={"corpus": str(tmp_path / "none")})
    text = wrong(findings(run_config, tmp_path))
    assert "found 3 questions for steps of 24" in text
    smaller = re.search(r"--config.train.prompts=(\d+) --config.learning.mini_batch_rollouts=(\d+)", text)
    assert smaller is None, "no step of at most 3 questions fills a micro-batch of 48 rows with groups of 8"
    small = replace(run_config, learning=replace(run_config.learning, micro_batch_rows=8))
    assert "--config.train.prompts=3 --config.learning.mini_batch_rollouts=24" in wrong(findings(small, tmp_path))
    few.write_text(
        "".join(json.dumps({"id": str(i), "question": "Who?", "golden_answers": ["I"]}) + "\n" for i in range(26))
    )
    run_config = config(
        data={"source": str(few), "validation_share": 0.3}, retrieval={"corpus": str(tmp_path / "none")}
    )
    assert re.search("found (1|2)[0-9] questions for steps of 24", wrong(findings(run_config, tmp_path))), (
        "held-out questions are not counted"
    )
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    text = wrong(findings(config(), tmp_path / "not" / "yet"))
    assert "of 0.00 GiB on each device" in text and "GiB for 4 more checkpoints" in text
    disk = findings(config(train={"keep_every_steps": 10}), tmp_path)["disk"][0].text
    assert "for 10 more checkpoints" in disk
    # The best checkpoint has the parameters only, twice while one replaces the other.
    disk = findings(config(eval={"every_steps": 5}), tmp_path)["disk"][0].text
    four, best = map(
        float, re.findall(r"([0-9.]+) GiB for 4 more checkpoints and ([0-9.]+) for the best one", disk)[0]
    )
    assert best == pytest.approx(four / 4 / 3 * 2, abs=0.006), "rounded to 0.01 GiB"


def test_one_search_for_the_question_needs_a_retriever_too(tmp_path):
    """A run that only searches for the question itself would start without passages."""
    fields = {"search_turns": 0, "initial_search": True}
    dead = config(retrieval={"url": "http://127.0.0.1:9/retrieve"}, rollout=fields, data={"source": "closed_world"})
    assert "127.0.0.1:9" in wrong(findings(dead, tmp_path))
    without = config(rollout={"search_turns": 0}, data={"source": "closed_world"})
    assert findings(without, tmp_path)["passages"][0].text == "none: the run does not search"


def test_a_prompt_that_cannot_be_used(tmp_path):
    """A template without the question's place is found only by the run, and prompts that are too long never."""
    asked, template = tmp_path / "asked.jsonl", tmp_path / "prompt.txt"
    rows = [{"id": str(i), "question": "Which is the rival of Nujider?", "golden_answers": ["I"]} for i in range(48)]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def examined(text):
        template.write_text(text)
        given = config(data={"source": str(asked), "template": str(template)})
        (prompt,) = findings(given, tmp_path)["prompt"]
        return prompt

    assert examined("no place").wrong and "{question} not found" in examined("no place").text
    good = examined("{question}")
    assert not good.wrong and re.search(r"up to \d+ of 64 tokens", good.text)
    long = examined("{question}" + " Which" * 70)
    assert long.wrong and "48 of the first 48 prompts exceed config.rollout.prompt_tokens=64" in long.text


def test_a_checkpoint_holds_one_copy(tmp_path):
    """On a mesh that replicates the state, the required disk space counts every copy."""
    command = [sys.executable, "launch/doctor.py", "--config=configs/smoke.py", f"--workdir={tmp_path}"]
    disk = [
        re.search(r"(\S+ GiB) for 4 more checkpoints", start([*command, *mesh], devices=4).communicate()[0])[1]
        for mesh in (["--config.mesh.data=4", "--config.mesh.fsdp=1"], ["--config.mesh.fsdp=4"])
    ]
    assert disk[0] == disk[1] == "0.04 GiB"


def test_an_accelerator_that_is_not_used_is_seen(tmp_path, monkeypatch):
    """A plain install on a machine with a GPU trains on its CPU, and nobody notices for hours."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if jax.devices()[0].platform != "cpu":
        pytest.skip("this machine's accelerator is used")
    assert "CPU" in doctor.devices(tmp_path).upper()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    text = wrong(findings(config(), tmp_path, root=tmp_path))
    assert "/dev/nvidiactl" in text and "[cuda]" in text
    monkeypatch.setattr(doctor, "cuda_plugins", lambda: ["jax-cuda13-plugin"])
    text = wrong(findings(config(), tmp_path, root=tmp_path))
    assert "jax-cuda13-plugin is installed: check CUDA_VISIBLE_DEVICES" in text and "[cuda]" not in text


def test_what_training_refuses_is_named_before(tmp_path):
    """A run passes every check and is refused after its weights were loaded."""
    rows = [{"id": str(i), "question": f"Who is {i}?", "golden_answers": ["x"]} for i in range(80)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"source": str(file), "validation_share": 0.5}
    for sections, name, words in (
        ({"data": {"world_questions": 10}}, "questions", "found 10 questions for steps of"),
        ({"data": own, "eval": {"best_metric": "mixed/em", "every_steps": 1}}, "questions", "config.eval.best_metric"),
        ({"reward": {"profile": "compat"}}, "prompt", "config.data.template=toy: found 0 times"),
        ({"data": {"source": str(file), "prompt": "row"}}, "prompt", "no prompt found in its row"),
    ):
        problems = [f for f in findings(config(**sections), tmp_path / "run")[name] if f.wrong]
        assert problems and words in problems[0].text, (name, words, problems)


def test_two_builds_for_gpus_are_named(monkeypatch):
    """JAX would load one of them by chance, so that some processes of a run find no GPU."""
    monkeypatch.setattr(doctor, "cuda_plugins", lambda: ["jax-cuda12-plugin", "jax-cuda13-plugin"])
    (finding,) = doctor.guarded("devices", doctor.devices)
    assert finding.wrong and "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt" in finding.text


def test_packages_that_are_missing_or_too_old_are_named(monkeypatch):
    """An outdated environment fails deep inside a run, with an attribute that some library does not have."""
    real = doctor.importlib.metadata.version
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: ["jax>=0.10", "flax>=99", "nothing-such>=1"])
    by_name = list(doctor.guarded("packages", doctor.packages))
    assert by_name[0].wrong and "nothing-such is missing" in by_name[0].text
    assert f"flax {real('flax')} is not >=99" in by_name[0].text and "jax" not in by_name[0].text.split("flax")[0]


def test_a_model_of_unknown_size_is_no_fault(tmp_path):
    """A run that would download its weights and work is reported as one to fix."""
    by_name = findings(config(model={"path": "somebody/Own-Model", "tokenizer": "toy"}), tmp_path)
    assert not by_name["memory"][0].wrong and "not counted" in by_name["memory"][0].text


def test_checkpoints_that_are_there_need_no_more_room(tmp_path, monkeypatch):
    """The doctor demands a larger disk for checkpoints that the resumed run has already written."""
    plan = SimpleNamespace(checkpoint_bytes=10 * GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=15 * GIB))
    with pytest.raises(UserError, match="for 4 more checkpoints"):
        doctor.disk(config(), plan, str(tmp_path))
    for step in (1, 2, 3):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert "for 1 more checkpoints" in doctor.disk(config(), plan, str(tmp_path))


def test_a_run_that_goes_on_is_known_and_the_program_counts(tmp_path):
    """A run that would resume is reported as new, or a script sees exit code 0 although fixes are needed."""
    checkpoint, run = tmp_path / "run" / "checkpoints" / "7" / "loop", str(tmp_path / "run")
    checkpoint.mkdir(parents=True)
    kept = settings.record(config(), {}, unused="sft")
    (checkpoint / "metadata").write_text(json.dumps({"step": 7, "settings": kept}))
    assert "after step 7" in doctor.resumes(config(), run)
    with pytest.raises(UserError, match="rollout.temperature: 1.0, now 0.5; accepted: the original"):
        doctor.resumes(config(rollout={"temperature": 0.5}), run)
    (tmp_path / "file").touch()
    for place in ("file", "file/run"):
        with pytest.raises(UserError, match="file is not a writable directory"):
            doctor.resumes(config(), str(tmp_path / place))
    command = [sys.executable, "launch/doctor.py", "--config=configs/smoke.py", f"--workdir={tmp_path}"]
    done = completed([*command, "--config.retrieval.corpus=nowhere.jsonl"])
    assert done.returncode == 2 and "2 to fix" in done.stderr.splitlines()[-1], done.stdout + done.stderr
    assert sum(line.startswith("FIX") for line in done.stdout.splitlines()) == 2


def test_devices_that_only_sample_hold_no_state(tmp_path, monkeypatch):
    """A run with `mesh.rollout_devices` that would work is reported as one that cannot be planned."""
    alone, plans, here = [], [], jax.devices()
    doctor.memory(config(), alone)
    monkeypatch.setattr(jax, "devices", lambda: here * 2)
    text = doctor.memory(config(mesh={"rollout_devices": 1}), plans)
    assert "GiB on each device" in text and 0 < plans[0].held_bytes < alone[0].held_bytes

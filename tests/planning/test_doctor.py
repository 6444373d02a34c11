"""launch/doctor.py reports every item that a run needs and lacks before it starts, with a fix for each."""

import json
import shutil
import sys
from types import SimpleNamespace

import jax
import pytest
from programs import completed

from configs import qwen7b, smoke
from psearch_jax.config import from_mapping
from psearch_jax.planning import doctor
from psearch_jax.planning.doctor import examine
from psearch_jax.runtime.accelerators import GIB
from psearch_jax.runtime.paths import TOYS
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


def write_questions(file, count, text="Which painter finished earlier?", **fields):
    rows = [{"id": str(i), "question": text, "golden_answers": ["I"], **fields} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": str(file)}


def test_the_demo_needs_nothing(tmp_path):
    by_name = findings(config(), tmp_path)
    assert not wrong(by_name)
    checks = "devices config model mesh memory questions prompt passages disk workdir"
    assert set(by_name) == set(checks.split())
    assert "starts a new run" in by_name["workdir"][0].text


def test_every_missing_input_has_a_line_and_a_fix(tmp_path):
    text = wrong(findings(from_mapping(qwen7b.get_config().to_dict()), tmp_path))
    for name in ("config.model.path", "config.data.source", "config.retrieval.index"):
        assert sum(line.startswith(f"FIX   config     {name}") for line in text.splitlines()) == 1, text
    assert "hf download" in text and "build_index.py" in text and "--config.mesh.tensor=1" in text


def test_an_incomplete_model_is_seen(tmp_path):
    shutil.copytree(TOYS["toy"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "model-00001-of-00002.safetensors")
    assert "1 of 2 files of weights" in wrong(findings(config(model={"path": str(tmp_path / "model")}), tmp_path))


def test_a_retriever_that_does_not_answer_is_seen(tmp_path):
    dead = {"url": "http://127.0.0.1:9/retrieve", "timeout_s": 1.0}
    asked = {"search_turns": 0, "initial_search": True}  # a run that only searches for the question itself
    for rollout in ({}, asked):
        assert "127.0.0.1:9" in wrong(findings(config(retrieval=dead, rollout=rollout), tmp_path))
    none = config(rollout={"search_turns": 0})
    assert findings(none, tmp_path)["passages"][0].text == "none: the run does not search"
    (tmp_path / "index").mkdir()
    text = wrong(findings(config(retrieval={"index": str(tmp_path / "index")}), tmp_path))
    assert "passages" in text and "index" in text


@pytest.mark.parametrize(
    ("sections", "count", "name", "words"),
    [
        ({}, 3, "questions", "found 3 questions for steps of 16, accepted: more questions, or a lower train.prompts"),
        ({"data": {"validation_share": 0.3}}, 26, "questions", "questions for steps of"),
        (
            {"data": {"validation_share": 0.5}, "eval": {"best_metric": "mixed/em", "every_steps": 1}},
            80,
            "questions",
            "config.eval.best_metric",
        ),
        ({"reward": {"profile": "compat"}}, 48, "prompt", "config.data.template=toy: found 0 times"),
        (
            {"data": {"template": "examples"}},
            48,
            "prompt",
            "{answer} found, accepted by launch/sample.py --template only",
        ),
        ({"data": {"template": "row"}}, 48, "prompt", "no prompt found in its row"),
        ({"reward": {"terms": "no.py:f=1"}}, 48, "reward", "config.reward.terms: no.py: cannot be loaded"),
    ],
)
def test_what_training_refuses_is_reported(tmp_path, sections, count, name, words):
    data = write_questions(tmp_path / "questions.jsonl", count) | sections.get("data", {})
    problems = [f for f in findings(config(**sections | {"data": data}), tmp_path / "run").get(name, ()) if f.wrong]
    assert problems and words in problems[0].text


def test_prompts_are_measured(tmp_path):
    data = write_questions(tmp_path / "questions.jsonl", 48, "Which is the rival of Nujider?")
    template = tmp_path / "prompt.txt"
    for text, words in (
        ("no question", "{question} not found"),
        ("{question}", "of 64 tokens"),
        ("{question}" + " Which" * 70, "48 of the first 48 prompts exceed config.rollout.prompt_tokens=64"),
    ):
        template.write_text(text)
        (prompt,) = findings(config(data=data | {"template": str(template)}), tmp_path)["prompt"]
        assert words in prompt.text and prompt.wrong == (text != "{question}")


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("Which is the rival of Alice?", "1 of 4 words"),
        ("Which is the profession of Nujider?", "1 of 4 words"),
        ("Who composed the overture that Beethoven withdrew?", "6 of 7 words"),
    ],
)
def test_words_that_the_policy_does_not_know_are_seen(tmp_path, text, spelled):
    """The toy policy copies a name of another language wrongly and answers another question than the one asked."""
    data = write_questions(tmp_path / "questions.jsonl", 48, text)
    (prompt,) = findings(config(data=data), tmp_path)["prompt"]
    assert prompt.wrong and f"{spelled} spelled, such as " in prompt.text and "closed world" in prompt.text


def test_memory_that_does_not_suffice_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**20)
    assert "of 0.00 GiB on each device" in wrong(findings(config(), tmp_path / "not" / "yet"))


def test_the_disk_must_have_room_for_the_checkpoints_to_come(tmp_path, monkeypatch):
    plan = SimpleNamespace(checkpoint_bytes=10 * GIB, parameter_bytes=3 * GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=15 * GIB))

    def checked(**sections):
        return doctor.check_disk(config(**sections), plan, str(tmp_path))

    with pytest.raises(UserError, match="40.00 GiB for 4 more checkpoints"):
        checked()
    # The best checkpoint has the parameters only, twice while one replaces the other.
    with pytest.raises(UserError, match="for 4 more checkpoints and 6.00 for the best one"):
        checked(eval={"every_steps": 5})
    for step in (1, 2, 3):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert "10.00 GiB for 1 more checkpoints" in checked()


def test_an_accelerator_that_is_not_used_is_seen(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if jax.devices()[0].platform != "cpu":
        pytest.skip("this machine's accelerator is used")
    assert "CPU" in doctor.check_devices(tmp_path).upper()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    with pytest.raises(UserError, match=r"/dev/nvidiactl exists: .*\[cuda\].*CUDA_VISIBLE_DEVICES"):
        doctor.check_devices(tmp_path)


def test_a_run_that_would_resume_is_known(tmp_path):
    checkpoint, run = tmp_path / "run" / "checkpoints" / "7" / "loop", str(tmp_path / "run")
    checkpoint.mkdir(parents=True)
    recorded = settings.record(config(), {}, unused="sft")
    (checkpoint / "metadata").write_text(json.dumps({"step": 7, "settings": recorded}))
    assert "after step 7" in doctor.check_workdir(config(), run)
    with pytest.raises(UserError, match="rollout.temperature: 1.0, now 0.5; accepted: the original"):
        doctor.check_workdir(config(rollout={"temperature": 0.5}), run)
    (tmp_path / "file").touch()
    for directory in ("file", "file/run"):
        with pytest.raises(UserError, match="file is not a writable directory"):
            doctor.check_workdir(config(), str(tmp_path / directory))


def test_the_program_exits_with_2_if_there_is_something_to_fix(tmp_path):
    command = [sys.executable, "launch/doctor.py", "--config=configs/smoke.py", f"--workdir={tmp_path}"]
    done = completed([*command, "--config.retrieval.corpus=nowhere.jsonl"])
    assert done.returncode == 2 and "2 to fix" in done.stderr.splitlines()[-1], done.stdout + done.stderr
    assert sum(line.startswith("FIX") for line in done.stdout.splitlines()) == 2

"""Runs the notebooks from first to last cell on a CPU."""

import json

import pytest
from programs import ROOT

SMALL = {
    "rollout": {"slots": 4, "samples": 2, "context_tokens": 1024, "prompt_tokens": 768, "turn_tokens": 16}
    | {"obs_tokens": 64, "search_turns": 1, "num_buckets": 1, "initial_search": True},
    "learning": {"mini_batch_rollouts": 4},
    "train": {"prompts": 2},
}


def rows() -> list[dict]:
    """Questions in the format of HotpotQA's own file."""
    names = [f"Ada Lovelace {chr(65 + i)}" for i in range(10)]  # words of the tokenizer

    def row(i: int) -> dict:
        one, other = names[i], names[(i + 1) % 10]
        texts = [[one, [f"{one} was born in {1900 + i}.", " A second sentence."]], [other, [f"{other} was not."]]]
        question = {"_id": str(i), "question": f"Who is older, {one} or {other}?", "answer": one}
        return question | {"type": "comparison", "level": "hard", "supporting_facts": [[one, 0]], "context": texts}

    return [row(i) for i in range(10)]


def execute(name: str, parameters: dict, folder) -> str:
    """What a notebook prints, with these values instead of those of its first cell."""
    nbformat, nbclient = (
        pytest.importorskip(name, reason=f"{name} is not installed") for name in ("nbformat", "nbclient")
    )
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    first = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assert all(f"\n{name} = " in f"\n{first.source}" for name in parameters), "a parameter is missing"
    first.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    outputs = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    return "\n".join(outputs)


@pytest.mark.weekly
def test_real_questions_on_one_gpu(tmp_path, wordy_policy, monkeypatch):
    """On a CPU, with a tiny model and a HotpotQA-like file."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "hotpot.json").write_text(json.dumps(rows()))
    parameters = {"MODEL": str(wordy_policy), "QUESTIONS": str(tmp_path / "hotpot.json"), "STEPS": 2}
    parameters |= {
        "WORK": str(tmp_path / "work"),
        "MORE": [f"--config.{section}.{name}={n}" for section, fields in SMALL.items() for name, n in fields.items()],
    }
    output = execute("colab_smoke.ipynb", parameters, tmp_path)
    assert "8 questions to train on, 2 to evaluate by, 10 passages" in output and "trained in float32" in output
    assert "FIX " not in output and "model.safetensors" in output and "right would be: Ada Lovelace A" in output
    work = tmp_path / "work"
    assert len((work / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert all((work / name / "report.html").is_file() for name in ("run", "results"))


@pytest.mark.weekly
def test_the_closed_world_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    more = ["--config.eval.questions_per_kind=8", "--config.rollout.slots=16"]
    output = execute("closed_world.ipynb", {"STEPS": 2, "WORK": "run", "MORE": more}, tmp_path)
    assert output.count("<answer>") >= 3 and "| parallel | after |" in output and "  1 0." in output
    assert (tmp_path / "run" / "report.html").is_file()

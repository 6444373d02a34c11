"""The config of a run or an export, with which its policy is asked and evaluated."""

import json
from dataclasses import replace

import jax
import pytest

from configs import smoke
from psearch_jax.config import PRESETS, Config, MeshSection, from_mapping, to_mapping
from psearch_jax.runtime.paths import TOYS
from psearch_jax.train.checkpointing import run_config
from psearch_jax.train.checkpointing.run_config import (
    EXPORTED,
    PROMPT,
    load_run_config,
    locate_tokenizer,
    make_export_files,
    make_export_shape,
)
from psearch_jax.types import UserError


def exported(directory, config):
    """The config of an export of a run with this config; the run's own files are gone."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")  # as in every Hugging Face directory
    for name, content in make_export_files(config).items():
        (directory / name).write_bytes(content)
    return load_run_config(str(directory))


def test_the_tokenizer_of_a_run_is_found_from_elsewhere(tmp_path):
    """The config's directory or hub id, else the recorded directory, else that of the initial weights."""
    (tmp_path / "model").mkdir()
    moved = from_mapping({"model": {"path": str(tmp_path / "model")}})
    assert locate_tokenizer(moved, str(tmp_path / "gone")) == str(tmp_path / "model")
    for name in ("recorded", "chosen"):
        (tmp_path / name).mkdir()
    recorded = str(tmp_path / "recorded")
    for named, expected in [
        ("toy", str(TOYS["toy"])),
        ("somewhere/else", recorded),  # relative to where the run was started
        (str(tmp_path / "chosen"), str(tmp_path / "chosen")),  # a flag overrides the run
    ]:
        assert locate_tokenizer(from_mapping({"model": {"tokenizer": named}}), recorded) == expected
    assert (
        locate_tokenizer(from_mapping({"model": {"tokenizer": "owner/name"}}), str(tmp_path / "gone")) == "owner/name"
    )


def test_an_export_is_asked_as_it_was_trained(tmp_path):
    """An export keeps method, prompt and budgets, and nothing of the training run or its machine."""
    toy = from_mapping(smoke.get_config().to_dict() | {"method": "search_r1"})
    config = exported(tmp_path / "out", toy)
    assert config.rollout == toy.rollout and config.method == "search_r1"
    assert config.data.template == "toy" and config.retrieval.topk == 2
    assert config.model == Config().model and config.data.source == "" and config.learning == Config().learning
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    assert load_run_config(str(tmp_path / "foreign")) is None


def test_a_prompt_file_moves_with_the_export(tmp_path, caplog):
    """An export contains its prompt; of a prompt that is gone, or of the rows, it claims none."""
    assert make_export_files(from_mapping({"data": {"template": str(tmp_path / "gone.txt")}})) == {}
    config = exported(tmp_path / "rows", from_mapping({"data": {"template": "row"}}))
    assert config.data.template == "row"
    assert "gone.txt" in caplog.text and "trained with the prompts of its data" in caplog.text
    prompt = tmp_path / "mine.txt"
    prompt.write_text("As a librarian: {question}\n")
    config = exported(tmp_path / "out", from_mapping({"data": {"template": str(prompt)}}))
    prompt.unlink()
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    config = load_run_config(str(moved))
    assert config.data.template == str(moved / PROMPT)
    assert (moved / PROMPT).read_text() == "As a librarian: {question}"


def test_a_config_that_does_not_fit_is_refused(tmp_path):
    """The message names the file, and the field or the directory to use instead."""
    exported(tmp_path / "out", Config())
    file = tmp_path / "out" / EXPORTED
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"rollout": values["rollout"] | {"slot": 3}}))
    (tmp_path / "toy" / "checkpoints" / "3" / "loop").mkdir(parents=True)
    (tmp_path / "toy" / "config.json").write_text(json.dumps({"exercise_rows": 1}))
    with pytest.raises(UserError, match="a run of experiments/toy found, accepted: the directory policy/"):
        load_run_config(str(tmp_path / "toy"))
    with pytest.raises(UserError, match=r"psearch.json: config.rollout: unknown key 'slot'; did you mean 'slots'"):
        load_run_config(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ({"rollout_tensor": 4}, 8, MeshSection(tensor=4)),
        ({"data": 2, "fsdp": 2}, 8, MeshSection()),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, MeshSection(2, 2, 2)),
    ],
)
def test_the_mesh_of_a_run(tmp_path, monkeypatch, mesh, devices, expected):
    """A policy is evaluated with the sampler's `tensor`; a mesh that does not fit the devices is the default one."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(run_config, "find_checkpoint", lambda path: path / "checkpoints" / "1")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(to_mapping(from_mapping({"mesh": mesh}))))
    assert load_run_config(str(tmp_path)).mesh == expected


def test_an_export_stops_where_the_policy_stops(tiny_tokenizer):
    """An export names all stop tokens of the tokenizer, after those of the base model."""
    stops = tiny_tokenizer.stop_ids
    first = max(stops)
    shape = make_export_shape(replace(next(iter(PRESETS.values())), eos_ids=(first,)), tiny_tokenizer)
    assert shape.eos_ids[0] == first and set(shape.eos_ids) == stops

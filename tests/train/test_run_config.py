"""The config of a run or an export, with which its policy is asked and evaluated."""

import json
from dataclasses import replace

import jax
import pytest

from configs import smoke
from psearch_jax.config import PRESETS, Config, MeshSection, from_mapping, to_mapping
from psearch_jax.runtime.paths import TOY_POLICY
from psearch_jax.train.checkpointing import run_config
from psearch_jax.train.checkpointing.run_config import (
    EXPORTED,
    PROMPT,
    config_of,
    export_files,
    exported_shape,
    tokenizer_of,
)
from psearch_jax.types import UserError


def exported(directory, config):
    """The config of an export of a run with this config; the run's own files are gone."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")  # as in every Hugging Face directory
    for name, content in export_files(config).items():
        (directory / name).write_bytes(content)
    return config_of(str(directory))


def test_the_tokenizer_of_a_moved_run_is_that_of_its_model(tmp_path):
    """A checkpoint copied to another machine can be asked, but not exported: its tokenizer was in a cold start."""
    (tmp_path / "model").mkdir()
    config = from_mapping({"model": {"path": str(tmp_path / "model")}})
    assert tokenizer_of(config, str(tmp_path / "gone")) == str(tmp_path / "model")
    assert tokenizer_of(config, str(tmp_path)) == str(tmp_path)
    chosen = replace(config, model=replace(config.model, tokenizer="/mine"))
    assert tokenizer_of(chosen, str(tmp_path / "gone")) == "/mine"


def test_the_tokenizer_that_a_run_names_is_found_from_elsewhere(tmp_path):
    """A run with model.tokenizer=toy cannot be exported; one with a relative directory only from where it started."""
    for name in ("recorded", "chosen"):
        (tmp_path / name).mkdir()
    recorded = str(tmp_path / "recorded")
    for named, expected in [
        ("toy", str(TOY_POLICY)),
        ("somewhere/else", recorded),  # relative to where the run was started
        (str(tmp_path / "chosen"), str(tmp_path / "chosen")),  # a flag overrides the run
    ]:
        assert tokenizer_of(from_mapping({"model": {"tokenizer": named}}), recorded) == expected
    assert tokenizer_of(from_mapping({"model": {"tokenizer": "owner/name"}}), str(tmp_path / "gone")) == "owner/name"


def test_a_run_of_the_toy_cold_start_is_named(tmp_path):
    """An unknown key of its config.json, which does not say which directory to use."""
    (tmp_path / "checkpoints" / "3" / "loop").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps({"exercise_rows": 1}))
    with pytest.raises(UserError, match="a run of configs/toy_sft.py found, accepted: the directory policy/"):
        config_of(str(tmp_path))


def test_an_export_is_asked_as_it_was_trained(tmp_path):
    """An exported policy would get another prompt and other budgets than it was trained with."""
    toy = from_mapping(smoke.get_config().to_dict() | {"method": "search_r1"})
    config = exported(tmp_path / "out", toy)
    assert config.rollout == toy.rollout and config.method == "search_r1"
    assert config.data.template == "toy" and config.retrieval.topk == 2
    # What belongs to the training run or its machine is left out.
    assert config.model == Config().model and config.data.source == "" and config.learning == Config().learning
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    assert config_of(str(tmp_path / "foreign")) is None


def test_an_own_prompt_moves_with_the_export(tmp_path):
    """The prompt's file is in the directory of the run, which the machine that serves the export does not have."""
    prompt = tmp_path / "mine.txt"
    prompt.write_text("As a librarian: {question}\n")
    config = exported(tmp_path / "out", from_mapping({"data": {"template": str(prompt)}}))
    prompt.unlink()
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    config = config_of(str(moved))
    assert config.data.template == str(moved / PROMPT)
    assert (moved / PROMPT).read_text() == "As a librarian: {question}"


def test_an_export_does_not_claim_a_prompt_it_was_not_trained_with(tmp_path, caplog):
    """A policy trained with the prompts of its rows would be evaluated with a packaged template, without a word."""
    of_rows = from_mapping({"data": {"prompt": "row", "template": str(tmp_path / "gone.txt")}})
    config = exported(tmp_path / "out", of_rows)
    assert config.data.prompt == "row" and config.data.template == Config().data.template
    assert "trained with the prompts of its data" in caplog.text


def test_a_prompt_that_is_gone_does_not_prevent_an_export(tmp_path, caplog):
    """A run copied to another machine could not be exported there."""
    assert export_files(from_mapping({"data": {"template": str(tmp_path / "gone.txt")}})) == {}
    assert "gone.txt" in caplog.text


def test_an_export_with_an_unknown_field_is_refused(tmp_path):
    """The message names the file and the field."""
    exported(tmp_path / "out", Config())
    file = tmp_path / "out" / EXPORTED
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"rollout": values["rollout"] | {"slot": 3}}))
    with pytest.raises(UserError, match=r"psearch.json: config.rollout: unknown key 'slot'; did you mean 'slots'"):
        config_of(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("mesh", "devices", "expected", "trained"),
    [
        ({"fsdp": 2, "rollout_devices": 2}, 4, MeshSection(), MeshSection(fsdp=2, rollout_devices=2)),
        (
            {"tensor": 2, "rollout_devices": 4, "rollout_tensor": 4},
            8,
            MeshSection(tensor=4),
            MeshSection(tensor=2, rollout_devices=4, rollout_tensor=4),
        ),
        ({"rollout_devices": 6}, 4, MeshSection(), MeshSection()),
        ({"rollout_tensor": 4}, 8, MeshSection(tensor=4), MeshSection(rollout_tensor=4)),
        ({"rollout_tensor": 4}, 2, MeshSection(), MeshSection()),
        ({"data": 2, "rollout_tensor": 4}, 4, MeshSection(tensor=4), MeshSection()),
        (
            {"rollout_devices": 2, "rollout_tensor": 2},
            6,
            MeshSection(tensor=2),
            MeshSection(rollout_devices=2, rollout_tensor=2),
        ),
        (
            {"rollout_devices": 3, "rollout_tensor": 3},
            6,
            MeshSection(tensor=3),
            MeshSection(rollout_devices=3, rollout_tensor=3),
        ),
        ({"data": 2, "fsdp": 2}, 8, MeshSection(), MeshSection()),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, MeshSection(2, 2, 2), MeshSection(2, 2, 2)),
    ],
)
def test_the_mesh_of_a_run(tmp_path, monkeypatch, mesh, devices, expected, trained):
    """A run with devices that only sample, or another `tensor` for the sampler, could not be evaluated on the machine
    that trained it, or its replay would train on other devices."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(run_config, "find_checkpoint", lambda path: path / "checkpoints" / "1")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(to_mapping(from_mapping({"mesh": mesh}))))
    assert config_of(str(tmp_path)).mesh == expected
    assert config_of(str(tmp_path), training=True).mesh == trained


def test_an_export_stops_where_the_policy_stops(tiny_tokenizer):
    """A base model's files name only its end of text: other programs would generate past the end of the answer."""
    stops = tiny_tokenizer.stop_ids
    first = max(stops)
    shape = exported_shape(replace(next(iter(PRESETS.values())), eos_ids=(first,)), tiny_tokenizer)
    assert shape.eos_ids[0] == first and set(shape.eos_ids) == stops

"""Checkpoints: which are loaded, which are skipped, which are kept, and which are never changed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from helpers import one_device_mesh, random_params, same_bits, tiny_config

from psearch_jax.config import LearningSection
from psearch_jax.models import decoder
from psearch_jax.sharding import attach_shardings
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.train.checkpointing.best import Best, find_best
from psearch_jax.train.state import abstract_state, init_state, make_optimizer, state_shardings
from psearch_jax.types import UserError

CONFIG = tiny_config(64)
LOOP = {"model": checkpoint.model_record(CONFIG), "tokenizer": "x"}
OPTIMIZER = make_optimizer(LearningSection(), 10)
NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes."


def abstract() -> object:
    mesh, shapes = one_device_mesh(), abstract_state(random_params(CONFIG), OPTIMIZER)
    return attach_shardings(shapes, state_shardings(shapes, mesh))


def state_of(step: int):
    return init_state(random_params(CONFIG, seed=step), OPTIMIZER, one_device_mesh())


@pytest.fixture
def saved(tmp_path):
    """The `Checkpoints` of a run directory with checkpoints of steps 1 and 2."""
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, state_of(step), LOOP)
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


def listing(directory: Path) -> dict[str, bytes | str]:
    return {
        str(p.relative_to(directory)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name[0].isdigit() and "orbax" not in p.name)


@pytest.mark.parametrize("trouble", ["input/output", MemoryError(), jax.errors.JaxRuntimeError(NO_MEMORY)], ids=str)
def test_a_failing_machine_changes_nothing(saved, tmp_path, monkeypatch, trouble):
    """If no checkpoint can be read, none is renamed, and the error is that of the newest."""
    if trouble == "input/output":
        for step in "12":
            file = tmp_path / "checkpoints" / step / "loop" / "metadata"
            file.unlink()
            file.symlink_to("/proc/self/mem")  # every read fails with a real EIO
    else:

        def fail(*_, **__):
            raise trouble

        monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", fail)
    before = listing(tmp_path)
    with pytest.raises(UserError, match="checkpoints/2: cannot be read .* nothing was changed") as caught:
        saved.restore(abstract())
    assert "\n" not in str(caught.value) and listing(tmp_path) == before
    with pytest.raises(UserError, match="checkpoints/2: cannot be read"):
        checkpoint.load_params(tmp_path)


@pytest.mark.parametrize("item, name", [("loop", "metadata"), ("params", "largest"), ("params", "manifest.ocdbt")])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_used(saved, tmp_path, caplog, item, name, damage):
    """All programs use the newest readable checkpoint, and the run can save again at the damaged one's step."""
    directory = tmp_path / "checkpoints"
    files = [p for p in (directory / "2" / item).rglob("*") if p.is_file()]
    file = max(files, key=lambda p: p.stat().st_size if name == "largest" else p.name == name)
    if damage == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    before = listing(directory / "2")
    assert checkpoint.load_params(tmp_path)[2]["step"] == 1
    state, loop = saved.restore(abstract())
    assert loop["step"] == 1 and "cannot be read" in caplog.text and same_bits(state, state_of(1))
    assert listing(directory / "2.unreadable") == before
    saved.save(2, state_of(2), LOOP)
    saved.wait()
    assert saved.restore(abstract())[1]["step"] == 2
    assert names(directory) == ["1", "2", "2.unreadable"]


def test_damaged_rollouts_in_flight_count_as_damage(saved, tmp_path):
    """A ValueError of `accept` means damage."""

    def accept(loop):
        if loop["step"] == 2:
            raise ValueError("Error -3 while decompressing data")

    assert saved.restore(abstract(), accept)[1]["step"] == 1
    (tmp_path / "checkpoints" / "1" / "loop" / "metadata").write_text("{")
    with pytest.raises(UserError, match="checkpoints/1: cannot be read"):
        saved.restore(abstract())
    assert names(tmp_path / "checkpoints") == ["1", "2.unreadable"]


def test_disk_space_is_checked_before_a_save(saved, tmp_path, monkeypatch):
    """A save for which the disk has no space is refused in one line and leaves the earlier checkpoints."""
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))
    with pytest.raises(UserError, match=r"cannot be written \(OSError: .*it needs 1.* free\); earlier ones are compl"):
        saved.save(3, state_of(3), {**LOOP, "in_flight": {"rollouts": "x" * 10**8}})
    assert names(tmp_path / "checkpoints") == ["1", "2"]


# ---- the best checkpoint ----


def offer(best: Best, *values, loop=LOOP):
    """Offers parameters seeded by their step; the resulting record."""
    for step, value in values:
        best.offer(step, value, decoder.init_params(CONFIG, step), loop)
    best.close()
    return best.record


def test_the_best_checkpoint_is_kept_over_restarts(tmp_path):
    """Only a higher value replaces it, also if a killed run repeats steps; an incomplete save is removed."""
    kept = {"step": 2, "metric": "em", "questions": "of these", "value": 0.5}
    assert offer(Best(tmp_path, "em", "of these"), (1, 0.2), (2, 0.5), (3, 0.5), (4, 0.1)) == kept
    (tmp_path / "best" / "9.orbax-checkpoint-tmp").mkdir()  # left by a kill while saving
    again = Best(tmp_path, "em", "of these")
    assert again.record == kept and names(tmp_path / "best") == ["2"]
    assert offer(again, (1, 0.2), (2, 0.5), (3, 0.5), (5, 0.6))["step"] == 5 and names(tmp_path / "best") == ["5"]
    for dtype in (jnp.float32, jnp.bfloat16):
        _, params, loop = checkpoint.load_params(find_best(tmp_path), dtype=dtype)
        expected = jax.tree.map(lambda x: x.astype(dtype), decoder.init_params(CONFIG, 5))  # noqa: B023
        assert same_bits(params, expected) and {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    assert loop["best"] == {"metric": "em", "questions": "of these", "value": 0.6} and loop["step"] == 5
    with pytest.raises(UserError, match="--best: .*nothing/best holds no checkpoint"):
        find_best(tmp_path / "nothing")


@pytest.mark.parametrize("contents", ['{"step": 4, "be', '{"step": 4}', "[]"])
def test_a_damaged_best_checkpoint_is_renamed(tmp_path, contents, caplog):
    """The run starts, and the next evaluation starts a new best."""
    offer(Best(tmp_path, "em"), (4, 0.5))
    (tmp_path / "best" / "4" / "loop" / "metadata").write_text(contents)
    assert offer(Best(tmp_path, "em"), (4, 0.1))["value"] == 0.1 and "starts a new best" in caplog.text
    assert names(tmp_path / "best") == ["4", "4.unreadable"]


SETTINGS = {"eval.temperature": 0.0, "learning.learning_rate": 0.1, "data.source": {"names": "s", "is": "0"}}
OTHER_SOURCE = {"data.source": {"names": "other", "is": "1"}}
VALIDATION = {"data.validation": {"names": "v", "is": "2"}}


@pytest.mark.parametrize(
    ("before", "changed", "options", "comparable"),
    [
        ({}, {}, {}, True),
        ({}, {"learning.learning_rate": 1.0}, {}, True),
        ({}, {"eval.temperature": 1.0}, {}, False),
        ({}, OTHER_SOURCE, {}, False),
        (VALIDATION, OTHER_SOURCE, {}, True),
        ({}, {}, {"until": 4}, True),
        ({}, {}, {"until": 0}, False),
        ({}, {}, {"metric": "f1"}, False),
        ({}, {}, {"questions": "others"}, False),
    ],
)
def test_values_that_cannot_be_compared_set_the_best_aside(tmp_path, before, changed, options, comparable):
    """A lower value replaces the best of other settings, questions or metrics, which stays as STEP.earlier."""
    now = SETTINGS | before
    offer(Best(tmp_path, "em", "these", now), (4, 0.5), loop=LOOP | {"settings": now})
    best = Best(tmp_path, **{"metric": "em", "questions": "these", "now": now | changed, **options})
    assert offer(best, (5, 0.3))["step"] == (4 if comparable else 5)
    assert names(tmp_path / "best") == (["4"] if comparable else ["4.earlier", "5"])

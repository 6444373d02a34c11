"""Checkpoints: which are loaded, which are skipped, and which are never changed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import one_device_mesh, random_params, tiny_config

from psearch_jax.config import LearningSection
from psearch_jax.sharding import placed
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.train.state import abstract_state, init_state, make_optimizer, state_shardings
from psearch_jax.types import UserError

CONFIG = tiny_config(64)
OPTIMIZER = make_optimizer(LearningSection(), 10)
NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes."


def abstract() -> object:
    mesh, shapes = one_device_mesh(), abstract_state(random_params(CONFIG), OPTIMIZER)
    return placed(shapes, state_shardings(shapes, mesh))


@pytest.fixture
def kept(tmp_path):
    """Checkpoints of steps 1 and 2 in a run directory: (their `Checkpoints`, the state of step 2)."""
    keeper = checkpoint.Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        state = init_state(random_params(CONFIG, seed=step), OPTIMIZER, one_device_mesh())
        keeper.save(step, state, {"model": checkpoint.model_record(CONFIG), "tokenizer": "x"})
    keeper.wait()
    yield keeper, state
    keeper.close()


def listing(directory: Path) -> dict[str, bytes | str]:
    return {
        str(p.relative_to(directory)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def break_disk(file: Path) -> None:
    """Makes every read of the file fail with a real EIO."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def fails_with(keeper, error: Exception, item: str):
    """Makes restoring one item raise `error`."""
    read = keeper._restore

    def restore(step, args):
        if item in args.keys():
            raise error
        return read(step, args)

    keeper._restore = restore


@pytest.mark.parametrize("trouble", ["input/output", "memory", "device memory", "permission"])
def test_a_failing_machine_costs_no_checkpoint(kept, tmp_path, trouble):
    """A checkpoint would be removed, or skipped for an older one, because a disk was slow or memory ran out."""
    keeper, state = kept
    if trouble == "input/output":
        break_disk(tmp_path / "checkpoints" / "2" / "loop" / "metadata")
    elif trouble == "memory":
        fails_with(keeper, MemoryError(), "params")
    elif trouble == "device memory":
        fails_with(keeper, jax.errors.JaxRuntimeError(NO_MEMORY), "params")
    else:
        fails_with(keeper, PermissionError(errno.EACCES, "Permission denied", "loop"), "loop")
    before = listing(tmp_path)
    with pytest.raises(UserError, match="checkpoints/2: cannot be read now .* nothing was changed") as caught:
        keeper.restore(abstract())
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == before
    if trouble == "input/output":  # export and evaluation do not fall back to the older one either
        with pytest.raises(UserError, match="cannot be read now"):
            checkpoint.load_params(tmp_path)


@pytest.mark.parametrize("item, name", [("loop", "metadata"), ("params", "largest"), ("params", "manifest.ocdbt")])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_what_is_damaged_is_set_aside(kept, tmp_path, caplog, item, name, damage):
    """A file cut short by a full disk would cost the run instead of some steps, or delete repairable data."""
    keeper, _ = kept
    directory = tmp_path / "checkpoints"
    files = [p for p in (directory / "2" / item).rglob("*") if p.is_file()]
    file = max(files, key=lambda p: p.stat().st_size if name == "largest" else p.name == name)
    if damage == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    before = listing(directory / "2")
    state, loop = keeper.restore(abstract())
    assert loop["step"] == 1 and "checkpoint 2 cannot be read" in caplog.text
    expected = init_state(random_params(CONFIG, seed=1), OPTIMIZER, one_device_mesh())
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), state, expected)
    assert all(jax.tree.leaves(same))
    assert listing(directory / "2.unreadable") == before
    record = {"model": checkpoint.model_record(CONFIG), "tokenizer": "x"}
    keeper.save(2, state, record)  # the run reaches that step again: the damaged one must not block it
    keeper.wait()
    assert keeper.restore(abstract())[1]["step"] == 2
    assert sorted(p.name for p in directory.iterdir()) == ["1", "2", "2.unreadable"]


def test_rollouts_in_flight_that_are_damaged_are_set_aside(kept, tmp_path, caplog):
    """A wrong byte in the rollouts in flight would end the run at every start, though an older checkpoint is whole."""
    keeper, _ = kept

    def accept(loop):
        if loop["step"] == 2:
            raise ValueError("Error -3 while decompressing data")

    assert keeper.restore(abstract(), accept)[1]["step"] == 1
    assert "checkpoint 2 cannot be read (ValueError: Error -3" in caplog.text
    assert (tmp_path / "checkpoints" / "2.unreadable").is_dir()


def test_room_for_rollouts_in_flight(tmp_path, monkeypatch):
    """A nearly full disk would pass the check, and the checkpoint fail in the middle of writing."""
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))
    checkpoint.check_room(tmp_path, np.zeros(10))
    with pytest.raises(OSError, match="it needs 1"):
        checkpoint.check_room(tmp_path, np.zeros(10), 10**8)


def test_nothing_is_set_aside_when_nothing_can_be_read(kept, tmp_path):
    """If all checkpoints were moved away, the next command would start the run from scratch."""
    for step in "12":
        (tmp_path / "checkpoints" / step / "loop" / "metadata").write_text("{")
    with pytest.raises(UserError, match="none of the checkpoints"):
        kept[0].restore(abstract())
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


def wrapped(error: Exception) -> Exception:
    """The error as Orbax wraps what TensorStore raises."""
    try:
        raise Exception("Encountered error while reading array index") from error
    except Exception as outer:
        return outer


@pytest.mark.parametrize(
    "error, damage",
    [
        (wrapped(ValueError("OUT_OF_RANGE: Error reading Byte range [0, 276) of local file")), True),
        (wrapped(ValueError("DATA_LOSS: CRC-32C checksum verification failed")), True),
        (ValueError("NOT_FOUND: Error opening: x [OS error 2: ENOENT No such file or directory]"), True),
        (json.JSONDecodeError("Expecting value", "", 0), True),
        (wrapped(ValueError("UNKNOWN: Error reading local file [OS error 5: EIO Input/output error]")), False),
        (wrapped(ValueError("DATA_LOSS: Error reading local file [OS error 5: EIO Input/output error]")), False),
        (wrapped(ValueError("RESOURCE_EXHAUSTED: [OS error 12: ENOMEM Cannot allocate memory]")), False),
        (wrapped(ValueError("UNAVAILABLE: the object store does not answer")), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (RuntimeError("nobody has seen this one yet"), False),
    ],
)
def test_damage_is_told_from_a_failing_machine(error, damage):
    """A machine's failure taken for damage would skip a good checkpoint, and with it the newest steps of the run."""
    assert checkpoint.is_damage(error) == damage

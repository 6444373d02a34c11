"""Checkpoints with Orbax, and the order in which a run resumes.

A checkpoint directory `checkpoints/STEP` holds three items:
  params: nested dict of the policy's trained float32 arrays (of its adapters with LoRA). Export and evaluation need no
    others.
  optimizer: arrays by position: the optimizer's, the counters of updates and, with PPO, all of the critic.
  loop: JSON with the step, the loader's state, the settings that affect results, the rollouts in flight
    (`train.staleness`), the model's shape, the tokenizer's path and, for adapters, the path of their base weights.

A run with a workdir resumes from the first of these:
  1. the newest readable checkpoint; damaged newer ones are renamed to `STEP.unreadable`, with a warning;
  2. the weights of `model.path` (or random ones), at step 0.
Then metrics and trajectories are truncated to that step, and the loader continues after the last trained batch.

Only damaged checkpoints are skipped: a file is missing, cannot be parsed or fails its checksum. A failing disk or lack
of memory does not mean damage. The program then exits and changes nothing.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora, ModelSection
from psearch_jax.models import decoder, hf, lora
from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import absolute, is_remote, locate
from psearch_jax.sharding import placed
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.state import TrainState
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")
_OVERHEAD = 8 * 2**20  # bytes of a checkpoint in addition to its arrays: many small files


class Checkpoints:
    """The checkpoints of one run directory. Saving is asynchronous.

    Args:
      directory: `WORKDIR/checkpoints`.
      keep: how many of the newest are kept.
      keep_every: steps that are multiples of this are kept as well; 0: none.
    """

    def __init__(self, directory: str | Path, keep: int = 3, keep_every: int = 0):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every or None, create=True, cleanup_tmp_directories=True
        )
        self._directory = absolute(directory)
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(self, step: int, state: TrainState, loop: Mapping[str, Any]) -> None:
        """Starts to save the state after `step` completed steps. `loop` must be JSON-ready.

        Raises:
          UserError: this checkpoint or the previous one cannot be written.
        """
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(nnx.to_pure_dict(state.params)),
            optimizer=ocp.args.StandardSave(_by_position(_rest(state))),
            loop=ocp.args.JsonSave({**loop, "step": step}),
        )
        with writing(self._directory):
            check_room(self._directory, state, len(loop.get("in_flight", {}).get("rollouts", "")))
            self._manager.save(step, args=arguments, force=True)

    def restore(
        self, state: TrainState, accept: Callable[[Mapping[str, Any]], None] = lambda loop: None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Restores the newest readable checkpoint; None if there are no checkpoints.

        Args:
          state: the target shapes and shardings, on any mesh; ShapeDtypeStructs are enough.
          accept: called with a checkpoint's `loop` before its arrays are loaded; it raises to refuse the checkpoint, a
            ValueError if the checkpoint is damaged.

        Raises:
          UserError: the checkpoint has another architecture, none can be read, or reading failed without damage.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        damaged = []
        for step in steps:
            arrays, loop, problem = None, *self._read(step, loop=ocp.args.JsonRestore())
            if not problem:
                loop = loop["loop"]
                try:
                    accept(loop)
                except UserError:
                    raise
                except ValueError as error:
                    problem = _first_line(error)
            if not problem:
                _same_shapes(self._directory / str(step), loop, state.params)
                arrays, problem = self._read(
                    step,
                    params=ocp.args.StandardRestore(nnx.to_pure_dict(state.params)),
                    optimizer=ocp.args.StandardRestore(_by_position(_rest(state))),
                )
            if problem:
                log.warning("checkpoint %s cannot be read (%s); trying the previous one", step, problem)
                damaged.append(step)
                continue
            set_aside(self._manager, damaged)  # else the run could not save at these steps again
            rest = jax.tree.unflatten(jax.tree.structure(_rest(state)), list(arrays["optimizer"].values()))
            return TrainState(decoder.with_values(state.params, arrays["params"]), *rest), loop
        if steps:
            raise UserError(f"{self._directory}: none of the checkpoints {steps} can be read; use another --workdir")
        return None

    def _read(self, step: int, **items: Any) -> tuple[Any, str]:
        """Loads items of a checkpoint. If they are damaged in any process, the second value says how, else it is "".

        Raises:
          UserError: reading failed for another reason.
        """
        restored, problem = None, None
        try:
            restored = self._restore(step, ocp.args.Composite(**items))
        except Exception as error:  # a damaged file can raise anything
            problem = (is_damage(error), _first_line(error))
        problems = [p for p in processes.allgather(lambda: problem) if p]
        for damage, text in problems:
            if not damage:
                raise _not_damaged(self._directory / str(step), text)
        return restored, problems[0][1] if problems else ""

    def _restore(self, step: int, args: Any) -> Any:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=_for_itself()) as reader:
            return reader.restore(self._directory / str(step), args=args)

    def latest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Blocks until everything saved is on disk. Raises UserError if a checkpoint cannot be written."""
        with writing(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        with writing(self._directory):
            self._manager.close()


def set_aside(manager: ocp.CheckpointManager, steps: Sequence[int], suffix: str = "unreadable") -> None:
    """Renames checkpoints of a manager to `STEP.suffix`, so that it neither uses nor deletes them."""

    def rename() -> None:
        directory = manager.directory
        for step in steps if processes.first() else []:
            place = directory / f"{step}.{suffix}"
            while place.exists():
                place = place.with_name(f"{place.name}.again")
            (directory / str(step)).rename(place)
            log.warning("the checkpoint %s is kept as %s", directory / str(step), place.name)

    if steps:
        processes.allgather(rename)
        manager.reload()


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turns errors inside the block into `processes.Lost`, or into a UserError about checkpoints in `directory`."""
    try:
        yield
    except Exception as error:  # a full or missing disk can raise anything
        if processes.lost(error):  # not the disk
            raise processes.Lost(f"saving a checkpoint: {_first_line(error)}") from error
        raise UserError(
            f"{directory}: a checkpoint cannot be written ({_first_line(error)}); earlier ones are complete; "
            "the same command resumes from the newest"
        ) from error


def check_room(directory: Path, tree: Any, extra: int = 0) -> None:
    """Raises OSError in all processes if one of them has no disk space for these arrays and `extra` bytes.

    Checked first, because a disk that fills up while Orbax's threads write gives pages of tracebacks.
    """
    size = int(1.1 * sum(x.nbytes for x in jax.tree.leaves(tree))) + extra + _OVERHEAD

    def ask() -> None:
        if is_remote(directory):  # an object store has no size limit
            return
        free = shutil.disk_usage(directory).free
        if free < size:
            raise OSError(errno.ENOSPC, f"it needs {size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free")

    processes.allgather(ask)


def _rest(state: TrainState) -> tuple[Any, ...]:
    return state.optimizer, state.updates, state.nonfinite_in_a_row, state.critic


def _by_position(tree: Any) -> dict[str, Any]:
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


# TensorStore status codes, and errors of this package and of Orbax, that are about the contents of files.
_DAMAGE_CODES = ("NOT_FOUND", "DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_DAMAGE = (*_ABSENT, json.JSONDecodeError, UnicodeDecodeError, KeyError, EOFError)


def is_damage(error: BaseException) -> bool:
    """Whether a read error means damaged files: one is missing, truncated, or has other contents.

    Any other error (input/output, out of memory, no permission, no answer from a server, unknown) may be transient and
    proves nothing about the files.
    """
    damage = False
    for cause in _chain(error):
        if isinstance(cause, OSError | MemoryError | jax.errors.JaxRuntimeError) and not isinstance(cause, _ABSENT):
            return False
        number = re.search(r"OS error (\d+)", str(cause))
        if number and int(number[1]) not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            return False
        damage = damage or isinstance(cause, _DAMAGE) or str(cause).startswith(_DAMAGE_CODES)
    return damage


def _not_damaged(checkpoint: Path, text: str) -> UserError:
    return UserError(
        f"{checkpoint}: cannot be read now ({text}), but is not damaged: check disk, memory and library versions; "
        "nothing was changed, so repeat the same command to try again"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(error: BaseException) -> str:
    *_, root = _chain(error)  # Orbax wraps it in pages of text about the array's layout
    return f"{type(root).__name__}: {(str(root).splitlines() or [''])[0][:200]}"


def _same_shapes(directory: Path, loop: Mapping[str, Any], params: nnx.State) -> None:
    abstract = _abstract(loop)
    theirs = {path: v.shape for path, v in nnx.to_flat_state(abstract)}
    for path, variable in nnx.to_flat_state(params):
        if theirs.pop(path, None) != variable.shape:
            raise UserError(f"{directory}: the checkpoint is of another architecture ({'.'.join(path)} differs)")
    if theirs:
        raise UserError(f"{directory}: the checkpoint is of another architecture (it also has {next(iter(theirs))})")


def _abstract(loop: Mapping[str, Any]) -> nnx.State:
    """The trained parameters of a checkpoint, as ShapeDtypeStructs."""
    config, record = _shape(loop["model"]), loop.get("lora")
    if record:
        return lora.abstract_adapters(config, Lora(record["rank"], record["alpha"]))
    return decoder.abstract_params(config)[1]


def _shape(raw: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(**{**raw, "eos_ids": tuple(raw["eos_ids"])})


def find_checkpoint(path: str | Path) -> Path:
    """The first of `find_checkpoints`."""
    return find_checkpoints(path)[0]


def newest_step(workdir: str | Path) -> int:
    """The step of a run's newest checkpoint; 0 without one."""
    try:
        return int(find_checkpoint(workdir).name)
    except UserError:
        return 0


def find_checkpoints(path: str | Path) -> list[Path]:
    """All checkpoints in a run directory or its checkpoints/, newest first, or `path` itself if it is a checkpoint.

    Raises:
      UserError: there is none.
    """
    path = locate(path)
    for parent in (path / "checkpoints", path):
        steps = [p for p in parent.glob("*") if p.name.isdigit() and _is_complete(p)] if parent.is_dir() else []
        if steps:
            return sorted(steps, key=lambda p: int(p.name), reverse=True)
    if (path / "loop").is_dir() and (path / "params").is_dir():
        return [path]
    raise UserError(f"{path}: holds no checkpoint, accepted: a run directory, its checkpoints/ or one step below it")


def _is_complete(step: Path) -> bool:
    """Whether a directory is a complete checkpoint. On an object store, Orbax marks completion with a file."""
    return (step / "loop").is_dir() and (not is_remote(step) or (step / "commit_success.txt").exists())


def read_loop(checkpoint: str | Path) -> dict[str, Any]:
    """The JSON item of one checkpoint directory."""
    file = locate(checkpoint) / "loop" / "metadata"
    try:
        loop = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(locate(checkpoint), "loop", error) from None
    if not isinstance(loop, dict):
        raise Damaged(f"{locate(checkpoint)}: loop holds no JSON object")
    return loop


class Damaged(UserError):
    """A file of a checkpoint is missing, truncated, or has other contents."""


def _unreadable(checkpoint: Path, item: str, error: Exception) -> UserError:
    if is_damage(error):
        return Damaged(f"{checkpoint}: {item} cannot be read ({_first_line(error)})")
    return _not_damaged(checkpoint, _first_line(error))


def load_params(
    path: str | Path,
    place: Callable[[nnx.State], nnx.State] | None = None,
    dtype: Any = jnp.float32,
    with_base: bool = True,
) -> tuple[DecoderConfig, nnx.State, dict[str, Any]]:
    """Shape, parameters and loop record of a checkpoint, for export and evaluation.

    For adapters, the parameters include their base weights (`lora.join_adapters`), both in the dtypes of the run.

    Args:
      path: one checkpoint, or a run directory for its newest readable one.
      place: maps the abstract parameters to their shardings; default: the first device.
      dtype: of the parameters of a run without adapters, converted from float32 while they are loaded.
      with_base: load the base weights of adapters, too.

    Raises:
      UserError: no checkpoint can be read, or the adapters' base weights are not at their recorded path.
    """
    candidates = processes.broadcast(lambda: find_checkpoints(path))
    for checkpoint in candidates:
        try:
            return processes.all_or_none(lambda: _load_params(absolute(checkpoint), place, dtype, with_base))  # noqa: B023
        except Damaged as error:
            if checkpoint == candidates[-1]:
                raise
            log.warning("%s; trying the previous one", error)
    raise AssertionError("find_checkpoints returns at least one")


def on_host(abstract: nnx.State) -> nnx.State:
    """For `place` of `load_params`: the host's memory; the first device if JAX_PLATFORMS excludes the CPU."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(device), abstract)


def _load_params(
    checkpoint: Path, place: Callable[[nnx.State], nnx.State] | None, dtype: Any, with_base: bool
) -> tuple[DecoderConfig, nnx.State, dict[str, Any]]:
    loop = read_loop(checkpoint)
    try:
        config, abstract = _shape(loop["model"]), _abstract(loop)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # bad numbers or missing fields
        raise Damaged(f"{checkpoint}: loop has no valid model shape ({_first_line(error)})") from None
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = place or (lambda tree: jax.tree.map(lambda _: here, tree))
    record = loop.get("lora")
    read_as = jnp.float32 if record else dtype
    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, read_as), abstract)
    try:
        values = _one_by_one(checkpoint / "params", nnx.to_pure_dict(placed(low, place(abstract))))
    except Exception as error:  # a damaged file can raise anything
        raise _unreadable(checkpoint, "params", error) from error
    params = decoder.with_values(abstract, values)
    if record and with_base:
        params = lora.join_adapters(_base(config, loop, place, checkpoint), params)
    return config, params, loop


def _one_by_one(directory: Path, target: Mapping[str, Any]) -> dict[str, Any]:
    """Loads arrays like the nested dict `target` one by one: only one float32 original is in memory at a time."""
    arrays: dict[str, Any] = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=_for_itself()) as reader:

        def load(target: Mapping[str, Any], into: dict[str, Any], path: tuple[str, ...]) -> None:
            for name, value in target.items():
                if isinstance(value, Mapping):
                    load(value, into.setdefault(name, {}), (*path, name))
                    continue
                one = functools.reduce(lambda tree, key: {key: tree}, reversed((*path, name)), value)
                restore_args = ocp.checkpoint_utils.construct_restore_args(one)
                args = ocp.args.PyTreeRestore(one, restore_args=restore_args, partial_restore=True)
                (into[name],) = jax.tree.leaves(reader.restore(directory, args=args))

        load(target, arrays, ())
    return arrays


def _for_itself() -> ocp.options.MultiprocessingOptions:
    """Orbax options for a restore without a barrier between processes.

    Orbax's barrier after a restore would hang if one process failed to read. `processes.allgather` synchronises
    instead and passes on the error.
    """
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(here, {here}, f"process_{here}")


def lora_record(model: ModelSection, seed: int, path: str) -> dict[str, Any] | None:
    """What a checkpoint of adapters records about their base weights: `path`, or random ones from `seed`."""
    if not model.lora_rank:
        return None
    where = str(Path(path).resolve()) if path else ""
    adapters = {"rank": model.lora_rank, "alpha": model.lora_alpha}
    return {**adapters, "path": where, "name": model.path, "seed": seed, "dtype": model.sampling_dtype}


def _base(
    config: DecoderConfig, loop: Mapping[str, Any], place: Callable[[nnx.State], nnx.State], checkpoint: Path
) -> nnx.State:
    record = loop["lora"]
    dtype = jnp.dtype(record["dtype"])
    if not record["path"]:
        return decoder.random_params(config, record["seed"], dtype, place)
    there = hf.locate_recorded_model(record["path"], record.get("name", ""))
    if there is None:
        raise UserError(
            f"{checkpoint}: its adapters belong to the weights in {record['path']}, which does not exist; accepted: "
            "these weights at that path, of which a symbolic link will do"
        )
    where = hf.resolve(there)
    known = loop.get("settings", {}).get("model.path", {}).get("is")
    if known and settings.fingerprint(where, settings.WEIGHTS) != known:
        raise UserError(f"{checkpoint}: its adapters belong to other weights than those that are in {where} now")
    loaded, base = hf.load_hf(where, place, dtype)
    if loaded != config:
        raise UserError(f"{checkpoint}: its adapters belong to another model than the one in {where}")
    return base


def model_record(config: DecoderConfig) -> dict[str, Any]:
    """The model's shape as stored in `loop["model"]`."""
    return asdict(config)

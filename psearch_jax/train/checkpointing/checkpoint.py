"""Checkpoints with Orbax, and the order in which a run resumes.

A checkpoint directory `checkpoints/STEP` holds three items:
  params: nested dict of the policy's trained float32 arrays (of its adapters with LoRA). Export and evaluation need no
    others.
  optimizer: arrays by position: the optimizer's, the counters of updates and, with PPO, all of the critic.
  loop: JSON with the step, the loader's state, the settings that affect results, the rollouts in flight
    (`train.staleness`), the model's shape, the tokenizer's path and, for adapters, the path of their base weights.

A run with a workdir resumes from the first of these:
  1. the newest readable checkpoint; unreadable newer ones are renamed to `STEP.unreadable`, with a warning;
  2. the weights of `model.path` (or random ones), at step 0.
Then metrics and trajectories are truncated to that step, and the loader continues after the last trained batch.

If no checkpoint can be read, the cause may be disk or memory: the program exits and changes nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from psearch_jax.config import DecoderConfig, Lora, ModelSection
from psearch_jax.models import decoder, hf, lora
from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import absolute, is_remote, locate
from psearch_jax.sharding import attach_shardings
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.state import TrainState
from psearch_jax.types import UserError, first_line

log = logging.getLogger("psearch_jax")
Read = TypeVar("Read")
_OVERHEAD = 8 * 2**20  # bytes of a checkpoint in addition to its arrays: many small files


class Saving:
    """Saves checkpoints to one directory, asynchronously. Orbax writes them atomically and removes old ones.

    Args:
      options: of Orbax's `CheckpointManagerOptions`.
    """

    def __init__(self, directory: Path, **options: Any):
        self.directory = directory
        barriers = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=directory.name)
        cleaning = {"create": True, "cleanup_tmp_directories": True}  # of what interrupted saves left
        options |= cleaning | {"multiprocessing_options": barriers}
        self._manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options))

    def write(self, step: int, loop: Mapping[str, Any], extra: int = 0, **trees: Any) -> None:
        """Starts to save trees of arrays and the JSON-ready `loop`.

        The disk space for them and `extra` more bytes is checked first, because a disk that fills up while Orbax's
        threads write gives pages of tracebacks.

        Raises:
          UserError: this checkpoint or the previous one cannot be written.
        """
        size = int(1.1 * sum(x.nbytes for x in jax.tree.leaves(trees))) + extra + _OVERHEAD

        def check_space() -> None:
            if is_remote(self.directory):  # an object store has no size limit
                return
            free = shutil.disk_usage(self.directory).free
            if free < size:
                raise OSError(errno.ENOSPC, f"it needs {size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free")

        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        args = ocp.args.Composite(loop=ocp.args.JsonSave(dict(loop)), **items)
        with _writing(self.directory):
            processes.allgather(check_space)
            self._manager.save(step, args=args, force=True)

    def rename(self, steps: Sequence[int], suffix: str = "unreadable") -> None:
        """Renames checkpoints to `STEP.suffix`, so that Orbax neither uses nor deletes them."""

        def rename() -> None:
            for step in steps if processes.first() else []:
                target = self.directory / f"{step}.{suffix}"
                while target.exists():
                    target = target.with_name(f"{target.name}.again")
                (self.directory / str(step)).rename(target)
                log.warning("the checkpoint %s is kept as %s", self.directory / str(step), target.name)

        if steps:
            processes.allgather(rename)
            self._manager.reload()

    def latest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Blocks until everything saved is on disk. Raises UserError if a checkpoint cannot be written."""
        with _writing(self.directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        with _writing(self.directory):
            self._manager.close()


class Checkpoints(Saving):
    """The checkpoints of one run directory.

    Args:
      directory: `WORKDIR/checkpoints`.
      keep: how many of the newest are kept.
    """

    def __init__(self, directory: str | Path, keep: int = 3):
        super().__init__(absolute(directory), max_to_keep=keep)

    def save(self, step: int, state: TrainState, loop: Mapping[str, Any]) -> None:
        """Starts to save the state after `step` completed steps. `loop` must be JSON-ready.

        Raises:
          UserError: this checkpoint or the previous one cannot be written.
        """
        params, rest = nnx.to_pure_dict(state.params), _by_position(_rest(state))
        in_flight = len(loop.get("in_flight", {}).get("rollouts", ""))
        self.write(step, {**loop, "step": step}, in_flight, params=params, optimizer=rest)

    def restore(
        self, state: TrainState, accept: Callable[[Mapping[str, Any]], None] = lambda loop: None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restores the newest readable checkpoint.

        Args:
          state: the target shapes and shardings, on any mesh; ShapeDtypeStructs are enough.
          accept: called with a checkpoint's `loop` before its arrays are loaded; it raises to refuse the checkpoint, a
            ValueError if the checkpoint is damaged.

        Raises:
          UserError: the checkpoint has another architecture, or none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        checkpoints = [self.directory / str(step) for step in steps]
        unreadable, restored = _read_newest(checkpoints, lambda checkpoint: self._restore(checkpoint, state, accept))
        self.rename(steps[:unreadable])  # else the run could not save at these steps again
        return restored

    def _restore(
        self, checkpoint: Path, state: TrainState, accept: Callable[[Mapping[str, Any]], None]
    ) -> tuple[TrainState, dict[str, Any]]:
        loop = processes.all_or_none(lambda: read_loop(checkpoint))
        try:
            accept(loop)
        except UserError:
            raise
        except ValueError as error:
            raise Unreadable(f"{checkpoint}: cannot be read ({_first_line(error)})") from error
        _check_shapes(checkpoint, loop, state.params)
        items = {"params": nnx.to_pure_dict(state.params), "optimizer": _by_position(_rest(state))}
        arrays = processes.all_or_none(lambda: _read_arrays(checkpoint, items))
        rest = jax.tree.unflatten(jax.tree.structure(_rest(state)), list(arrays["optimizer"].values()))
        return TrainState(decoder.with_values(state.params, arrays["params"]), *rest), loop


def _read_arrays(checkpoint: Path, items: Mapping[str, Any]) -> Any:
    args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in items.items()})
    handler = ocp.CompositeCheckpointHandler()
    with _reading(checkpoint), ocp.Checkpointer(handler, multiprocessing_options=_without_barriers()) as reader:
        return reader.restore(checkpoint, args=args)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turns errors inside the block into `LostProcess`, or into a UserError about checkpoints in `directory`."""
    try:
        yield
    except Exception as error:  # a full or missing disk can raise anything
        if processes.is_lost(error):  # not the disk
            raise processes.LostProcess(f"saving a checkpoint: {_first_line(error)}") from error
        raise UserError(
            f"{directory}: a checkpoint cannot be written ({_first_line(error)}); earlier ones are complete; "
            "the same command resumes from the newest"
        ) from error


def _rest(state: TrainState) -> tuple[Any, ...]:
    return state.optimizer, state.updates, state.nonfinite_in_a_row, state.critic


def _by_position(tree: Any) -> dict[str, Any]:
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


class Unreadable(UserError):
    """A checkpoint cannot be read: it is damaged, or disk or memory failed."""


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Turns errors inside the block into `Unreadable`."""
    try:
        yield
    except Exception as error:  # a damaged file can raise anything
        raise Unreadable(f"{checkpoint}: cannot be read ({_first_line(error)})") from error


def _read_newest(checkpoints: Sequence[Path], read: Callable[[Path], Read]) -> tuple[int, Read]:
    """The number of checkpoints that cannot be read, and the result of the first one that can.

    A checkpoint counts as damaged only if an earlier one can be read: otherwise the machine may be the cause.

    Args:
      checkpoints: the newest first.

    Raises:
      Unreadable: no checkpoint can be read.
    """
    errors: list[Unreadable] = []
    for checkpoint in checkpoints:
        try:
            result = read(checkpoint)
        except Unreadable as error:
            errors.append(error)
            continue
        for error in errors:
            log.warning("%s; using %s", error, checkpoint)
        return len(errors), result
    raise Unreadable(f"{errors[0]}; nothing was changed, try the same command again") from errors[0]


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # Orbax wraps it in pages of text about the array's layout
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)[:200]}"


def _check_shapes(checkpoint: Path, loop: Mapping[str, Any], params: nnx.State) -> None:
    saved = {path: v.shape for path, v in nnx.to_flat_state(_abstract_params(checkpoint, loop)[1])}
    wanted = {path: v.shape for path, v in nnx.to_flat_state(params)}
    different = [path for path in {**saved, **wanted} if saved.get(path) != wanted.get(path)]
    if different:
        raise UserError(f"{checkpoint}: the checkpoint is of another architecture ({'.'.join(different[0])} differs)")


def _abstract_params(checkpoint: Path, loop: Mapping[str, Any]) -> tuple[DecoderConfig, nnx.State]:
    """The model's shape, and the trained parameters as ShapeDtypeStructs."""
    try:
        raw, record = loop["model"], loop.get("lora")
        config = DecoderConfig(**{**raw, "eos_ids": tuple(raw["eos_ids"])})
        if record:
            return config, lora.abstract_adapters(config, Lora(record["rank"], record["alpha"]))
        return config, decoder.abstract_params(config)[1]
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # bad numbers or missing fields
        raise Unreadable(f"{checkpoint}: loop has no valid model shape ({_first_line(error)})") from None


# ---- finding and loading ----


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


def find_checkpoint(path: str | Path) -> Path:
    """The first of `find_checkpoints`."""
    return find_checkpoints(path)[0]


def _is_complete(step: Path) -> bool:
    """Whether a directory is a complete checkpoint. On an object store, Orbax marks completion with a file."""
    return (step / "loop").is_dir() and (not is_remote(step) or (step / "commit_success.txt").exists())


def read_loop(checkpoint: str | Path) -> dict[str, Any]:
    """The JSON item of one checkpoint directory.

    Raises:
      Unreadable: it cannot be read.
    """
    checkpoint = locate(checkpoint)
    with _reading(checkpoint):
        loop = json.loads((checkpoint / "loop" / "metadata").read_text(encoding="utf-8"))
    if not isinstance(loop, dict):
        raise Unreadable(f"{checkpoint}: loop holds no JSON object")
    return loop


def load_params(
    path: str | Path,
    shard: Callable[[nnx.State], nnx.State] | None = None,
    dtype: Any = jnp.float32,
    with_base: bool = True,
) -> tuple[DecoderConfig, nnx.State, dict[str, Any]]:
    """Shape, parameters and loop record of a checkpoint, for export and evaluation.

    For adapters, the parameters include their base weights (`lora.join_adapters`), both in the dtypes of the run.

    Args:
      path: one checkpoint, or a run directory for its newest readable one.
      shard: maps the abstract parameters to their shardings; default: the host's memory.
      dtype: of the parameters of a run without adapters, converted from float32 while they are loaded.
      with_base: load the base weights of adapters, too.

    Raises:
      UserError: no checkpoint can be read, or the adapters' base weights are not at their recorded path.
    """
    checkpoints = processes.broadcast(lambda: find_checkpoints(path))

    def read(checkpoint: Path) -> tuple[DecoderConfig, nnx.State, dict[str, Any]]:
        return processes.all_or_none(lambda: _load_params(absolute(checkpoint), shard or _on_host, dtype, with_base))

    return _read_newest(checkpoints, read)[1]


def _on_host(abstract: nnx.State) -> nnx.State:
    """Shardings in the host's memory; on the first device if JAX_PLATFORMS excludes the CPU."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(device), abstract)


def _load_params(
    checkpoint: Path, shard: Callable[[nnx.State], nnx.State], dtype: Any, with_base: bool
) -> tuple[DecoderConfig, nnx.State, dict[str, Any]]:
    loop = read_loop(checkpoint)
    config, abstract = _abstract_params(checkpoint, loop)
    record = loop.get("lora")
    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32 if record else dtype), abstract)
    target = nnx.to_pure_dict(attach_shardings(low, shard(abstract)))
    args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    # The float32 originals in memory at a time are limited to the largest array.
    gigabytes = 1 + max(4 * x.size for x in jax.tree.leaves(low)) // 10**9
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=gigabytes)
    with _reading(checkpoint), ocp.Checkpointer(handler, multiprocessing_options=_without_barriers()) as reader:
        values = reader.restore(checkpoint / "params", args=args)
    params = decoder.with_values(abstract, values)
    if record and with_base:
        params = lora.join_adapters(_load_base(config, loop, shard, checkpoint), params)
    return config, params, loop


def _without_barriers() -> ocp.options.MultiprocessingOptions:
    """Orbax options for a restore without a barrier between processes.

    Orbax's barrier after a restore would hang if one process failed to read. `processes.allgather` synchronises
    instead and passes on the error.
    """
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(index, {index}, f"process_{index}")


# ---- records ----


def lora_record(model: ModelSection, seed: int, path: str) -> dict[str, Any] | None:
    """What a checkpoint of adapters records about their base weights: `path`, or random ones from `seed`."""
    if not model.lora_rank:
        return None
    path = str(Path(path).resolve()) if path else ""
    adapters = {"rank": model.lora_rank, "alpha": model.lora_alpha}
    return {**adapters, "path": path, "name": model.path, "seed": seed, "dtype": model.sampling_dtype}


def _load_base(
    config: DecoderConfig, loop: Mapping[str, Any], shard: Callable[[nnx.State], nnx.State], checkpoint: Path
) -> nnx.State:
    record = loop["lora"]
    dtype = jnp.dtype(record["dtype"])
    if not record["path"]:
        return decoder.random_params(config, record["seed"], dtype, shard)
    located = hf.locate_recorded_model(record["path"], record.get("name", ""))
    if located is None:
        raise UserError(
            f"{checkpoint}: its adapters belong to the weights in {record['path']}, which does not exist; accepted: "
            "these weights at that path, of which a symbolic link will do"
        )
    path = hf.resolve(located)
    known = loop.get("settings", {}).get("model.path", {}).get("is")
    if known and settings.hash_files(path, settings.WEIGHTS) != known:
        raise UserError(f"{checkpoint}: its adapters belong to other weights than those that are in {path} now")
    loaded, base = hf.load_hf(path, shard, dtype)
    if loaded != config:
        raise UserError(f"{checkpoint}: its adapters belong to another model than the one in {path}")
    return base


def model_record(config: DecoderConfig) -> dict[str, Any]:
    """The model's shape as stored in `loop["model"]`."""
    return asdict(config)

"""Ratios that can be summed, and the writer of metrics.jsonl and TensorBoard events (process 0 only).

Files on an object store cannot be appended to. For such a directory both files are written to a local disk and
uploaded in full: before every checkpoint, so that a resumed run lacks no row, and otherwise at most every `PUT_S`
seconds.
"""

from __future__ import annotations

import importlib
import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import is_remote, locate, write_atomically
from psearch_jax.types import UserError
from retrieval.protocol import text_sha256

# The phases of a training step that do not overlap: the sum of their `PHASE_s` is its duration.
PHASES = ("rollout", "reward", "logprobs", "update")
PUT_S = 30.0
_ROWS = "metrics.jsonl"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ratio:
    """A mean as a sum and a count, which add up over micro-batches, rows and devices before the one division."""

    total: Any
    count: Any

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN when nothing was counted."""
        count = float(self.count)
        return float(self.total) / count if count else math.nan


def mean(values: Any) -> float:
    """Mean of a sequence of numbers; NaN when it is empty."""
    values = [float(v) for v in values]
    return Ratio(sum(values), len(values)).value


# The weight of an update in the means over the updates of a step. That of a single metric NAME is NAME/trained_tokens:
# it may be a mean over fewer tokens, or over trajectories.
WEIGHT = "trained_tokens"


class MetricsWriter:
    """Appends one JSON object per step to `metrics.jsonl` and writes its numbers to TensorBoard.

    Every process may have a writer; only process 0 writes.

    Args:
      log: `wandb:PROJECT` or `trackio:PROJECT`, to log the numbers there as well; "": not.
      config: for that log.

    Raises:
      UserError: `log` has another form, or its package is not installed.
    """

    def __init__(
        self, directory: str | Path, active: bool | None = None, log: str = "", config: Mapping[str, Any] = {}
    ):
        self._active = processes.first() if active is None else active
        self._target = locate(directory)
        self._local, self._spool, self._put = self._target, None, -math.inf
        self._board = self._log = None
        if self._active:
            if log:
                package, project = load_log(log)
                # A resumed run is found by its name, or at W&B by its id.
                run_id = {"id": text_sha256(str(self._target))[:16]} if log.startswith("wandb") else {}
                named = {"project": project, "name": self._target.name, **run_id}
                self._log = package.init(**named, config=dict(config), resume="allow")
            from tensorboardX import SummaryWriter

            if is_remote(self._target):
                self._spool = tempfile.TemporaryDirectory(prefix="metrics-")
                self._local = Path(self._spool.name)
                earlier = self._target / _ROWS
                if earlier.exists():
                    (self._local / _ROWS).write_bytes(earlier.read_bytes())
            self._local.mkdir(parents=True, exist_ok=True)
            # Without a suffix, two starts within a second would use the same name, and overwrite it on a store.
            self._board = SummaryWriter(str(self._local / "tensorboard"), filename_suffix=f".{time.time_ns()}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line for `step`; values that are not finite become null, because JSON has no NaN."""
        if self._board is None:
            return
        row = {"step": step, **{k: _json_number(v) for k, v in values.items()}}
        with (self._local / _ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._write_events(step, row)
        if time.monotonic() - self._put >= PUT_S:
            self.flush()

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Adds values to the last line, if it is the one of `step`."""
        if self._board is None:
            return
        file = self._local / _ROWS
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        row = json.loads(lines.pop()) if lines else {}
        if row.get("step") == step:
            added = {k: _json_number(v) for k, v in values.items()}
            write_atomically(file, "".join(f"{line}\n" for line in (*lines, json.dumps({**row, **added}))))
            self._write_events(step, added)

    def _write_events(self, step: int, row: Mapping[str, Any]) -> None:
        assert self._board is not None
        for key, value in row.items():
            if key != "step" and isinstance(value, (int, float)):
                self._board.add_scalar(key, value, step)
        self._board.flush()
        if self._log is not None:
            self._log.log({key: value for key, value in row.items() if key != "step" and value is not None}, step=step)

    def flush(self) -> None:
        """Uploads everything written so far if the directory is on an object store; does nothing on a disk."""
        if self._spool is None:
            return
        for file in sorted(self._local.rglob("*")):
            if file.is_file():
                write_atomically(self._target / file.relative_to(self._local).as_posix(), file.read_bytes())
        self._put = time.monotonic()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._log is not None:
            self._log.finish()
        if self._spool is not None:
            self.flush()
            self._spool.cleanup()


def load_log(log: str) -> tuple[Any, str]:
    """The package and the project of `wandb:PROJECT` or `trackio:PROJECT`: both packages have the same interface.

    Raises:
      UserError: as `MetricsWriter`.
    """
    package, _, project = log.partition(":")
    if package not in ("wandb", "trackio") or not project:
        raise UserError(f"--log={log}: accepted: wandb:PROJECT or trackio:PROJECT")
    try:
        return importlib.import_module(package), project
    except ImportError as error:
        raise UserError(
            f"--log={log}: the package {package} is not installed; accepted after `pip install {package}`"
        ) from error


def _json_number(value: Any) -> float | int | None:
    if isinstance(value, (bool, int)):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


def cut_jsonl(path: Path, before_step: int) -> int:
    """Drops rows with `step >= before_step` and incomplete lines, so that a resumed run writes no step twice.

    Returns:
      The number of complete rows that it dropped.
    """
    if not path.is_file():
        return 0
    kept, dropped = [], 0
    for line in path.read_bytes().splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):  # not JSON, not UTF-8, or not a row
            continue
        if step < before_step:
            kept.append(line)
        else:
            dropped += 1
    write_atomically(path, b"".join(line + b"\n" for line in kept))
    return dropped

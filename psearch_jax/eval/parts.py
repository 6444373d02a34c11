"""Long work in parts: each is written when it is complete, so a killed call resumes after the last complete part.

The parts are fixed, so the rows of a resumed call are identical to those of an uninterrupted one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from psearch_jax.rollout.rollouts import Progress
from psearch_jax.runtime import processes, progress
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.types import UserError

T = TypeVar("T")
_SETTINGS = "settings.json"


def begin_parts(folder: Path, settings: Any, out: Path) -> None:
    """Starts parts with these settings, or resumes those in the folder. Call it in one process only.

    Args:
      settings: everything that determines the parts, JSON-serialisable.
      out: named in the error.

    Raises:
      UserError: the folder has parts with other settings.
    """
    check_settings(out, read_settings(folder), settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _SETTINGS, json.dumps({"settings": settings}) + "\n")


def read_settings(folder: Path) -> Any:
    """The settings with which the parts in a folder were begun; None if there are none."""
    return read_field(folder / _SETTINGS, "settings")


def run_parts(
    folder: Path, tasks: Sequence[T], tasks_per_part: int, work: Callable[[Sequence[T], Progress], str]
) -> list[Path]:
    """The files of all parts, in order; those that are missing are made. The first process writes.

    Args:
      work: the content of a part; called in all processes, with a function to report (done, total) of any unit.
    """
    files = []
    with progress.step("evaluation", len(tasks)):
        for part, start in enumerate(range(0, len(tasks), tasks_per_part)):
            group = tasks[start : start + tasks_per_part]
            files.append(folder / f"{part:06d}.jsonl")
            if not processes.broadcast(files[-1].is_file):

                def report(done: int, of: int, start: int = start, size: int = len(group)) -> None:
                    progress.reach(start + done * size // max(of, 1))

                content = work(group, report)
                processes.broadcast(functools.partial(write_atomically, files[-1], content))
    return files


def check_settings(out: Path, saved: Any, wanted: Any) -> None:
    """Raises `UserError`, with the first difference, if there are saved settings that differ from those wanted."""
    wanted = json.loads(json.dumps(wanted))
    if saved not in (None, wanted):
        difference = describe_difference(saved, wanted)
        raise UserError(f"--out={out}: holds results with {difference}; accepted: the same, or another directory")


def describe_difference(saved: Any, wanted: Any, name: str = "") -> str:
    """The first difference between two settings, as text for an error message."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in {**saved, **wanted}:
            if saved.get(key) != wanted.get(key):
                return describe_difference(saved.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    return f"{name} {saved!r}, found {wanted!r}"


def read_field(file: Path, field: str) -> Any:
    """A field of a JSON file; None if there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))[field]
    except (OSError, ValueError, KeyError, TypeError):
        return None

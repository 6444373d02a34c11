"""Where an index is made, beside its place: what is done there and what for, so that a build goes on where it stopped.

    .NAME.partial/lock            held by the build that works here
    .NAME.partial/steps.json      the base, and each finished step with its plan and its result
    .NAME.partial/vectors.npy     the encoded corpus; encoded.json says of which texts, by which encoder
    .NAME.partial/index/          the directory that is being made

The encoding takes hours and depends on texts and encoder alone. What depends on the base (corpus, encoder, shards) or
on the plan of a step (settings of the tree, the target of its search) is made again when these change, and no more.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STEPS = "steps.json"


class Workplace:
    """The folder of an unfinished build."""

    def __init__(self, folder: Path):
        self.folder, self.index = folder, folder / "index"
        self._path = folder / STEPS
        try:
            state = json.loads(self._path.read_bytes())
            self._base, self._steps = state["base"], dict(state["steps"])
        except (OSError, ValueError, TypeError, KeyError):
            self._base, self._steps = None, {}

    @property
    def base(self) -> dict[str, Any] | None:
        """What the index that lies here was begun for."""
        return self._base

    def begin(self, base: dict[str, Any]) -> None:
        """Go on with the index of `base` (JSON values), or start an empty one."""
        if self._base != base or not self.index.is_dir():
            shutil.rmtree(self.index, ignore_errors=True)
            self._base, self._steps = base, {}
            self._write()
            self.index.mkdir()

    def once(self, step: str, plan: Any, make: Callable[[], Any]) -> Any:
        """What `make()` returned when this step was last done by this plan, or returns now; both are JSON values."""
        if not self.done(step, plan):
            self._steps.pop(step, None)
            self._write()  # `make` overwrites what an earlier plan made
            self._steps[step] = {"plan": plan, "result": make()}
            self._write()
        return self._steps[step]["result"]

    def done(self, step: str, plan: Any) -> bool:
        """Whether the step has been finished by this plan."""
        return step in self._steps and self._steps[step]["plan"] == plan

    def _write(self) -> None:
        beside = self.folder / f"{STEPS}.tmp"
        beside.write_text(json.dumps({"base": self._base, "steps": self._steps}), encoding="utf-8")
        beside.replace(self._path)


@contextmanager
def workplace(folder: Path) -> Iterator[Workplace]:
    """Hold `folder` alone. Raises `OSError` while another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{folder} is in use by another build") from None
        yield Workplace(folder)

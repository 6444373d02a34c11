"""The folder of an unfinished index build, with a record of the finished steps, so that a killed build can resume.

    .NAME.partial/lock            held by the running build
    .NAME.partial/steps.json      the base, and each finished step with its plan and its result
    .NAME.partial/vectors.npy     the encoded corpus; encoded.json records the texts and the encoder
    .NAME.partial/index/          the unfinished index directory

The encoding takes hours and depends only on texts and encoder. A change of the base (corpus, encoder, shards) repeats
all other steps. A change of a step's plan (tree settings, the recall target) repeats that step.
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


class BuildJournal:
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
        """The base of the unfinished index, or None."""
        return self._base

    def begin(self, base: dict[str, Any]) -> None:
        """Resume the index of `base` (JSON values), or start an empty one."""
        if self._base != base or not self.index.is_dir():
            shutil.rmtree(self.index, ignore_errors=True)
            self._base, self._steps = base, {}
            self._write()
            self.index.mkdir()

    def once(self, step: str, plan: Any, make: Callable[[], Any]) -> Any:
        """The result of `make()` from the last time the step was done with this plan, or from now (JSON values).

        A step that is repeated makes the later steps of its folder (`FOLDER/NAME`) undone: they used its files.
        """
        if not self.done(step, plan):
            names, folder = list(self._steps), step.rpartition("/")[0]
            later = names[names.index(step) :] if step in names else []
            for name in [name for name in later if name.rpartition("/")[0] == folder]:
                del self._steps[name]
            self._write()  # first, because `make` overwrites the files of an earlier plan
            self._steps[step] = {"plan": plan, "result": make()}
            self._write()
        return self._steps[step]["result"]

    def done(self, step: str, plan: Any) -> bool:
        """Whether the step was finished with this plan."""
        return step in self._steps and self._steps[step]["plan"] == plan

    def _write(self) -> None:
        temporary = self.folder / f"{STEPS}.tmp"
        temporary.write_text(json.dumps({"base": self._base, "steps": self._steps}), encoding="utf-8")
        temporary.replace(self._path)


@contextmanager
def build_journal(folder: Path) -> Iterator[BuildJournal]:
    """Lock `folder` for this process. Raises `OSError` while another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{folder} is in use by another build") from None
        yield BuildJournal(folder)

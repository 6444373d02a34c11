"""The installed commands: `psearch-train` runs launch/train.py, and so on for the other programs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def main() -> None:
    """Runs the program that the command is named after, as `python launch/NAME.py` does.

    The program becomes `__main__`, because absl lists the flags and prints the docstring of that module for --help.
    """
    name = Path(sys.argv[0]).stem.removeprefix("psearch-").replace("-", "_")
    installed, checkout = PACKAGE / "programs", PACKAGE.parent  # setup.py installs launch/ into the former
    root = installed if installed.is_dir() else checkout
    runpy.run_path(str(root / "launch" / f"{name}.py"), run_name="__main__")

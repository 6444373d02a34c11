"""Generates docs/configuration.md from the declarations of the config's fields: `python docs/reference.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from psearch_jax.config import Config
from psearch_jax.config.setting import Setting

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
OPENING = """# Configuration

All config fields of a run, by section. `python docs/reference.py` generates this page from the code; do not edit it.

A file of configs/ changes some of the defaults, and flags override single fields:

```
python launch/train.py --config=configs/qwen7b.py --config.data.source=train.jsonl --config.rollout.samples=8 \\
    --config.retrieval.index=index --workdir=runs/qwen7b
```

An unknown field, a value of the wrong type, or one that is not accepted or contradicts another field
(psearch_jax/limits.py) ends the program with a one-line message before any computation starts. A run started again
with the same `--workdir` resumes. The column "on resume" says what it must keep, unless you pass `--allow_changes`:
`value`: the value; `content`: the content of what the field names, in any place; `may change`: nothing. Every run
directory contains the complete config, config.json. [own.md](own.md) shows how to write a config file."""


def page() -> str:
    """The text of the page."""
    sections = [f for f in dataclasses.fields(Config) if "setting" not in f.metadata]
    parts = [OPENING, "## Top-level fields", _fields(Config)]
    for section in sections:
        about = " ".join(inspect.getdoc(type(section.default)).split())
        parts += [f"## {section.name}", about, _fields(type(section.default))]
    files = [f"- `configs/{file.name}`: {_first_sentence(file)}" for file in sorted((ROOT / "configs").glob("*.py"))]
    parts += ["## Config files", "\n".join(files)]
    return "\n\n".join(parts) + "\n"


def _fields(cls: type) -> str:
    hints = typing.get_type_hints(cls)
    rows = []
    for field in (f for f in dataclasses.fields(cls) if "setting" in f.metadata):
        setting = field.metadata["setting"]
        accepted = _accepted(hints[field.name], setting)
        rows.append([f"`{field.name}`", f"`{json.dumps(field.default)}`", accepted, setting.resume.value, setting.doc])
    return _table(["field", "default", "accepted", "on resume", "meaning"], rows)


def _accepted(hint: Any, setting: Setting) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    kind = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[hint]
    return f"{kind}, {setting.accepted.words}" if setting.accepted else kind


def _first_sentence(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *cells])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Generates docs/configuration.md, the reference of a run's config: `python docs/reference.py`.

Only the headings and the text between the entries are written here. Descriptions, defaults, accepted values and what a
resumed run may change come from the declarations in psearch_jax/config/*_sections.py, the rules between fields from
psearch_jax/limits.py, and the changes of each config file from configs/. A test checks that the page is up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from psearch_jax import limits
from psearch_jax.config import PRESETS, Config, DecoderConfig, Method, from_mapping, with_method
from psearch_jax.config.setting import Setting, settings_of
from psearch_jax.sft.cold_start import ToySFTConfig
from psearch_jax.train.checkpointing.settings import fields

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
COLD_START = "toy_sft"  # the only file in configs/ with another config class, ToySFTConfig
KINDS_OF_VALUES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
OPENING = """# Configuration

All config fields of a run, by section. `python docs/reference.py` generates this page from the code; do not edit it.

A run is configured by a file of [configs/](#config-files), which changes some of the defaults below, and by flags,
which override single fields:

```
python launch/train.py --config=configs/qwen7b.py --config.data.source=train.jsonl --config.rollout.samples=8 \\
    --config.retrieval.index=index --workdir=runs/qwen7b
```

- An unknown field, a value of the wrong type or a value out of range ends the program with a one-line message before
  any computation starts. Some fields [must agree](#what-must-agree) with others.
- `--config.model.preset` selects a [shape](#presets) for random weights. With `--config.model.path`, the shape comes
  with the weights.
- `--config.method` sets the few fields in which a [baseline](#methods) differs.
- A run started again with the same `--workdir` resumes. Each entry says whether the field may change then. A change to
  any other field is refused unless you pass `--allow_changes`.
- Every run directory contains the complete config, config.json. [own.md](own.md) shows how to write a config file."""


def main() -> None:
    """Writes docs/configuration.md."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The text of the page."""
    parts = [OPENING, *_sections(), _agreement(), _methods(), _presets(), *_files()]
    return "\n\n".join(parts) + "\n"


def rules() -> list[str]:
    """The messages of limits.py about several fields, with … for each value that the message inserts."""
    messages = []
    for node in ast.walk(ast.parse(inspect.getsource(limits))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            message = _template(node.exc.args[0])
            if not message.startswith("config.…: found"):  # a limit of a single field is part of the field's entry
                messages.append((node.lineno, message))
    return [message for _, message in sorted(messages)]


def config_files() -> dict[str, tuple[str, dict[str, Any]]]:
    """For each file of configs/ the first paragraph of its docstring, and the fields that it changes."""
    files, defaults = {}, fields(Config())
    for file in sorted((ROOT / "configs").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        about = " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())
        values = {}
        if file.stem != COLD_START:
            values = fields(from_mapping(module.get_config().to_dict()))
        files[file.name] = about, {name: value for name, value in values.items() if value != defaults[name]}
    return files


# ---- parts of the page ----


def _sections() -> Iterable[str]:
    yield "## Top-level fields"
    yield from _entries(Config)
    for section in (f for f in dataclasses.fields(Config) if "setting" not in f.metadata):
        about = [" ".join(paragraph.split()) for paragraph in inspect.getdoc(type(section.default)).split("\n\n")]
        yield "\n\n".join([f"## {section.name}", *about])
        yield from _entries(type(section.default), f"{section.name}.")


def _entries(cls: type, prefix: str = "") -> Iterable[str]:
    hints, between = typing.get_type_hints(cls), rules()
    for field in (f for f in dataclasses.fields(cls) if "setting" in f.metadata):
        name, setting = f"{prefix}{field.name}", field.metadata["setting"]
        facts = [f"Default `{_shown(field.default)}`", _accepted(hints[field.name], setting), setting.resume.value]
        if any(_speaks_of(rule, name) for rule in between):
            facts.append("[must agree](#what-must-agree) with others")
        yield f"### {name}\n\n{setting.doc}\n\n{'; '.join(facts)}."


def _speaks_of(rule: str, name: str) -> bool:
    """Whether a rule names a field: with its section, or without it if the rule's first field has the same section."""
    section, _, own = name.rpartition(".")
    dotted = re.search(rf"\b{re.escape(name)}\b", rule)
    undotted = section and re.match(rf"config\.{section}\b", rule) and re.search(rf"(?<![\w.]){own}\b", rule)
    return bool(section and (dotted or undotted))


def _accepted(hint: Any, setting: Setting) -> str:
    """The accepted values of a field with the type `hint`."""
    accepted = setting.accepted
    if typing.get_origin(hint) is typing.Literal:
        words = [f"`{value}`" for value in typing.get_args(hint)]
    else:
        words = [] if accepted and hint is str else [KINDS_OF_VALUES[hint]]
    if accepted:
        words.append(f"in training {accepted.words}" if setting.training_only else accepted.words)
    return ", ".join(words)


def _agreement() -> str:
    lines = ["## What must agree", "The messages about fields that do not agree, with … for the values:"]
    return "\n\n".join([*lines, "\n".join(f"- `{rule}`" for rule in rules())])


def _methods() -> str:
    defaults = fields(Config())
    rows = []
    for method in typing.get_args(Method):
        values = fields(with_method(Config(method=method)))
        rows += [
            [f"`{method}`", _linked(name), f"`{_shown(value)}`"]
            for name, value in values.items()
            if value != defaults[name] and name != "method"
        ]
    return "\n\n".join(["## Methods", inspect.getdoc(with_method), _table(["method", "field", "value"], rows)])


def _presets() -> str:
    columns = [f.name for f in dataclasses.fields(DecoderConfig) if f.default is dataclasses.MISSING]
    rows = [[f"`{name}`", *(_shown(getattr(shape, c)) for c in columns)] for name, shape in PRESETS.items()]
    heading = "## Presets\n\nThe model shapes that `model.preset` accepts."
    return f"{heading}\n\n{_table(['preset', *columns], rows)}"


def _files() -> Iterable[str]:
    defaults = fields(Config())
    yield "## Config files\n\nThe fields that each file of configs/ changes; all others keep their defaults."
    for name, (about, changed) in config_files().items():
        parts = [f"### configs/{name}", about]
        if name.removesuffix(".py") == COLD_START:
            of = {n: functools.reduce(getattr, n.split("."), ToySFTConfig()) for n in settings_of(ToySFTConfig)}
            rows = [[f"`{n}`", f"`{_shown(of[n])}`", s.doc] for n, s in settings_of(ToySFTConfig).items()]
            parts += ["A config of `launch/sft.py` with other fields:", _table(["field", "default", "meaning"], rows)]
        else:
            rows = [[_linked(n), f"`{_shown(defaults[n])}`", f"`{_shown(v)}`"] for n, v in changed.items()]
            parts.append(_table(["field", "default", "here"], rows))
        yield "\n\n".join(parts)


# ---- reading the code ----


def _template(node: ast.expr) -> str:
    """A string of the code, with … for each value that an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ast.literal_eval(node)


# ---- Markdown ----


def _shown(value: Any) -> str:
    return json.dumps(value)


def _linked(name: str) -> str:
    return f"[{name}](#{name.replace('.', '')})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

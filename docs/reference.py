"""Generates docs/configuration.md, the reference of a run's config: `python docs/reference.py`.

Only the headings and the text between the entries are written here. The description of a field is the comment above
or after it in psearch_jax/config.py. Its accepted values come from psearch_jax/limits.py, whether a resumed run may
change it from psearch_jax/train/checkpointing/settings.py, and the changes of each config file from configs/. A test
checks that the page is up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import io
import json
import re
import tokenize
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from psearch_jax import config, limits
from psearch_jax.config import PRESETS, Config, from_mapping, with_method
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.settings import fields

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
COLD_START = "toy_sft"  # the only file in configs/ with another config class, ToySFTConfig
KINDS_OF_VALUES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
ON_RESUME = (
    (settings.DECIDES_NUMBERS, "a resumed run must keep it"),
    (settings.DECIDES_BY_CONTENT, "a resumed run must have the same content, but may load it from another place"),
    (settings.FREE_TO_CHANGE, "a resumed run may change it"),
)
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


def explanations() -> dict[str, str]:
    """The comment in config.py on each field and section, by dotted name; "" without a comment."""
    comments = _comments(inspect.getsource(config))
    by_name = {}
    for top in dataclasses.fields(Config):
        by_name[top.name] = comments["Config"][top.name]
        section = _section_class(top.name)
        if section:
            by_name |= {f"{top.name}.{name}": comments[section.__name__][name] for name in _names(section)}
    return by_name


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
    comments, defaults = explanations(), fields(Config())
    ruled = {name for rule in rules() for name in defaults if _speaks_of(rule, name)}
    yield "## Top-level fields"
    for name in (n for n in comments if n in defaults and "." not in n):
        yield _field(name, comments[name], defaults[name], name in ruled)
    for section in (n for n in comments if n not in defaults):
        own = _section_class(section).__dict__.get("__doc__") or ""
        generated = own.startswith(f"{_section_class(section).__name__}(")  # by @dataclass
        more = "" if generated else " ".join(own.split())
        yield "\n\n".join(filter(None, [f"## {section}", f"Section `{section}`: {comments[section]}.", more]))
        for name in _names(_section_class(section)):
            dotted = f"{section}.{name}"
            yield _field(dotted, comments[dotted], defaults[dotted], dotted in ruled)


def _field(name: str, said: str, default: Any, ruled: bool) -> str:
    facts = [f"Default `{_shown(default)}`", _accepted(name)]
    facts += [words for names, words in ON_RESUME if name in names]
    if ruled:
        facts.append("[must agree](#what-must-agree) with others")
    values = [f"`{word}`: {', '.join(getattr(config, word))}." for word in re.findall(r"\b[A-Z]+_[A-Z]+\b", said)]
    return "\n\n".join([f"### {name}", " ".join([_sentence(said), *values]), "; ".join(facts) + "."])


def _speaks_of(rule: str, name: str) -> bool:
    """Whether a rule names a field: with its section, or without it if the rule's first field has the same section."""
    section, _, own = name.rpartition(".")
    dotted = re.search(rf"\b{re.escape(name)}\b", rule)
    undotted = section and re.match(rf"config\.{section}\b", rule) and re.search(rf"(?<![\w.]){own}\b", rule)
    return bool(section and (dotted or undotted))


def _accepted(name: str) -> str:
    section, _, own = name.rpartition(".")
    hint = typing.get_type_hints(_section_class(section) if section else Config)[own]
    limit, training = limits.LIMITS.get(name), limits.TRAINING_LIMITS.get(name)
    if typing.get_origin(hint) is typing.Literal:
        words = [", ".join(f"`{value}`" for value in typing.get_args(hint))]
    else:
        words = [] if limit and hint is str else [KINDS_OF_VALUES[hint]]
    words += [limit.accepted] if limit else []
    words += [f"in training {training.accepted}"] if training else []
    return ", ".join(words)


def _agreement() -> str:
    lines = ["## What must agree", "The messages about fields that do not agree, with … for the values:"]
    return "\n\n".join([*lines, "\n".join(f"- `{rule}`" for rule in rules())])


def _methods() -> str:
    defaults = fields(Config())
    rows = []
    for method in typing.get_args(config.Method):
        values = fields(with_method(Config(method=method)))
        rows += [
            [f"`{method}`", _linked(name), f"`{_shown(value)}`"]
            for name, value in values.items()
            if value != defaults[name] and name != "method"
        ]
    return "\n\n".join(["## Methods", inspect.getdoc(with_method), _table(["method", "field", "value"], rows)])


def _presets() -> str:
    names = _names(config.DecoderConfig)
    comments = _comments(inspect.getsource(config))["DecoderConfig"]
    letters = [name for name in names if re.match(r"[A-Z]\b", comments[name])]
    heads = ["preset", *(f"{name} ({comments[name][0]})" for name in letters)]
    rows = [[f"`{name}`", *(str(getattr(shape, n)) for n in letters)] for name, shape in PRESETS.items()]
    return "\n\n".join(["## Presets", "The model shapes that `model.preset` accepts.", _table(heads, rows)])


def _files() -> Iterable[str]:
    defaults = fields(Config())
    yield "## Config files\n\nThe fields that each file of configs/ changes; all others keep their defaults."
    for name, (about, changed) in config_files().items():
        parts = [f"### configs/{name}", about]
        if name.removesuffix(".py") == COLD_START:
            parts.append(
                "A config of `launch/sft.py` with the fields of `ToySFTConfig` "
                "([psearch_jax/sft/cold_start.py](../psearch_jax/sft/cold_start.py))."
            )
        else:
            rows = [[_linked(n), f"`{_shown(defaults[n])}`", f"`{_shown(v)}`"] for n, v in changed.items()]
            parts.append(_table(["field", "default", "here"], rows))
        yield "\n\n".join(parts)


# ---- reading the code ----


def _comments(source: str) -> dict[str, dict[str, str]]:
    """For each class and field of a source text, the comment above the field followed by the one on its last line."""
    alone, trailing = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines = alone if token.line.lstrip().startswith("#") else trailing
            lines[token.start[0]] = token.string.lstrip("# ").rstrip()
    out: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            own = out[node.name] = {}
            for field in (f for f in node.body if isinstance(f, ast.AnnAssign)):
                above, line = [], field.lineno - 1
                while line in alone:
                    above.insert(0, alone[line])
                    line -= 1
                own[field.target.id] = " ".join(
                    [*above, *([trailing[field.end_lineno]] if field.end_lineno in trailing else [])]
                )
    return out


def _template(node: ast.expr) -> str:
    """A string of the code, with … for each value that an f-string inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ast.literal_eval(node)


def _section_class(name: str) -> type | None:
    hint = typing.get_type_hints(Config)[name]
    return hint if dataclasses.is_dataclass(hint) else None


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


# ---- Markdown ----


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _shown(value: Any) -> str:
    return json.dumps(value)


def _linked(name: str) -> str:
    return f"[{name}](#{name.replace('.', '')})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

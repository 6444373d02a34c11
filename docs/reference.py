"""Writes docs/configuration.md, the reference of a run's config, from the code: `python docs/reference.py`.

Nothing on the page is typed here but its headings and what joins them. What a field is for is the comment above or
behind it in psearch_jax/config.py; what it accepts stands in psearch_jax/limits.py; whether a resumed run may change
it, in psearch_jax/train/settings.py; what a config file changes, in configs/. A test holds the page to them.
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
from psearch_jax.train import settings
from psearch_jax.train.settings import fields

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
COLD_START = "toy_sft"  # of configs/, the one of another program
KINDS_OF_VALUES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
ON_RESUME = (
    (settings.DECIDES_NUMBERS, "a resumed run keeps it"),
    (settings.DECIDES_BY_CONTENT, "a resumed run keeps what is there, and may find it elsewhere"),
    (settings.FREE_TO_CHANGE, "a resumed run may change it"),
)
OPENING = """# Configuration

Every field of a run, by section. `python docs/reference.py` writes this page from the code; do not edit it.

A run is a file of [configs/](#config-files), which states what differs from the defaults below, and flags, which set
single fields over it:

```
python launch/train.py --config=configs/qwen7b.py --config.data.source=train.jsonl --config.rollout.samples=8 \\
    --config.retrieval.index=index --workdir=runs/qwen7b
```

- A name that is not there, a value of the wrong type and one that is out of range end the program with one line,
  before anything is computed. Some fields [must agree](#what-must-agree) with others.
- `--config.model.preset` names a [shape](#presets) for random weights; with `--config.model.path` the weights bring
  theirs.
- `--config.method` sets the few fields by which a [baseline](#methods) differs.
- A run that is started again with the same `--workdir` resumes. Each field says whether it may have another value
  then; one that is to be kept and is not is refused, unless `--allow_changes` is given.
- A run directory holds all of them in config.json; a config file of your own is shown in [own.md](own.md)."""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    parts = [OPENING, *_sections(), _agreement(), _methods(), _presets(), *_files()]
    return "\n\n".join(parts) + "\n"


def explanations() -> dict[str, str]:
    """What the comments of config.py say of each field and section, by dotted name; "" where they say nothing."""
    said = _comments(inspect.getsource(config))
    found = {}
    for top in dataclasses.fields(Config):
        found[top.name] = said["Config"][top.name]
        section = _section_class(top.name)
        if section:
            found |= {f"{top.name}.{name}": said[section.__name__][name] for name in _names(section)}
    return found


def rules() -> list[str]:
    """What limits.py says when fields are at odds, with … in place of what was found."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(limits))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            message = _template(node.exc.args[0])
            if not message.startswith("config.…: found"):  # of one field alone: it stands beside the field
                found.append((node.lineno, message))
    return [message for _, message in sorted(found)]


def config_files() -> dict[str, tuple[str, dict[str, Any]]]:
    """For each file of configs/ the first paragraph of its docstring, and the fields that it changes."""
    found, defaults = {}, fields(Config())
    for file in sorted((ROOT / "configs").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"config_file_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        about = " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())
        values = {}
        if file.stem != COLD_START:
            values = fields(from_mapping(module.get_config().to_dict()))
        found[file.name] = about, {name: value for name, value in values.items() if value != defaults[name]}
    return found


# ---- parts of the page ----


def _sections() -> Iterable[str]:
    said, defaults = explanations(), fields(Config())
    ruled = {name for rule in rules() for name in defaults if _speaks_of(rule, name)}
    yield "## Of the whole run"
    for name in (n for n in said if n in defaults and "." not in n):
        yield _field(name, said[name], defaults[name], name in ruled)
    for section in (n for n in said if n not in defaults):
        own = _section_class(section).__dict__.get("__doc__") or ""
        more = "" if own.startswith(f"{_section_class(section).__name__}(") else " ".join(own.split())  # dataclass's
        yield "\n\n".join(filter(None, [f"## {section}", f"Section `{section}`: {said[section]}.", more]))
        for name in _names(_section_class(section)):
            dotted = f"{section}.{name}"
            yield _field(dotted, said[dotted], defaults[dotted], dotted in ruled)


def _field(name: str, said: str, default: Any, ruled: bool) -> str:
    facts = [f"Default `{_shown(default)}`", _accepted(name)]
    facts += [words for names, words in ON_RESUME if name in names]
    if ruled:
        facts.append("[must agree](#what-must-agree) with others")
    values = [f"`{word}`: {', '.join(getattr(config, word))}." for word in re.findall(r"\b[A-Z]+_[A-Z]+\b", said)]
    return "\n\n".join([f"### {name}", " ".join([said, *values]), "; ".join(facts) + "."])


def _speaks_of(rule: str, name: str) -> bool:
    """Whether a rule names a field: with its section, or without it where that of the rule's first field is meant."""
    section, _, own = name.rpartition(".")
    dotted = re.search(rf"\b{re.escape(name)}\b", rule)
    meant = section and re.match(rf"config\.{section}\b", rule) and re.search(rf"(?<![\w.]){own}\b", rule)
    return bool(section and (dotted or meant))


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
    lines = ["## What must agree", "What is said of fields that do not, with … in place of what was found:"]
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
    said = _comments(inspect.getsource(config))["DecoderConfig"]
    letters = [name for name in names if re.match(r"[A-Z]\b", said[name])]
    heads = ["preset", *(f"{name} ({said[name][0]})" for name in letters)]
    rows = [[f"`{name}`", *(str(getattr(shape, n)) for n in letters)] for name, shape in PRESETS.items()]
    return "\n\n".join(["## Presets", "The shapes that `model.preset` names.", _table(heads, rows)])


def _files() -> Iterable[str]:
    defaults = fields(Config())
    yield "## Config files\n\nWhat each file of configs/ changes; all else are the defaults."
    for name, (about, changed) in config_files().items():
        parts = [f"### configs/{name}", about]
        if name.removesuffix(".py") == COLD_START:
            parts.append(
                "Its fields are those of `launch/sft.py` ([psearch_jax/train/sft.py](../psearch_jax/train/sft.py))."
            )
        else:
            rows = [[_linked(n), f"`{_shown(defaults[n])}`", f"`{_shown(v)}`"] for n, v in changed.items()]
            parts.append(_table(["field", "default", "here"], rows))
        yield "\n\n".join(parts)


# ---- reading the code ----


def _comments(source: str) -> dict[str, dict[str, str]]:
    """For each class of a source text its fields, each with the comment above it and the one behind it."""
    alone, behind = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            place = alone if token.line.lstrip().startswith("#") else behind
            place[token.start[0]] = token.string.lstrip("# ").rstrip()
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
                    [*above, *([behind[field.end_lineno]] if field.end_lineno in behind else [])]
                )
    return out


def _template(node: ast.expr) -> str:
    """A string of the code, with … for each value that is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ast.literal_eval(node)


def _section_class(name: str) -> type | None:
    hint = typing.get_type_hints(Config)[name]
    return hint if dataclasses.is_dataclass(hint) else None


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


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

"""The messages in docs/troubleshooting.md are those that the programs print."""

import ast
import re

from programs import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
GAP = "…"
ENTRY = re.compile(r"^- `([^`]+)`(?: \(`(\w+)`\))?$\n\n    \S", re.MULTILINE)


def texts(source: str) -> list[list[str]]:
    """The fixed parts of every string in a source text, except docstrings: the text between the inserted values."""
    tree, parts = ast.parse(source), []
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.append([part.value for part in node.values if isinstance(part, ast.Constant)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            parts.append([part.replace("%%", "%") for part in re.split(r"%[\d.]*[sdf]", node.value)])
    return parts


FOLDERS = ("psearch_jax", "retrieval", "launch")
SAID = [
    text
    for folder in FOLDERS
    for file in sorted((ROOT / folder).rglob("*.py"))
    for text in texts(file.read_text(encoding="utf-8"))
]


def is_said(message: str) -> bool:
    """Whether one string of the programs contains the fixed parts of a message in their order."""
    wanted = [re.escape(part) for part in message.split(GAP) if part.strip()]
    return any(re.search(".*".join(wanted), "\0".join(text), re.DOTALL) for text in SAID)


def messages() -> list[str]:
    """The messages of the entries, and those quoted inside entries."""
    quoted = [" ".join(text.split()) for text in re.findall(r"`([^`]*…[^`]*)`", PAGE)]
    return [message for message, _ in ENTRY.findall(PAGE)] + quoted


def test_every_message_of_the_page_is_printed_by_a_program():
    """A reworded message: a user who searches the page for it would find nothing."""
    for message in messages():
        assert is_said(message), message


def test_entries_are_found_and_are_long_enough_to_tell_apart():
    """A page format whose entries are no longer found, or an entry so short that it matches any string."""
    entries = [message for message, _ in ENTRY.findall(PAGE)]
    assert len(entries) == PAGE.count("\n- ") >= 30 and len(set(entries)) == len(entries)
    assert all(sum(map(len, message.split(GAP))) >= 14 for message in entries), min(entries, key=len)
    assert not is_said("the policy … of hearts") and not is_said("not finite … loss or gradient was")


def test_every_alarm_has_an_entry():
    """A new alarm without an entry that says what to do."""
    from psearch_jax.train.monitoring.alarms import NAMES

    assert {name for _, name in ENTRY.findall(PAGE) if name} == set(NAMES)


def test_fields_of_the_page_are_fields_of_a_run():
    """Advice to lower a field that was renamed."""
    from psearch_jax.config import Config
    from psearch_jax.train.checkpointing.settings import fields

    known = fields(Config())
    sections = {name.split(".")[0] for name in known if "." in name}
    named = re.findall(rf"`(?:--config\.)?((?:{'|'.join(sorted(sections))})\.\w+)(?==|`)", PAGE)
    assert len(named) > 40 and set(named) <= set(known), set(named) - set(known)

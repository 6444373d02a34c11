"""The programs accept every command in the documents, every link resolves, and the folder list is current."""

import re
import shlex
from pathlib import PurePosixPath

import pytest
from programs import ROOT, refusal, tracked

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def commands(text: str) -> list[list[str]]:
    """All commands in a page's code blocks that run a program of launch/, without optional [arguments]."""
    page_commands = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\[.*?\]", "", line)  # optional arguments
            at = line.find("python launch/")
            if at >= 0:
                words = shlex.split(line[at:].split(" && ")[0], comments=True)
                page_commands.append(words[1:])
    return page_commands


ALL = {page.name: commands(page.read_text(encoding="utf-8")) for page in PAGES}
KNOWN = {page.name for page in (ROOT / "launch").glob("*.py")} - {"bench.py"}  # bench.py does not use absl flags


@pytest.mark.parametrize("page", [name for name, page_commands in ALL.items() if page_commands])
def test_every_command_of_a_page_is_taken(page):
    """A flag is renamed, and a reader who pastes a documented command gets an error."""
    for command in ALL[page]:
        program = command[0].removeprefix("launch/")
        assert (ROOT / "launch" / program).is_file(), command
        if program in KNOWN:
            refused = refusal([word for word in command if word != "..."])
            lacks_more = "..." in command and "must have a value other than None" in refused
            assert not refused or lacks_more, (command, refused)


def test_the_pages_have_commands():
    """The pattern no longer matches the code blocks, so that nothing is tested."""
    assert sum(map(len, ALL.values())) > 40 and len(ALL["reproduce.md"]) > 12
    assert any("--config.retrieval.index=wiki18" in command for command in ALL["reproduce.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    """A page or a heading is renamed, and a link to it breaks."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve()
        assert file.exists(), (page.name, target)
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, (page.name, target, anchor)


def test_the_folder_tree_lists_every_folder_with_python():
    """A new package is missing from the folder list, or the list names a folder that is gone."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = re.search(r"^## Folders\n\n```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    listed = [line.split(maxsplit=1)[0] for line in tree.splitlines()]
    folders, with_python = set(), set()
    for file in map(PurePosixPath, tracked()):
        parents = {f"{folder}/" for folder in file.parents if 1 <= len(folder.parts) <= 2}
        folders |= parents
        if file.suffix == ".py":
            with_python |= parents
    assert listed == sorted(set(listed))
    assert sorted(with_python - set(listed)) == [] and sorted(set(listed) - folders) == []

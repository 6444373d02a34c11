"""What the documents tell one to type is taken by the programs, and what they link to is there."""

import re
import shlex

import pytest
from programs import ROOT, refusal, tracked

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def commands(text: str) -> list[list[str]]:
    """Every command of ours in the blocks of a page, its lines joined, without what may be left out."""
    found = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\[.*?\]", "", line)  # of a command, what may be left out
            at = line.find("python launch/")
            if at >= 0:
                words = shlex.split(line[at:].split(" && ")[0], comments=True)
                found.append(words[1:])
    return found


ALL = {page.name: commands(page.read_text(encoding="utf-8")) for page in PAGES}
KNOWN = {page.name for page in (ROOT / "launch").glob("*.py")} - {"bench.py"}  # which has no flags of absl's


@pytest.mark.parametrize("page", [name for name, found in ALL.items() if found])
def test_every_command_of_a_page_is_taken(page):
    """A flag that was renamed leaves a page whose commands end in an error on the first line that is pasted."""
    for command in ALL[page]:
        program = command[0].removeprefix("launch/")
        assert (ROOT / "launch" / program).is_file(), command
        if program in KNOWN:
            refused = refusal([word for word in command if word != "..."])
            lacks_more = "..." in command and "must have a value other than None" in refused
            assert not refused or lacks_more, (command, refused)


def test_the_pages_have_commands():
    """Fails if the blocks are not found any more, and nothing is tested."""
    assert sum(map(len, ALL.values())) > 40 and len(ALL["reproduce.md"]) > 12
    assert any("--config.retrieval.index=wiki18" in command for command in ALL["reproduce.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    """A page or a heading that was renamed."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve()
        assert file.exists(), (page.name, target)
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, (page.name, target, anchor)


def test_the_tree_of_the_readme_has_every_file():
    """The map of the project misses a place, or shows one that is gone."""
    files = set(tracked())
    drawn, folder = set(), ""
    for line in re.search(r"^## The tree\n\n```\n(.*?)^```", PAGES[0].read_text(), re.M | re.S)[1].splitlines():
        name = line.strip().split(maxsplit=1)[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") and len(line.split()) == 1 else ""
            drawn |= {name} - {folder}
        elif line.startswith("  ") and line[2] != " ":
            drawn.add(folder + name)
    folders = tuple(name for name in drawn if name.endswith("/"))
    found = {name for name in files if not name.startswith(folders) and not name.endswith("/__init__.py")}
    shown = {name for name in drawn if not name.endswith(("/", "/__init__.py"))}
    found -= {"README.md", ".gitignore"}
    assert sorted(shown - found) == [] and sorted(found - shown) == []
    assert all(any(name.startswith(folder) for name in files) for folder in folders)

"""The programs accept every command in the documents, links resolve, and the generated page and lists are current."""

import re
import shlex
import subprocess
import sys

import pytest
from programs import ROOT, completed, refusal

from psearch_jax.config import FAMILIES, Config
from psearch_jax.config.setting import settings_of
from psearch_jax.train.checkpointing.settings import fields
from psearch_jax.train.monitoring.alarms import NAMES

sys.path.insert(0, str(ROOT / "docs"))

import reference  # noqa: E402

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
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
def test_every_command_of_a_page_is_accepted(page):
    for command in ALL[page]:
        program = command[0].removeprefix("launch/")
        assert (ROOT / "launch" / program).is_file(), command
        if program in KNOWN:
            refused = refusal([word for word in command if word != "..."])
            lacks_more = "..." in command and "must have a value other than None" in refused
            assert not refused or lacks_more, (command, refused)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve()
        assert file.exists(), (page.name, target)
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, (page.name, target, anchor)


def test_troubleshooting_knows_every_alarm_and_only_fields_of_a_run():
    entries = set(re.findall(r"^- `[^`]+` \(`(\w+)`\)$", TROUBLESHOOTING, re.MULTILINE))
    assert entries == set(NAMES)
    known = fields(Config())
    sections = {name.split(".")[0] for name in known if "." in name}
    named = re.findall(rf"`(?:--config\.)?((?:{'|'.join(sorted(sections))})\.\w+)(?==|`)", TROUBLESHOOTING)
    assert len(named) > 30 and set(named) <= set(known), set(named) - set(known)


def test_the_configuration_page_is_generated_and_has_a_sentence_for_every_field():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `python docs/reference.py`"
    rows = re.findall(r"^\| `(\w+)` \| `.*` \| .* \| (value|content|may change) \| (.*) \|$", reference.page(), re.M)
    settings = settings_of(Config)
    expected = {(name.rpartition(".")[2], s.resume.value, s.doc.replace("|", "\\|")) for name, s in settings.items()}
    assert set(rows) == expected and len(rows) == len(settings)
    assert all(setting.doc.endswith(".") and not setting.doc[0].islower() for setting in settings.values())


def test_the_table_of_models_lists_every_family():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name, family in FAMILIES.items():
        options = ["yes" if option else "no" for option in family.options.values()]
        assert f" | `{name}` | {' | '.join(options)} | `{'` `'.join(family.presets)}` |\n" in page


def test_the_commands_of_the_makefile_are_accepted():
    """`make demo-real` runs for hours: a program must not refuse its flags in the middle."""
    make = ["make", "-n", "demo-real", "MODEL=model", "SETS=sets", "REAL=runs/of_this_test"]  # nothing is there
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.replace("\\\n", " ").splitlines() if "launch/" in line]
    assert len(lines) == 8
    for line in lines:
        words = shlex.split(line[line.index("launch/") :].partition("||")[0].replace("$policy", "run"))
        assert not (refused := refusal(words)), (words, refused)


def shown_and_printed(model: str, run: str) -> tuple[list[str], list[str]]:
    """The transcript below the README's command that asks `model`, and what the command prints, with `run` for it."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = rf"^\.venv/bin/python ([^\n]* --model={model})$\n```\n\n```\n(.*?)```"
    command, shown = re.search(block, page, re.MULTILINE | re.DOTALL).groups()
    done = completed([sys.executable, *shlex.split(command.replace(f"--model={model}", f"--model={run}"))])
    assert "note:" not in done.stdout
    printed = [line for line in done.stdout.splitlines() if line.startswith("<think>")]
    return re.sub(r"\n +", " ", shown).splitlines(), printed  # the README wraps long lines


def test_the_readme_shows_what_its_command_prints():
    """The transcript of the shipped policy, in the world of the demo."""
    shown, printed = shown_and_printed("toy", "toy")
    assert shown == printed


@pytest.mark.weekly
def test_the_demo_learns_what_the_readme_shows(tmp_path):
    """Trained by `make demo`, the policy splits the README's question, and searches for the other step by step."""
    command = ["launch/train.py", "--config=configs/smoke.py", f"--workdir={tmp_path / 'run'}"]
    done = completed([sys.executable, *command], timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    shown, printed = shown_and_printed("runs/demo", tmp_path / "run")
    assert shown == printed
    question = re.search(r"such as `(The mayor [^`]*)`", (ROOT / "README.md").read_text(encoding="utf-8"))[1]
    asked = completed([sys.executable, "launch/ask.py", question, f"--model={tmp_path / 'run'}"])
    assert asked.stdout.count("<search>") == 3 and " ## " not in asked.stdout, asked.stdout

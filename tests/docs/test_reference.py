"""docs/configuration.md agrees with the code for every field."""

import re
import sys

import pytest
from programs import ROOT

from psearch_jax.config import Config
from psearch_jax.config.setting import settings_of
from psearch_jax.sft.cold_start import ToySFTConfig

sys.path.insert(0, str(ROOT / "docs"))

import reference  # noqa: E402

SETTINGS = settings_of(Config)


def test_the_page_is_what_the_code_says():
    """A default, limit or config file that changed while the page still shows the old one."""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `python docs/reference.py`"


@pytest.mark.parametrize("cls", [Config, ToySFTConfig])
def test_every_field_is_explained_in_sentences(cls):
    """A field without an explanation, or with a fragment that the page shows as it is."""
    docs = {name: setting.doc for name, setting in settings_of(cls).items()}
    assert [n for n, doc in docs.items() if len(doc) < 10 or not doc.endswith(".") or doc[0].islower()] == []


def test_every_field_is_on_the_page_with_its_default_and_what_a_resumed_run_does():
    """A section or field that the generator leaves out: the page would be up to date but incomplete."""
    page = reference.page()
    for name, setting in SETTINGS.items():
        (entry,) = re.findall(rf"^### {re.escape(name)}\n\n(.*?)(?=\n\n##)", page, re.MULTILINE | re.DOTALL)
        assert setting.doc in entry and re.search(r"^Default `.*`; .*; a resumed run ", entry, re.MULTILINE), entry
        assert not setting.accepted or setting.accepted.words in entry, entry


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "rollout.yield_share",
            ["`0.125`", "above 0, at most 1", "may change it", "when this share of the live rows"],
        ),
        ("learning.ratio", ['`"token"`; `token`, `sequence`', "must keep it", "(GSPO)"]),
        ("model.remat", ["recomputes in each layer", "launch/plan.py --search chooses the fastest that fits"]),
        ("learning.gamma", ["in training from 0 to 1", "PPO only"]),
        ("rollout.context_tokens", ["[must agree](#what-must-agree)"]),
        ("eval.best_metric", ["in training em, f1", "as in parallel/em"]),
        ("alarms.gap", ["difference of sampler and trainer log-probs", "a number"]),
    ],
)
def test_an_entry_shows_its_own_field(name, words):
    """The default or limit of another field, or a limit of training runs that is shown for every run."""
    entry = reference.page().split(f"### {name}\n")[1].split("\n## ")[0].split("\n### ")[0]
    for word in words:
        assert word in entry, (word, entry)


def test_every_rule_between_fields_is_listed():
    """A rule of limits.py that the page leaves out, or one that lost the fields it is about."""
    rules = reference.rules()
    source = (ROOT / "psearch_jax" / "limits.py").read_text(encoding="utf-8")
    assert len(rules) == source.count("raise UserError(") - 1  # one rule checks a single field
    assert all(rule.startswith("config.") and len(rule.replace("…", "")) > 30 for rule in rules)


def test_config_files_list_what_they_change():
    """A missing difference, so that a reader takes a default for the value that a file sets."""
    files = reference.config_files()
    assert set(files) == {file.name for file in (ROOT / "configs").glob("*.py")}
    about, changed = files["qwen7b_lora.py"]
    assert "adapters of rank 32" in about and changed["model.lora_rank"] == 32 and changed["train.steps"] == 500
    assert "rollout.context_tokens" not in changed and "rollout.samples" not in files["qwen7b.py"][1]


def test_every_anchor_of_the_page_is_a_heading_of_it():
    """A config file's table whose links to fields lead nowhere."""
    page = reference.page()
    headings = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page, re.M)}
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert len(links) > 30 and links <= headings, links - headings

"""docs/configuration.md agrees with the code for every field."""

import re
import sys

from programs import ROOT

from psearch_jax.config import Config
from psearch_jax.config.setting import settings_of

sys.path.insert(0, str(ROOT / "docs"))

import reference  # noqa: E402

SETTINGS = settings_of(Config)


def test_the_page_is_up_to_date():
    """The committed page is what the declarations generate."""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `python docs/reference.py`"


def test_every_field_has_a_row_with_its_default_and_a_sentence():
    """Every field has a row with its default, accepted values and an explanation."""
    rows = re.findall(r"^\| `(\w+)` \| `.*` \| .* \| (value|content|may change) \| (.*) \|$", reference.page(), re.M)
    expected = {(name.rpartition(".")[2], s.resume.value, s.doc.replace("|", "\\|")) for name, s in SETTINGS.items()}
    assert set(rows) == expected and len(rows) == len(SETTINGS)
    assert all(setting.doc.endswith(".") and not setting.doc[0].islower() for setting in SETTINGS.values())

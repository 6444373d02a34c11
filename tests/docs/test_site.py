"""The documentation site: complete, usable offline, and searched and browsed as a reader does."""

import json
import re
from html.parser import HTMLParser
from urllib.parse import urldefrag

import browsing
import pytest
from programs import ROOT

mkdocs = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is not installed: pip install -e '.[docs]'")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings is not installed: pip install -e '.[docs]'")

from mkdocs.config import load_config  # noqa: E402

FROM_ROOT = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
PAGES = {f"{FROM_ROOT[name]}.html": ROOT / f"{name}.md" for name in FROM_ROOT}
PAGES |= {
    page.relative_to(ROOT / "docs").with_suffix(".html").as_posix(): page for page in (ROOT / "docs").rglob("*.md")
}
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `mkdocs build --strict` builds it: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    mkdocs.build(config)
    return out


class Read(HTMLParser):
    """What a page loads, its links, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if values.get("id"):
            self.anchors.add(values["id"])
        if values.get(LOADS.get(tag, "")):
            self.loads.append(values[LOADS[tag]])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


def test_every_page_is_on_the_site_and_every_link_of_it_leads_somewhere(site):
    """A document missing from the site, or a link that works in the repository but not on the site."""
    pages = {site / name: Read((site / name).read_text(encoding="utf-8")) for name in PAGES}
    assert {file.relative_to(site).as_posix() for file in site.rglob("*.html")} == {*PAGES, "404.html"}
    own = 0
    for file, page in pages.items():
        for link in page.links:
            path, anchor = urldefrag(link)
            if re.match(r"\w+:", path):
                continue
            target = (file.parent / path).resolve() if path else file
            assert target.is_file(), (file.name, link)
            assert not anchor or target not in pages or anchor in pages[target].anchors, (file.name, link)
            own += 1
    assert own > 300
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="code/notebooks/colab_smoke.ipynb"' in home, "not a page, but linked"


def test_no_page_loads_anything_from_a_network(site):
    """A font or script from another host: slow or broken pages offline, and readers reported to third parties."""
    loads = 0
    for file in site.rglob("*.html"):
        for address in Read(file.read_text(encoding="utf-8")).loads:
            assert not re.match(r"(\w+:)?//", address), (file.name, address)
            loads += 1
    assert loads > 100
    for file in site.rglob("*.css"):
        addresses = re.findall(
            r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", file.read_text(encoding="utf-8")
        )
        assert not addresses, (file, addresses)


def test_every_page_can_be_searched_for(site):
    """A search box without results, or a page that the index leaves out."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {doc["location"]: doc["title"] for doc in index["docs"]}
    for name, page in PAGES.items():
        assert titles[name] == re.search(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert "configuration.html#rolloutslots" in titles
    assert (site / "search" / "search_index.js").is_file(), "pages opened from a disk need this file to search"


def test_the_python_api_is_described_by_docstrings_and_comments(site):
    """A renamed module or function, or fields whose comments (shapes, units) are left out of the API pages."""
    described = {
        "types": ("Trajectory", "[S] int32, prompt + sampled + observations"),
        "config": ("config_dict", "The defaults, changed by"),
        "rewards": ("paper_reward", "only searches of sampled turns that were executed count"),
        "retriever": ("Retriever", "Return at most"),
        "build": ("training_run", "Builds everything that"),
        "trainer": ("train", "resume even if settings that affect the results have changed"),
    }
    assert {name for name in PAGES if name.startswith("api/")} == {f"api/{name}.html" for name in described}
    for name, (member, text) in described.items():
        page = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
        assert any(anchor.endswith(f".{member}") for anchor in Read(page).anchors), (name, member)
        assert text in page, (name, text)


def test_the_home_page_is_read_from_a_disk(browser, site):
    """A site that works only from a server: menus, links or a search that fail when opened from a disk."""
    home = (site / "index.html").as_uri()
    browsing.opened(browser, home)
    browsing.wait(browser, "return document.readyState == 'complete'")
    browser.execute_script("document.querySelector('nav a[href=\"configuration.html\"]').click()")
    browsing.wait(browser, "return document.title.startsWith('Configuration') && document.readyState == 'complete'")
    browser.execute_script("document.querySelector('[name=query]').focus()")
    browsing.press(browser, *"retry_deadline_s")
    browsing.wait(browser, "return document.querySelector('.md-search-result__item a') != null")
    assert "retry_deadline_s" in browsing.text(browser, ".md-search-result__item")
    assert all(url.startswith(("file:", "data:", "about:")) for url in browsing.asked(browser))

"""What `make docs` adds to mkdocs: pages from outside docs/, and working links.

README.md is the home page. A link to another file of the repository leads to a copy of it below code/ on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")  # the path of a link that is no address of a network


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside docs/, and the files of the repository that any page links to."""
    for uri, name in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for path in LINK.findall(page.content_string):
            file = _target(page.src_uri, path)
            uri = _uri(file)
            if uri.startswith("code/") and file.is_file() and not files.get_file_from_path(uri):
                files.append(File.generated(config, uri, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page to where their targets lie on the site."""
    own = page.file.src_uri
    folder = posixpath.dirname(own)
    return LINK.sub(lambda link: posixpath.relpath(_uri(_target(own, link[1])), folder or "."), markdown)


def _target(uri: str, path: str) -> Path:
    """The file that a page of the site links to by a path that holds in the repository."""
    source = ROOT / OUTSIDE[uri] if uri in OUTSIDE else DOCS / uri
    return (source.parent / path).resolve()


def _uri(file: Path) -> str:
    """Where a file of the repository lies on the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = posixpath.relpath(file.as_posix(), ROOT.as_posix())
    return next((uri for uri, outside in OUTSIDE.items() if outside == name), f"code/{name}")

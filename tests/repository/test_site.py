"""The pages as a site: all are listed, links to headings lead there, and what was built asks no other host for anything.

`make docs` builds the site and runs this with `SITE`, the folder that it was built into.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md") for path in ROOT.glob(pattern))
SITE = os.environ.get("SITE")
CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
TO_HEADING = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")


def text_of(path):
    return CODE.sub("", path.read_text())


@functools.cache
def anchors(path):
    """Of the headings of a page, as plain git hosts make them."""
    found = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text_of(path), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[name] = found.get(name, 0) + 1
    return {name if not number else f"{name}-{number}" for name, count in found.items() for number in range(count)}


def test_heading_links_resolve():
    lost = []
    for page in PAGES:
        for name, anchor in TO_HEADING.findall(text_of(page)):
            target = (page.parent / name).resolve() if name else page
            if target.suffix == ".md" and (not target.exists() or anchor not in anchors(target)):
                lost.append(f"{page.relative_to(ROOT)}: {name}#{anchor}")
    assert lost == []


def test_index_lists_every_page_once():
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)$", index.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(listed))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(listed)
    assert [name for name in listed if not (index.parent / name).exists()] == []


def test_version_switcher_lists_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    versions = json.loads((ROOT / "docs" / "site" / "versions.json").read_text())
    assert [one["version"] for one in versions if one.get("preferred")] == [version]


class Fetched(HTMLParser):
    """Addresses that a browser fetches by itself for a page."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in {"script", "img", "iframe", "source", "video"}:
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in {"stylesheet", "preload", "icon", "modulepreload"}:
            self.addresses.append(given.get("href") or "")


@pytest.mark.skipif(not SITE, reason="`make docs` builds the site")
def test_site_loads_no_external_resources():
    pages = [path for path in sorted(Path(SITE).rglob("*.html")) if "_static" not in path.parts]
    assert len(pages) > 100
    for page in pages:
        fetched = Fetched()
        fetched.feed(page.read_text())
        assert [address for address in fetched.addresses if re.match(r"(https?:)?//", address)] == []
        local = [a.partition("?")[0] for a in fetched.addresses if a and not a.startswith("data:")]
        assert [address for address in local if not (page.parent / address).exists()] == []
    styles = "".join(path.read_text() for path in Path(SITE).rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", styles) == []


@pytest.mark.skipif(not SITE, reason="`make docs` builds the site")
def test_site_documents_public_names():
    import djinn

    generated = Path(SITE) / "docs" / "generated"
    reference = (generated / "djinn.html").read_text()
    assert [n for n in djinn.__all__ if callable(getattr(djinn, n)) and f'id="djinn.{n}"' not in reference] == []
    errors = (generated / "errors.html").read_text()
    assert [n for n in djinn.errors.__all__ if f'id="djinn.errors.{n}"' not in errors] == []
    assert "djinn_register_placement_policies" in (generated / "hooks.html").read_text()

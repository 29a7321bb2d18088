"""The parts of pages that come from the code are current."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="module")
def write_pages(root):
    spec = importlib.util.spec_from_file_location("write_pages", root / "packaging" / "write_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_page_parts_are_current(root, write_pages):
    pages = {path.name: path.read_text() for path in (root / "docs").glob("*.md")}
    assert {part[2] for text in pages.values() for part in write_pages.PART.finditer(text)} == set(write_pages.PARTS)
    stale = [name for name, text in pages.items() if write_pages.renew_parts(text) != text]
    assert stale == [], "run `python packaging/write_pages.py`"


def test_outdated_page_part_is_replaced(write_pages):
    begin = "<!-- kinds: written by packaging/write_pages.py -->\n"
    text = write_pages.renew_parts(f"before\n{begin}old\n<!-- end -->\nafter\n")
    assert text == f"before\n{begin}\n{write_pages.kinds()}\n\n<!-- end -->\nafter\n"
    assert "`PatternConformance`" in text

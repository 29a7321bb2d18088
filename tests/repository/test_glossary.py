"""The glossary, the walkthrough and the page of the wire name what the code has."""

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest

from djinn_core.wire.messages import AnyMessage

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
NAMES = re.findall(r"`(djinn[\w.]+)`", GLOSSARY)
TERMS = re.findall(r"^\| ([a-z][\w -]*?) \|", GLOSSARY, re.MULTILINE)
STEPS = re.findall(r"`([\w/]+\.py)`(?:: `([\w.]+)`)?", (ROOT / "docs/walkthrough.md").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_in_the_code(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


def test_each_term_stands_once():
    terms = [term for term in TERMS if term != "term"]
    assert len(terms) == len(set(terms)) > 40


@pytest.mark.parametrize(("path", "name"), STEPS)
def test_the_walkthrough_leads_through_the_code(path, name):
    source = (ROOT / "djinn_core" / path).read_text()
    last = name.rpartition(".")[2]
    assert not name or re.search(rf"^\s*(def|class) {last}\b|^{last}\b", source, re.MULTILINE)


def test_the_page_of_the_wire_names_each_message():
    text = (ROOT / "docs/wire.md").read_text()
    assert [kind.__name__ for kind in get_args(AnyMessage) if f"`{kind.__name__}`" not in text] == []

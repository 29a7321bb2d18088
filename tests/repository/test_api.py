"""The reference of `djinn` describes every name that it offers, and none that it does not; that of the wire, every message."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

import djinn
import djinn.weights
from djinn_core.wire.messages import AnyMessage

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_name_is_described():
    described = set(re.findall(r"`(\w+)[`(]", TEXT))
    assert set(djinn.__all__) - described == set()


def test_every_name_in_a_table_is_offered():
    cells = re.findall(r"^\| (`[^|]+) \|", TEXT, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)[`(]", cell)}
    assert named - set(djinn.__all__) == set()
    assert all(hasattr(djinn, name) for name in named)


def test_errors_are_what_the_table_says():
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (?:`(\w+)`|[^|]*) \|", TEXT, re.MULTILINE)
    bases = {name: base for names, base in rows for name in re.findall(r"\w+", names) if base}
    assert len(bases) >= 10
    for name, base in bases.items():
        wanted = getattr(djinn, base, None) or vars(__import__("builtins"))[base]
        assert issubclass(getattr(djinn, name), wanted), f"{name} is no {base}"


@pytest.mark.parametrize("module", [djinn, djinn.weights])
def test_names_come_from_where_type_checkers_look(module):
    """Names that are imported when they are asked for stand in a table and, for type checkers, as imports."""
    (typed,) = [
        node.body
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imported = {node.module: {name.name for name in node.names} for node in typed}
    own = {
        place: names
        for place, names in imported.items()
        if place.startswith(("djinn_core.", "djinn_client.", "djinn_server."))
    }
    assert {place: set(names.split()) for place, names in module._PLACES.items()} == own
    brought = " ".join(getattr(module, "_PACKAGES", {}).values()).split()  # by packages in Djinn's repository
    assert set(brought) == set().union(*(names for place, names in imported.items() if place not in own))
    assert set().union(*imported.values()) <= set(module.__all__)


def test_the_page_of_the_wire_names_each_message():
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
    assert [kind.__name__ for kind in get_args(AnyMessage) if f"`{kind.__name__}`" not in text] == []

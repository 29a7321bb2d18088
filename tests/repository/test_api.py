"""The reference of `djinn` describes every name that it offers, and none that it does not; that of the wire, every message."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import djinn
from djinn import _lazy_names
from djinn_core.wire.messages import MESSAGES

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = [getattr(djinn, name) for name in _lazy_names.PUBLIC]


DESCRIBED_ELSEWHERE = {"hooks", "planning", "testing"}  # in docs/hooks.md, and by docstrings
SECTION = re.compile(r"^## `djinn\.(\w+)`\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def sections():
    """Yield each module with the parts of the page that are about it."""
    yield djinn, SECTION.sub("", TEXT)
    for name, text in SECTION.findall(TEXT):
        yield getattr(djinn, name), text


def test_every_public_name_is_documented():
    about = dict(sections())
    for module in (djinn, *(getattr(djinn, name) for name in _lazy_names.PUBLIC if name not in DESCRIBED_ELSEWHERE)):
        assert set(module.__all__) - set(re.findall(r"`(\w+)[`(]", about[module])) == set()


def test_documented_names_exist():
    for module, text in sections():
        cells = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
        named = {name for cell in cells for name in re.findall(r"`(\w+)[`(]", cell)}
        assert named - {"djinn", "load_ipython_extension"} <= set(module.__all__)
        assert all(hasattr(module, name) for name in named - {"djinn"})


def test_error_table_matches_classes():
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (?:`(\w+)`|[^|]*) \|", TEXT, re.MULTILINE)
    bases = {name: base for names, base in rows for name in re.findall(r"\w+", names) if base}
    assert len(bases) >= 10
    for name, base in bases.items():
        wanted = getattr(djinn.errors, base, None) or vars(__import__("builtins"))[base]
        assert issubclass(getattr(djinn.errors, name), wanted), f"{name} is no {base}"


@pytest.mark.parametrize("module", [djinn, *MODULES])
def test_lazy_names_match_type_checking_imports(module):
    """Names that are imported when they are asked for stand in a table and, for type checkers, as imports."""
    (typed,) = [
        node.body
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imported = {node.module: {name.name for name in node.names} for node in typed if node.module != "djinn"}
    assert {public_module: set(names.split()) for public_module, names in module._MODULES.items()} == imported
    assert set().union(*imported.values()) - {"load_ipython_extension"} <= set(module.__all__)


def test_names_are_exported_once():
    """`djinn.compat` repeats what readers of papers look for, `djinn` what most programs use."""
    offered = [module.__all__ for module in MODULES if module is not djinn.compat]
    assert len(set().union(*offered)) == sum(map(len, offered))


def test_unknown_name_raises():
    with pytest.raises(AttributeError, match=r"^module 'djinn' has no attribute 'nowhere'$"):
        djinn.nowhere  # noqa: B018 - it raises


def test_name_of_other_module_names_it():
    for module, name, place in ((djinn, "SessionLost", "errors"), (djinn.hooks, "Graph", "planning")):
        with pytest.raises(
            AttributeError, match=rf"^module '{module.__name__}' has no .*: it is `djinn.{place}.{name}`$"
        ):
            getattr(module, name)


def test_protocol_page_names_each_message():
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert [kind.__name__ for kind in MESSAGES if f"`{kind.__name__}`" not in text] == []

"""Functions that a person can take in at once. `packaging/budgets.py` checks the length of files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

LONGEST_FUNCTION = 80


def functions(statements: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions among statements and inside of them; expressions, which have none, are most of a tree."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from functions(getattr(node, name, ()))


def test_functions_are_short(root, sources):
    too_long = {
        f"{path.relative_to(root)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in sources
        if (text := path.read_text()).count("\n") >= LONGEST_FUNCTION
        for node in functions(ast.parse(text).body)
        if node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    }
    assert too_long == {}


def test_nested_functions_are_found():
    text = """
def a():
    class B:
        async def c(self): ...
    try:
        def d(): ...
    except E:
        def e(): ...
    else:
        def f(): ...
    finally:
        def g(): ...
    match 1:
        case 1:
            def h(): ...
"""
    tree = ast.parse(text)
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {node.name for node in functions(tree.body)} == found == set("acdefgh")


def test_no_catch_all_modules(root, sources):
    names = {"utils", "util", "helpers", "helper", "misc", "common", "manager"}
    assert [str(path.relative_to(root)) for path in sources if path.stem in names] == []

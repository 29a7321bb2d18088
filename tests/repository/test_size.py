"""Files and functions that a person can take in at once."""

from __future__ import annotations

import ast

LONGEST_FILE = 900
LONGEST_FUNCTION = 80


def test_no_file_is_too_long(root, sources):
    lengths = {path.relative_to(root): len(path.read_text().splitlines()) for path in sources}
    assert {str(path): n for path, n in lengths.items() if n > LONGEST_FILE} == {}


def test_no_function_is_too_long(root, sources):
    too_long = {
        f"{path.relative_to(root)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    }
    assert too_long == {}


def test_no_grab_bags(root, sources):
    names = {"utils", "util", "helpers", "helper", "misc", "common", "manager"}
    assert [str(path.relative_to(root)) for path in sources if path.stem in names] == []

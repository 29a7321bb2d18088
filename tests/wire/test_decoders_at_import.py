"""Decoders of what several threads read: made at the import, since msgspec crashes where threads make two of one class at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import djinn_core

ROOT = Path(djinn_core.__file__).parent
PLACES = ("wire", "server/recovery", "server/compiling", "launch", "net")
ONCE = {ROOT / "launch/executor_config.py"}  # an executor reads its configuration before it has threads
FILES = sorted({file for place in PLACES for file in (ROOT / place).rglob("*.py")} - ONCE)


def decoders_in_functions(tree: ast.AST) -> list[int]:
    """Return lines of functions that make a decoder, or name a class to decode."""
    calls = [
        c for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for c in ast.walk(f) if isinstance(c, ast.Call)
    ]
    named = [c for c in calls if isinstance(c.func, ast.Attribute)]
    return [
        c.lineno
        for c in named
        if (c.func.attr == "Decoder" or (c.func.attr == "decode" and any(k.arg == "type" for k in c.keywords)))
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_decoders_are_created_at_import(file):
    assert not decoders_in_functions(ast.parse(file.read_text()))

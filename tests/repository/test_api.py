"""The reference of `djinn` describes every name that it offers, and none that it does not."""

from __future__ import annotations

import re
from pathlib import Path

import djinn

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

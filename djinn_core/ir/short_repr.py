"""Abbreviated `repr` of large values, for prompts, notebooks and failed tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import attrs

_LINE = 120  # maximum number of characters
_FEW = 4
_ATOMS = (int, float, str, bytes, Enum, type(None))


class ShortRepr:
    """Mixin for attrs classes with `repr=False`. Its `repr` shows large collections by their length."""

    __slots__ = ()

    def __repr__(self) -> str:
        return brief(self)


def brief(value: Any) -> str:
    """Return an attrs value as `Class(field=value, ...)`, in a few lines at most.

    Long fields are cut, and collections are shown by their length.
    """
    fields = [f for f in attrs.fields(type(value)) if f.repr and not f.name.startswith("_")]
    parts = [f"{field.name}={_field_text(getattr(value, field.name))}" for field in fields]
    one_line = f"{type(value).__name__}({', '.join(parts)})"
    if len(one_line) <= _LINE:
        return one_line
    lines = ",\n".join(parts).replace("\n", "\n    ")
    return f"{type(value).__name__}(\n    {lines},\n)"


def _field_text(value: Any) -> str:
    if isinstance(value, _ATOMS):
        return _truncate(repr(value))
    if isinstance(value, Collection):
        return _collection(value)
    if isinstance(value, ShortRepr) or attrs.has(type(value)):
        return repr(value) if isinstance(value, ShortRepr) else _truncate(brief(value).replace("\n", " "))
    return _truncate(repr(value))


def _collection(value: Collection[Any]) -> str:
    atoms = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    if not value or (len(value) <= _FEW and all(isinstance(item, _ATOMS) for item in atoms)):
        return _truncate(repr(value))
    return f"<{len(value):,} of them>"


def _truncate(text: str) -> str:
    return text if len(text) <= _LINE else f"{text[: _LINE - 3]}..."

"""Shrink programs that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shrunk(statements: Sequence[str], differs: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return a minimal part of the statements that still differs (delta debugging). An unbound name raises on both sides."""
    kept = list(statements)
    size = max(1, len(kept) // 2)
    while size:
        position = len(kept) - size
        while position > -size:
            start = max(0, position)
            without = kept[:start] + kept[position + size :]
            if without and differs(without):
                kept = without
            position -= size
        size //= 2
    return kept

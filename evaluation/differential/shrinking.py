"""Reduce programs that differ to small programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shrunk(statements: Sequence[str], differs: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return a minimal part of the statements that still differs. Undefined names do not differ: both sides raise."""
    remaining = list(statements)
    size = max(1, len(remaining) // 2)
    while size:
        position = len(remaining) - size
        while position > -size:
            start = max(0, position)
            without = remaining[:start] + remaining[position + size :]
            if without and differs(without):
                remaining = without
            position -= size
        size //= 2
    return remaining

"""Make a program that differs smaller, as long as the same property of it differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shrunk(statements: Sequence[str], differs: Callable[[Sequence[str]], bool]) -> list[str]:
    """A part of the statements of which none can be left out (delta debugging). A name that nothing binds is an error on both sides."""
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

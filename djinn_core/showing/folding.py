"""Finding what repeats in a row: 32 equal layers, or 16 times a layer of one kind and one of another."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")
_LONGEST = 12  # parts of a round
_NUMBER = re.compile(r"\d+")


@attrs.frozen
class Folded(Generic[T]):
    """Equal rounds that follow each other; a single round of one where nothing repeats."""

    rounds: tuple[tuple[T, ...], ...]


def fold(parts: Sequence[T], signature: Callable[[T], int], name: Callable[[T], str]) -> list[Folded[T]]:
    """`parts` with what repeats folded. Parts are equal when their signatures are, and their names but for numbers."""
    marks = [(signature(part), _NUMBER.sub("#", name(part))) for part in parts]
    numbered = [bool(_NUMBER.search(name(part))) for part in parts]
    found: list[Folded[T]] = []
    at = 0
    while at < len(parts):
        period, count = _repeat(marks, numbered, at)
        rounds = [tuple(parts[at + r * period : at + (r + 1) * period]) for r in range(count)]
        found.append(Folded(tuple(rounds)))
        at += period * count
    return found


def _repeat(marks: Sequence[tuple[int, str]], numbered: Sequence[bool], at: int) -> tuple[int, int]:
    """Length and count of the repetition that begins here: the one that covers most, with the shortest period."""
    best = (1, 1)
    for period in range(1, min(_LONGEST, (len(marks) - at) // 2) + 1):
        if not any(numbered[at : at + period]):
            continue
        count = 1
        while marks[at + count * period : at + (count + 1) * period] == marks[at : at + period]:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best

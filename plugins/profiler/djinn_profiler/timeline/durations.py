"""Durations of a timeline as text, in one unit for a whole table."""

from __future__ import annotations


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit for durations up to `seconds`: the number of units in a second, and the unit's name."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def duration(seconds: float) -> str:
    """Return seconds as text in a unit that suits their size."""
    times, unit = unit_of(seconds)
    return f"{seconds * times:.3f} {unit}"

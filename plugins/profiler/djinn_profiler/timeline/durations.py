"""Durations of a timeline as text, in one unit for a whole table."""

from __future__ import annotations


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit for durations up to `seconds`: units per second, and its name."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")


def duration(seconds: float) -> str:
    """Format seconds for people."""
    times, unit = unit_of(seconds)
    return f"{seconds * times:.3f} {unit}"

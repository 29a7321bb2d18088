"""Quantities in units that people read: bytes, floating-point operations, seconds."""

from __future__ import annotations

_THOUSAND = 1000.0
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_TEN, _HUNDRED = 10, 100


def size(nbytes: float) -> str:
    """Format bytes: `531 B`, `2.1 MB`."""
    return _with_prefix(nbytes, "B")


def work(flops: float) -> str:
    """Format floating-point operations: `6.1 GFLOP`."""
    return _with_prefix(flops, "FLOP")


def duration(seconds: float) -> str:
    """Format seconds: `1.2 ms`."""
    if seconds <= 0:
        return "0 s"
    for unit, name in _TIMES:
        if seconds >= unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def share(part: float, whole: float) -> str:
    """Format a share in whole percent; `<1%` if it is less than 1%."""
    if not whole or not part:
        return "0%"
    percent = 100 * part / whole
    return "<1%" if percent < 1 else f"{percent:.0f}%"


def _with_prefix(number: float, unit: str) -> str:
    step = 0
    while number >= 999.5 and step < len(_PREFIXES) - 1:  # 999.9 would be shown as 1000
        number, step = number / _THOUSAND, step + 1
    digits = f"{number:.0f}" if step == 0 else _three_digits(number)
    return f"{digits} {_PREFIXES[step]}{unit}"


def _three_digits(number: float) -> str:
    if number >= _HUNDRED:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= _TEN else f"{number:.2f}"

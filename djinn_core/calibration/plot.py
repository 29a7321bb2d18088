"""Predicted against measured, as a picture: an SVG with logarithmic axes, written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from djinn_core.calibration.validate import Validation

_SIDE, _MARGIN = 520, 70
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)


def svg(validation: Validation) -> str:
    """A point for each program, coloured by what kind it is; the line is where predictions are right, dotted: 20% off."""
    times = [t for c in validation.comparisons for t in (c.predicted, c.measured)]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    scale = _Scale(low, max(high, low + 1))
    size = _SIDE + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size + 190}" height="{size}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_axes(scale),
        *_diagonals(scale),
        *_points(validation, scale),
        _title(validation),
        "</svg>",
    ]
    return "\n".join(parts)


def _title(validation: Validation) -> str:
    count, error, r2 = len(validation.comparisons), validation.median_error, validation.r2_log
    text = f"Predicted and measured time of {count} programs: median error {error:.0%}, R² of log time {r2:.3f}"
    return f'<text x="{_MARGIN}" y="{_MARGIN - 24}" font-size="15">{text}</text>'


class _Scale:
    """Seconds to positions; both axes are the same."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def x(self, seconds: float) -> float:
        return _MARGIN + _SIDE * (math.log10(seconds) - self.low) / (self.high - self.low)

    def y(self, seconds: float) -> float:
        return 2 * _MARGIN + _SIDE - self.x(seconds)


def _axes(scale: _Scale) -> Iterator[str]:
    end = _MARGIN + _SIDE
    for exponent in range(scale.low, scale.high + 1):
        at, label = 10.0**exponent, _label(exponent)
        x, y = scale.x(at), scale.y(at)
        yield f'<line x1="{x:.1f}" y1="{_MARGIN}" x2="{x:.1f}" y2="{end}" stroke="#dddddd"/>'
        yield f'<line x1="{_MARGIN}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{end + 18}" text-anchor="middle">{label}</text>'
        yield f'<text x="{_MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    middle = _MARGIN + _SIDE / 2
    yield f'<text x="{middle}" y="{end + 42}" text-anchor="middle">measured</text>'
    yield f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">predicted</text>'


def _label(exponent: int) -> str:
    return f"{10 ** (exponent % 3)} {({-3: 'ns', -2: 'µs', -1: 'ms', 0: 's'}).get(exponent // 3, f'e{exponent} s')}"


def _diagonals(scale: _Scale) -> Iterator[str]:
    for factor, style in ((1.0, ""), (1.2, ' stroke-dasharray="3 4"'), (1 / 1.2, ' stroke-dasharray="3 4"')):
        first, last = 10.0**scale.low, 10.0**scale.high
        left, right = max(first, first / factor), min(last, last / factor)
        ends = f'x1="{scale.x(left):.1f}" y1="{scale.y(left * factor):.1f}" x2="{scale.x(right):.1f}" y2="{scale.y(right * factor):.1f}"'
        yield f'<line {ends} stroke="#555555"{style}/>'


def _points(validation: Validation, scale: _Scale) -> Iterator[str]:
    kinds = list(dict.fromkeys(_kind(c.name) for c in validation.comparisons))
    for c in validation.comparisons:
        colour = _COLOURS[kinds.index(_kind(c.name)) % len(_COLOURS)]
        title = escape(f"{c.name}: predicted {c.predicted * 1e3:.2f} ms, measured {c.measured * 1e3:.2f} ms")
        at = f'cx="{scale.x(c.measured):.1f}" cy="{scale.y(c.predicted):.1f}"'
        yield f'<circle {at} r="5" fill="{colour}" fill-opacity="0.75"><title>{title}</title></circle>'
    for number, kind in enumerate(kinds):
        x, y = _MARGIN + _SIDE + 20, _MARGIN + 10 + 20 * number
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
        yield f'<text x="{x + 12}" y="{y + 4}">{escape(kind)}</text>'


def _kind(name: str) -> str:
    """A program's name without its sizes."""
    return name.partition(",")[0]

"""Layout of a picture in pixels. `page.js` computes the same layout for pages: keep them equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from djinn_observability.html.scene import Box

CHARACTER = 7.6  # maximum pixels per letter of a title
SMALL = 6.1  # the same for the rest
LEAST = 110  # width of a box
LINE = 17  # height of a line of text
CHIP = 18
PAD = 14
GAP = 26  # between rows
BESIDE = 22  # between boxes of a row
BEND = 16  # width of a passing arrow
BAR = 5


@attrs.frozen
class PlacedBox:
    """A box with its position and size in pixels. An open box has `inner` boxes, and arrows (`wires`) as lists of points."""

    box: Box
    x: float
    y: float
    width: float
    height: float
    is_open: bool
    inner: tuple[PlacedBox, ...] = ()
    wires: tuple[tuple[tuple[float, float], ...], ...] = ()


def chips_of(box: Box, *, is_open: bool) -> tuple[str, ...]:
    """Return the names of patterns to show on a box. An open box does not show patterns of its inner boxes."""
    return box.own_chips if is_open else box.chips


def head_height(box: Box, *, is_open: bool) -> float:
    """Return the height of the header of a box: title, cost, patterns, bar."""
    return 8 + LINE + LINE - 2 + (CHIP + 3 if chips_of(box, is_open=is_open) else 0) + BAR + 5


def head_width(box: Box, *, is_open: bool) -> float:
    """Return the width of a box's text."""
    chips = sum(chip_width(chip) + 4 for chip in chips_of(box, is_open=is_open))
    return max(LEAST, len(box.title) * CHARACTER + 20, len(box.detail) * SMALL + 20, chips + 16)


def chip_width(chip: str) -> float:
    """Return the width of a pattern's label."""
    return len(chip) * SMALL + 12


def place(box: Box, opened: frozenset[int]) -> PlacedBox:
    """Place a box and all visible boxes in it, with the upper left corner at 0, 0."""
    layout = box.layout
    if id(box) not in opened or layout is None:
        return PlacedBox(box, 0, 0, head_width(box, is_open=False), head_height(box, is_open=False), is_open=False)
    inner = [place(b, opened) for b in box.inner]
    widths = {cell: inner[cell].width if cell < layout.boxes else BEND for row in layout.rows for cell in row}
    spans = [_span(row, widths, layout.boxes) for row in layout.rows]
    left, right = max(s[0] for s in spans), max(s[1] for s in spans)
    middle = max(left, right, head_width(box, is_open=True) / 2 - PAD) + PAD
    top, boxes, points = head_height(box, is_open=True) + (2 if layout.boxes in layout.rows[0] else PAD / 2), {}, {}
    for row, (half, _) in zip(layout.rows, spans, strict=True):
        height = max((inner[c].height for c in row if c < layout.boxes), default=0)
        x = middle - half
        for cell in row:
            points[cell] = (x + widths[cell] / 2, top, top + height)
            if cell < layout.boxes:
                boxes[cell] = attrs.evolve(inner[cell], x=x, y=top)
            x += widths[cell] + BESIDE
        top += height + GAP
    bottom = top - GAP + (0 if layout.boxes + 1 in layout.rows[-1] else PAD)
    wires = tuple(_arrow_points(wire, boxes, points) for wire in layout.wires)
    boxes_in_order = tuple(boxes[c] for c in sorted(boxes))
    return PlacedBox(box, 0, 0, 2 * middle, bottom, is_open=True, inner=boxes_in_order, wires=wires)


def _span(row: Sequence[int], widths: Mapping[int, float], boxes: int) -> tuple[float, float]:
    """Return how far a row, passing arrows included, extends left and right of the middle of its boxes."""
    edges: list[tuple[float, float]] = []
    x = 0.0
    for cell in row:
        edges.append((x, x + widths[cell]))
        x += widths[cell] + BESIDE
    solid = [edge for cell, edge in zip(row, edges, strict=True) if cell < boxes] or edges
    middle = (solid[0][0] + solid[-1][1]) / 2
    return middle, x - BESIDE - middle


def _arrow_points(
    wire: Sequence[int], boxes: Mapping[int, PlacedBox], points: Mapping[int, tuple[float, float, float]]
) -> tuple[tuple[float, float], ...]:
    """Return the points of an arrow, from its source at the top, through each bend, to its target at the bottom."""
    points_of_arrow: list[tuple[float, float]] = []
    for position, cell in enumerate(wire):
        x, top, bottom = points[cell]
        if position > 0:
            points_of_arrow.append((x, top))
        if position < len(wire) - 1:
            points_of_arrow += [(x, boxes[cell].y + boxes[cell].height)] if cell in boxes else []
            points_of_arrow.append((x, bottom))  # below all of the previous row before it turns
    return tuple(points_of_arrow)

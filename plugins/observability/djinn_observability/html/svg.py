"""A static SVG picture without external resources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from djinn.planning import PipelineResult
from djinn_observability.html.colours import MIXED, colours
from djinn_observability.html.geometry import BAR, CHIP, LINE, PlacedBox, chip_width, chips_of, head_height, place
from djinn_observability.html.markup import text
from djinn_observability.html.scene import Box, open_boxes, scene

MARGIN = 16
_LEGEND = 30
_TITLE = 30
_WIRE = "#8a8f98"


def svg(result: PipelineResult) -> str:
    """Return the picture of a program, with the slowest parts open."""
    root = scene(result)
    return draw(root, open_boxes(root), heading(result), bars(result))


def heading(result: PipelineResult) -> str:
    """Return the title line of the picture."""
    kind = result.profile.workload.value if result.profile is not None else "program"
    return f"{kind}: {len(result.graph.nodes):,} ops"


def bars(result: PipelineResult) -> str:
    """Return the legend's text for the bars."""
    if result.costs is None:
        return "share of the ops"
    calibrations = {device.id: device.calibration for device in result.topology.devices}
    assumed = any(calibrations.get(device) is None for device in result.costs.by_device)
    return f"share of the predicted time{' (assumed speeds)' if assumed else ''}"


def draw(whole: Box, opened: frozenset[int], title: str, bar: str) -> str:
    """Return the picture of a box, with the boxes in `opened` (by `id`) open."""
    layout = place(whole, opened)
    key, key_width = legend(whole, bar)
    width = max(layout.width, key_width, len(title) * 8) + 2 * MARGIN
    height = layout.height + 2 * MARGIN + _TITLE + _LEGEND
    left = (width - layout.width) / 2
    return "\n".join([
        (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">'),
        ('<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0.5 L7.5,4 L0,7.5 z" fill="{_WIRE}"/></marker></defs>'),
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 12}" font-size="15" font-weight="bold" fill="#222">{text(title)}</text>',
        f'<g transform="translate({MARGIN},{MARGIN + _TITLE - 6})">{key}</g>',
        f'<g transform="translate({left:.1f},{MARGIN + _TITLE + _LEGEND})">',
        *_box(layout),
        "</g>",
        "</svg>",
    ])  # fmt: skip


def legend(whole: Box, bars: str) -> tuple[str, float]:
    """Return the legend: colours of the phases, and the meaning of the bar."""
    phases = [p for p in dict.fromkeys(box.phase for box in whole if box.share > 0 or not box.inner) if p != MIXED]
    parts: list[str] = []
    x = 0.0
    for phase in phases:
        fill, line = colours(phase)
        name = phase.replace("_", " ") or "phase not known"
        parts.append(f'<rect x="{x:.0f}" y="0" width="14" height="14" rx="3" fill="{fill}" stroke="{line}"/>')
        parts.append(f'<text x="{x + 19:.0f}" y="11" fill="#444">{text(name)}</text>')
        x += 19 + len(name) * 6.4 + 14
    parts.append(f'<rect x="{x:.0f}" y="5" width="40" height="{BAR}" rx="2" fill="#ddd"/>')
    parts.append(f'<rect x="{x:.0f}" y="5" width="24" height="{BAR}" rx="2" fill="#555"/>')
    parts.append(f'<text x="{x + 46:.0f}" y="11" fill="#444">{text(bars)}</text>')
    return "".join(parts), x + 46 + len(bars) * 6.4


def _box(placed: PlacedBox) -> Iterator[str]:
    box = placed.box
    fill, line = colours(box.phase)
    yield f'<g transform="translate({placed.x:.1f},{placed.y:.1f})">'
    yield f"<title>{text(box.tip)}</title>"
    if box.count > 1:
        for offset in (8, 4):
            yield _frame(offset, -offset, placed, "white", line, 0.5)
    if placed.is_open:
        yield _frame(0, 0, placed, "white", line, 1)
        yield _frame(0, 0, placed, fill, line, 0.28)
    else:
        yield _frame(0, 0, placed, "white" if box.is_own else fill, line, 1, dashed=box.is_own)
    yield from _head(placed, line)
    for wire in placed.wires:
        yield f'<path d="{path(wire)}" fill="none" stroke="{_WIRE}" stroke-width="1.3" marker-end="url(#arrow)"/>'
    for inner in placed.inner:
        yield from _box(inner)
    yield "</g>"


def _frame(x: float, y: float, placed: PlacedBox, fill: str, line: str, opacity: float, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{placed.width:.1f}" height="{placed.height:.1f}" rx="6" fill="{fill}" '
        f'stroke="{line}" fill-opacity="{opacity}"{dashes}/>'
    )


def _head(placed: PlacedBox, line: str) -> Iterator[str]:
    box, middle, y = placed.box, placed.width / 2, 8.0 + LINE - 5
    weight = "normal" if box.is_own else "bold"
    yield f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle" font-weight="{weight}" fill="#222">{text(box.title)}</text>'
    y += LINE - 2
    yield f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle" font-size="10.5" fill="#555">{text(box.detail)}</text>'
    if chips := chips_of(box, is_open=placed.is_open):
        yield from _chips(chips, middle, y + 6, line)
    length = min(placed.width - 20, 160)
    left, top = middle - length / 2, head_height(box, is_open=placed.is_open) - BAR - 4
    yield f'<rect x="{left:.1f}" y="{top:.1f}" width="{length:.1f}" height="{BAR}" rx="2" fill="#0000001a"/>'
    if box.share > 0:
        yield f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(length * box.share, 1):.1f}" height="{BAR}" rx="2" fill="{line}"/>'


def _chips(chips: Sequence[str], middle: float, y: float, line: str) -> Iterator[str]:
    x = middle - sum(chip_width(c) + 4 for c in chips) / 2 + 2
    for chip in chips:
        width = chip_width(chip)
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{CHIP - 2}" rx="8" fill="white" stroke="{line}"/>'
        yield f'<text x="{x + width / 2:.1f}" y="{y + 12:.1f}" text-anchor="middle" font-size="10" fill="{line}">{text(chip)}</text>'
        x += width + 4


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return an arrow as SVG path data: a smooth curve through its points, with straight vertical parts."""
    x, y = points[0]
    steps = [f"M{x:.1f},{y:.1f}"]
    for to_x, to_y in points[1:]:
        half = (y + to_y) / 2
        curve = f"C{x:.1f},{half:.1f} {to_x:.1f},{half:.1f} {to_x:.1f},{to_y:.1f}"
        steps.append(f"L{to_x:.1f},{to_y:.1f}" if x == to_x else curve)
        x, y = to_x, to_y
    return " ".join(steps)

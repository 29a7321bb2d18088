"""A picture as an HTML page in one file. A click opens or closes a box."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from djinn.planning import PipelineResult
from djinn_observability.html.colours import colours
from djinn_observability.html.markup import allowed, text
from djinn_observability.html.scene import Box, open_boxes, scene
from djinn_observability.html.svg import bars, draw, heading, legend

_STYLE = """
body { font: 13px Helvetica, Arial, sans-serif; color: #222; background: white; margin: 16px }
h1 { font-size: 16px; margin: 0 0 8px } .buttons { margin: 8px 0 } .buttons button { font: inherit; margin-right: 6px }
.folds { cursor: pointer } .folds:focus { outline: 2px solid #444; outline-offset: 2px }
"""


def page(result: PipelineResult) -> str:
    """Return the picture of a program as an HTML document."""
    root = scene(result)
    open_parts, title = open_boxes(root), heading(result)
    data = json.dumps(
        {"whole": _box_data(root, open_parts, _Numbers()), "colours": {b.phase: colours(b.phase) for b in root}}
    )
    script = resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    key, width = legend(root, bars(result))
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{text(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{text(title)}</h1>
<svg width="{width:.0f}" height="18" font-size="12">{key}</svg>
<div class="buttons"><button class="first">as at first</button><button class="open">open all</button>\
<button class="close">close all</button> click a box to open or close it; point at it for more</div>
<div class="picture"></div>
<noscript>{draw(root, open_parts, title, bars(result))}</noscript>
<script>
{script}
show({_in_script(data)}, document.body);
</script>
</body>
</html>
"""


class _Numbers:
    """Assign a number to each box."""

    def __init__(self) -> None:
        self.last = -1

    def next(self) -> int:
        self.last += 1
        return self.last


def _box_data(box: Box, opened: frozenset[int], numbers: _Numbers) -> dict[str, Any]:
    """Return a box in the format that `page.js` reads."""
    return {
        "id": numbers.next(),
        "title": allowed(box.title),
        "detail": box.detail,
        "chips": [allowed(chip) for chip in box.chips],
        "ownChips": [allowed(chip) for chip in box.own_chips],
        "tip": allowed(box.tip),
        "phase": box.phase,
        "share": box.share,
        "count": box.count,
        "own": box.is_own,
        "open": id(box) in opened,
        "inner": [_box_data(inner, opened, numbers) for inner in box.inner],
        "rows": box.layout.rows if box.layout is not None else [],
        "wires": box.layout.wires if box.layout is not None else [],
    }


def _in_script(data: str) -> str:
    """Return JSON that cannot close its enclosing script element."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")

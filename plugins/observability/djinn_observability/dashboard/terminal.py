"""The view as tables of rich, for `djinn top`. Texts of others are set as text, never read as markup."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from djinn_observability.dashboard.view import KINDS

_EVENTS: Final = 8
_WIDE: Final = 120  # columns of a terminal with room for memory by kind
_NARROWEST: Final = 8
_TICKS: Final = " ▁▂▃▄▅▆▇█"


def make_screen(
    view: Mapping[str, Any], points: Sequence[Sequence[float]], fields: Sequence[str], width: int = 80
) -> RenderableType:
    """Executors, sessions and events; `points` of the history with the names of their numbers. `width`: columns of the terminal."""
    executors = view["executors"]
    parts: list[RenderableType] = [_heading(view, points, fields), Text(""), _executors(executors, width), Text("")]
    parts.append(_sessions(executors, width) if any(one["sessions"] for one in executors) else Text("no sessions"))
    if view.get("left_out"):
        parts.append(Text(f"and {view['left_out']} sessions that do less"))
    if view["events"]:
        parts += [Text(""), _events(view["events"][-_EVENTS:])]
    return Group(*parts)


def _heading(view: Mapping[str, Any], points: Sequence[Sequence[float]], fields: Sequence[str]) -> Text:
    found = Text(f"djinn {view['version']}, up {duration(view['uptime'])}", style="bold")
    column = fields.index("execute")
    devices = max(1, len(view["executors"]))
    busy = [point[column] / devices for point in points][-60:]
    if len(busy) > 1:
        found.append(f"   busy {_sparkline(busy)} {busy[-1]:.0%}", style="default")
    return found


def _executors(executors: Iterable[Mapping[str, Any]], width: int) -> Table:
    table = _table("executor", "tenant", "state", "memory", "busy", "waiting", "runs/s", *_more(width))
    for one in executors:
        name = " ".join(filter(None, (one["server"], one["device"])))
        limit = one["limit"] or one["device_memory"]
        waiting = f"{one['waiting']:g}, {duration(one['longest_wait'])}" if one["waiting"] else "0"
        memory = f"{size(one['memory'])} of {size(limit)}" if limit else size(one["memory"])
        state = Text(one["state"], style="" if one["state"] == "ready" else "bold red")
        numbers = (f"{one['stages']['execute']:.0%}", waiting, f"{one['submissions']:.1f}")
        table.add_row(
            Text(name), Text(one["tenant"] or "in reserve"), state, *map(Text, (memory, *numbers, *_more(width, one)))
        )
    return table


def _sessions(executors: Iterable[Mapping[str, Any]], width: int) -> Table:
    table = _table("client", "session", "phase", "steps/s", "runs/s", "device", "memory", "link", *_more(width))
    for executor in executors:
        for one in executor["sessions"]:
            rates = (f"{one['steps']:.1f}", f"{one['submissions']:.1f}", f"{one['busy']:.0%}")
            latency = duration(one["latency"]) if one["latency"] else ""
            facts = (
                one["client"],
                one["session"][:8],
                one["phase"].replace("_", " "),
                *rates,
                size(one["memory"]),
                latency,
            )
            table.add_row(*map(Text, (*facts, *_more(width, one))))
    return table


def _events(events: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("time", "tenant", "warning or refusal")
    for one in events:
        clock = time.strftime("%H:%M:%S", time.localtime(one["seconds"])) if one["seconds"] else ""
        table.add_row(*map(Text, (clock, one["tenant"], one["text"])))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):  # the first, a name, is what gives way in a narrow terminal
        width = max(len(heading), _NARROWEST) if number else 0
        table.add_column(heading, header_style="dim", overflow="ellipsis", no_wrap=True, min_width=width)
    return table


def _more(width: int, one: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Memory by kind, or the heading of it, where there is room."""
    if width < _WIDE:
        return ()
    return ("by kind",) if one is None else (_by_kind(one["kinds"]),)


def _by_kind(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {size(kinds[kind])}" for kind in KINDS if kinds.get(kind))


def _sparkline(numbers: Sequence[float]) -> str:
    most = max(*numbers, 0.01)
    return "".join(_TICKS[min(8, round(8 * number / most))] for number in numbers)


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

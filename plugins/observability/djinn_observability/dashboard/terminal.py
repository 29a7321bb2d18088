"""The view as tables in a terminal, for `djinn top`. Names from clients are printed as text, never parsed as markup."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from djinn_observability.dashboard.view import KINDS, OTHER

_EVENTS: Final = 8
_NARROWEST: Final = 16  # columns of a shortened name
SESSIONS: Final = (
    "client", "session", "work", "req/s", "tok/s", "steps/s", "first token", "token", "answer", "busy", "memory", "link", "by kind",
)  # fmt: skip
_TICKS: Final = " ▁▂▃▄▅▆▇█"


def make_screen(
    view: Mapping[str, Any], points: Sequence[Sequence[float]], fields: Sequence[str], width: int = 80
) -> RenderableType:
    """Return the screen with executors, sessions and events. `points`: history. `width`: columns of the terminal."""
    executors = view["executors"]
    parts: list[RenderableType] = [_heading(view, points, fields), Text(""), _executors(executors, width), Text("")]
    parts.append(
        _sessions(executors, width) if any(executor["sessions"] for executor in executors) else Text("no sessions")
    )
    if view.get("left_out"):
        parts.append(Text(f"and {view['left_out']} sessions that do less"))
    if any(executor["sessions"] for executor in executors):
        parts.append(Text("first token, token, answer: median/99th percentile", style="dim"))
    if view["events"]:
        parts += [Text(""), _events(view["events"][-_EVENTS:], width)]
    return Group(*parts)


def _heading(view: Mapping[str, Any], points: Sequence[Sequence[float]], fields: Sequence[str]) -> Text:
    text = Text(f"djinn {view['version']}, up {duration(view['uptime'])}", style="bold")
    column = fields.index("execute")
    devices = max(1, len(view["executors"]))
    busy = [point[column] / devices for point in points][-60:]
    if len(busy) > 1:
        text.append(f"   busy {_sparkline(busy)} {busy[-1]:.0%}", style="default")
    return text


def _executors(executors: Iterable[Mapping[str, Any]], width: int) -> RenderableType:
    rows = []
    for executor in executors:
        name = " ".join(filter(None, (executor["server"], executor["device"])))
        limit = executor["limit"] or executor["device_memory"]
        waiting = (
            f"{executor['waiting']:g}, at most {duration(executor['longest_wait'])}" if executor["waiting"] else "0"
        )
        memory = f"{size(executor['memory'])} of {size(limit)}" if limit else size(executor["memory"])
        state = Text(executor["state"], style="" if executor["state"] == "ready" else "bold red")
        numbers = (
            f"{executor['stages']['execute']:.0%}",
            waiting,
            f"{executor['requests']:.1f}",
            f"{executor['tokens']:.1f}",
        )
        facts = (memory, *numbers, _by_kind(executor["kinds"]))
        rows.append([Text(name), Text(executor["tenant"] or "in reserve"), state, *map(Text, facts)])
    headings = ("executor", "tenant", "state", "memory", "busy", "waiting", "requests/s", "tokens/s", "by kind")
    return _table(headings, rows, width, ("by kind", "tenant", "waiting", "tokens/s", "requests/s", "state"))


def _sessions(executors: Iterable[Mapping[str, Any]], width: int) -> RenderableType:
    rows = []
    for executor in executors:
        for session in executor["sessions"]:
            work = ", ".join(filter(None, (session["model"], session["phase"].replace("_", " "))))
            rates = (_rate(session["requests"]), _rate(session["tokens"]), _rate(session["steps"]))
            latencies = (_latency(session[name]) for name in ("first_token", "token", "answer"))
            usage = (f"{session['busy']:.0%}", size(session["memory"]))
            link = duration(session["latency"]) if session["latency"] else ""
            client = session["client"].replace(" process ", ":")
            facts = (client, session["session"][:8], work, *rates, *latencies, *usage, link, _by_kind(session["kinds"]))
            rows.append([*map(Text, facts)])
    return _table(SESSIONS, rows, width, ("by kind", "link", "session", "work", "steps/s", "answer", "req/s", "token"))


def _events(events: Iterable[Mapping[str, Any]], width: int) -> RenderableType:
    rows = []
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event["seconds"])) if event["seconds"] else ""
        rows.append([*map(Text, (clock, event["tenant"], event["text"]))])
    return _table(("time", "tenant", "warning or refusal"), rows, width, ())


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[Text]], width: int, dispensable: Sequence[str]
) -> RenderableType:
    """Return a table without empty columns. If it is too wide, drop `dispensable` columns in order, and name them."""
    full = [n for n, _ in enumerate(headings) if n == 0 or not rows or any(row[n].cell_len for row in rows)]
    headings, rows = [headings[n] for n in full], [[row[n] for n in full] for row in rows]
    wide = {h: max([len(h), *[row[n].cell_len for row in rows]]) + 1 for n, h in enumerate(headings)}
    text = headings[0] if dispensable else headings[-1]  # a name or a sentence, which may be cut
    column_width = wide[text]
    wide[text] = least = min(column_width, _NARROWEST + 1)
    left_out: list[str] = []
    for heading in dispensable:
        if sum(wide.values()) <= width:
            break
        if heading not in wide:
            continue
        del wide[heading]
        left_out.append(heading)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    wide[text] = max(min(column_width, width - sum(wide.values()) + least), least)
    for heading, columns in wide.items():
        table.add_column(heading, header_style="dim", overflow="ellipsis", no_wrap=True, width=columns - 1)
    for row in rows:
        table.add_row(*[cell for heading, cell in zip(headings, row, strict=True) if heading in wide])
    return Group(table, Text(f"no room for {', '.join(left_out)}", style="dim")) if left_out else table


def _by_kind(kinds: Mapping[str, int]) -> str:
    """Return the bytes of each kind as text, or an empty text if no kind is known."""
    parts = [f"{kind} {size(kinds[kind])}" for kind in KINDS if kinds.get(kind)]
    return "" if set(kinds) <= {OTHER} else ", ".join(parts)


def _rate(number: float) -> str:
    return f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _latency(percentiles: Sequence[float]) -> str:
    """Return median and 99th percentile as text, or an empty text without latencies."""
    p50, p99 = percentiles
    if not p99:
        return ""
    if p50 < 1 <= p99:
        return f"{duration(p50)}/{duration(p99)}"
    unit, factor = ("ms", 1000.0) if p99 < 1 else ("s", 1.0)
    return f"{_rate(factor * p50)}/{_rate(factor * p99)} {unit}"


def _sparkline(numbers: Sequence[float]) -> str:
    largest = max(*numbers, 0.01)
    return "".join(_TICKS[min(8, round(8 * number / largest))] for number in numbers)


def size(count: float) -> str:
    """Return a number of bytes as text, in a unit that suits its size."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Return a number of seconds as text, in a unit that suits its size."""
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

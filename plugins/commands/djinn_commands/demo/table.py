"""Output table of the demo: one column per program, one line per fact, for a terminal of 80 columns."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from djinn_commands.demo.measure import Measured, MeasuredRun

WIDTH = 80
_UNITS = ("B", "kB", "MB", "GB")

# Each line of the table: a heading, and a function that formats it for one program.
Line = tuple[str, Callable[[Measured], Text | str]]


@attrs.frozen
class Setting:
    """Options of a demo: the server's device, and the number of torch threads of each side."""

    device: str
    threads: int


def show(results: Sequence[Measured], setting: Setting, console: Console) -> None:
    """Print the table, then the findings of each remote run."""
    console.print()
    console.print(Padding(Text("The same programs here and on a server", style="bold"), (0, 1)))
    console.print()
    console.print(Padding(_facts(results), (0, 1)))
    console.print()
    console.print(Padding(_findings(results), (0, 0, 0, 1)))
    console.print()
    lines = (
        f"Both sides use {setting.threads} torch thread{'s' if setting.threads > 1 else ''}, and the server {setting.device}. Rows show "
        "the second run unless they say first run. The server is another process on this machine."
    )
    console.print(Padding(Text(lines, style="dim"), (0, 1)), width=WIDTH)


def picture(results: Sequence[Measured], setting: Setting) -> str:
    """Return the output of `show` as an SVG document."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    show(results, setting, console)
    # Without web fonts.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="djinn demo"), flags=re.DOTALL)


def as_json(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the measurements as JSON values."""
    return [attrs.asdict(result) for result in results]


def bytes_text(size: float) -> str:
    """Return a size in bytes as text: 1,500 becomes `1.5 kB`."""
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _facts(results: Sequence[Measured]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for result in results:
        table.add_column(Text.assemble((result.name, "bold cyan"), "\n", (result.title, "cyan")), min_width=17)
    for section in _SECTIONS:
        for heading, cell in section:
            table.add_row(Text(heading, style="dim"), *(cell(result) for result in results))
        table.add_section()
    table.add_row(Text("recognised", style="dim"), *("\n".join(m.recognised.lines()) for m in results))
    return table


def _findings(results: Sequence[Measured]) -> Table:
    table = Table.grid(padding=(0, 2))
    for result in results:
        for number, line in enumerate(result.highlights):
            table.add_row(Text(result.name if number == 0 else "", style="cyan"), Text(line))
    return table


def _equal(measured: Measured) -> Text:
    verdict = measured.verdict
    return Text.assemble(
        ("yes", "bold green") if verdict.equal else ("NO", "bold red"), ", " if verdict.detail else "", verdict.detail
    )


def _seconds(run: MeasuredRun) -> str:
    return f"{run.seconds:.2f} s"


def _plans(run: MeasuredRun) -> str:
    return f"{run.counters['plans_made']} made, {run.counters['plans_reused']} reused"


_SECTIONS: tuple[tuple[Line, ...], ...] = (
    (
        ("equal", _equal),
        ("time here", lambda m: _seconds(m.local)),
        ("time on server", lambda m: _seconds(m.remote)),
        ("time, first run", lambda m: _seconds(m.remote_first)),
    ),
    (
        ("upload", lambda m: f"{bytes_text(m.upload.counters['bytes_sent'])}, {_seconds(m.upload)}"),
        ("sent", lambda m: bytes_text(m.remote.counters["bytes_sent"])),
        ("sent, first run", lambda m: bytes_text(m.remote_first.counters["bytes_sent"])),
        ("received", lambda m: bytes_text(m.remote.counters["bytes_received"])),
        ("round trips", lambda m: str(m.remote.counters["round_trips"])),
    ),
    (
        ("plans", lambda m: _plans(m.remote)),
        ("plans, first run", lambda m: _plans(m.remote_first)),
        (
            "templates reused",
            lambda m: f"{m.remote.counters['templates_reused']} of {m.remote.counters['submissions']}",
        ),
    ),
)

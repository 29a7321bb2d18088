"""The demo's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from djinn_core.demo.measure import Measured

_UNITS = ("B", "kB", "MB", "GB")


def bytes_text(size: float) -> str:
    """A size for people: 1,500 becomes `1.5 kB`."""
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def show(results: Sequence[Measured], console: Console) -> None:
    """Print the table, then what each remote run found."""
    table = Table(title="The same program here and on a server", show_lines=True, title_justify="left")
    table.add_column("what ran", max_width=24)
    table.add_column("equal", max_width=18)
    for heading in ("local", "remote", "sent", "received", "round\ntrips", "plans made,\nreused"):
        table.add_column(heading, justify="right")
    table.add_column("recognised", max_width=26)
    for measured in results:
        table.add_row(*_cells(measured))
    console.print(table)
    for measured in results:
        for line in measured.highlights:
            console.print(f"  {line}", highlight=False, markup=False)
    console.print(
        "\nBoth columns of times are first runs, planning included; the server shares this machine's processors. "
        "What is sent splits into the upload of weights and data, with its time, and everything after it.",
        style="dim",
    )


def as_json(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """The same facts for programs."""
    return [attrs.asdict(measured) for measured in results]


def _cells(measured: Measured) -> tuple[str, ...]:
    verdict, counters, upload = measured.verdict, measured.counters, measured.upload_counters
    mark = "[green]yes[/green]" if verdict.equal else "[red]NO[/red]"
    sent = (
        f"{bytes_text(upload['bytes_sent'])} in {measured.upload_seconds:.2f} s\n+ {bytes_text(counters['bytes_sent'])}"
    )
    return (
        measured.title,
        f"{mark}\n{verdict.detail}",
        f"{measured.local_seconds:.2f} s",
        f"{measured.remote_seconds:.2f} s",
        sent,
        bytes_text(counters["bytes_received"]),
        str(counters["round_trips"]),
        f"{counters['plans_made']}, {counters['plans_reused']}",
        str(measured.recognised),
    )

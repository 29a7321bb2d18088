"""The text and JSON of `djinn status`."""

from __future__ import annotations

from collections.abc import Mapping

import click
import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from djinn_client.runtime.connecting.servers import status_row
from djinn_core.errors import DjinnError
from djinn_core.system.printable import size_text
from djinn_core.wire.messages import PRESSURE, ExecutorStatus, SessionStatus, Status


def show_all(console: Console, statuses: Mapping[str, Status | DjinnError], *, as_json: bool = False) -> None:
    """Print the report or the error of each server. `statuses`: reports and errors by the server's URL."""
    if as_json:
        rows = [status_row(url, reply) for url, reply in statuses.items()]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for url, reply in statuses.items():
        _show(console, url, reply)


def _show(console: Console, url: str, reply: Status | DjinnError) -> None:
    if isinstance(reply, DjinnError):
        reason = str(reply)
        console.print(reason if url in reason else f"{url}: {reason}", markup=False, soft_wrap=True)
        return
    facts = f"{url}: djinn {reply.version}, process {reply.process}, up {reply.uptime:.0f} s"
    console.print(facts, markup=False, soft_wrap=True)
    for number, executor in enumerate(reply.executors):
        _show_executor(console, executor, f"{number} {executor.device.id}" if len(reply.executors) > 1 else "")


def _show_executor(console: Console, executor: ExecutorStatus, numbered: str) -> None:
    device = executor.device
    memory = f"{size_text(device.memory)} of memory" if device.memory else "memory unknown"
    if device.memory and device.memory_free is not None:
        memory = f"{size_text(device.memory_free)} of {size_text(device.memory)} free"
    if device.spill:
        memory += f", memory pressure: {PRESSURE[min(device.pressure, len(PRESSURE) - 1)]}"
    title = f"{numbered or device.id} {device.name}".strip()
    facts = f"  {title}: {executor.state}, process {executor.process}, {memory}"
    console.print(facts, markup=False, soft_wrap=True)
    if not executor.sessions:
        console.print("    no sessions")
        return
    names = ["owner", "memory", "values", "submissions", "phase", "age", "session"]
    idle = any(s.host or s.disk for s in executor.sessions)
    any_shared = any(s.shared for s in executor.sessions)
    others = [*(["shared"] if any_shared else []), *(["idle"] if idle else [])]
    table = Table(*names, *others, box=None, pad_edge=True)
    for s in executor.sessions:
        counts = (size_text(s.memory), f"{s.values:,}", f"{s.submissions:,}", s.phase, f"{s.age:.0f} s")
        more = [*([size_text(s.shared)] if any_shared else []), *([_aside(s)] if idle else [])]
        table.add_row(Text(s.client), *counts, s.session[:8], *more)
    console.print(Padding(table, (0, 0, 0, 3)))


def _aside(session: SessionStatus) -> str:
    places = ((session.host, "in host memory"), (session.disk, "on disk"))
    return ", ".join(f"{size_text(nbytes)} {where}" for nbytes, where in places if nbytes)

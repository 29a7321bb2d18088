"""`djinn status`: what servers are doing, and whose memory it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from djinn_client.cli.server_options import server_options
from djinn_core.errors import DjinnError
from djinn_core.system.printable import size_text
from djinn_core.wire.messages import PRESSURE, ExecutorStatus, SessionStatus, Status

WATCH_SECONDS = 2.0


@click.command(name="status")
@server_options
@click.option("--json", "as_json", is_flag=True, help="As JSON: a list, one object a server.")
@click.option("--watch", is_flag=True, help="Again every two seconds, until Ctrl-C; `djinn top` shows rates, too.")
def command(servers: tuple[str, ...], connection_file: Path | None, as_json: bool, watch: bool) -> None:
    """Show the sessions, executors, devices and memory of servers."""
    from djinn_client.runtime.connecting.status import ask_named

    console = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            found = ask_named(servers, connection_file)
            if watch and console.is_terminal and not as_json:
                console.clear()
            show_all(console, found, as_json=as_json)
            if not watch:
                break
            time.sleep(WATCH_SECONDS)
    if not watch and not any(isinstance(reply, Status) for reply in found.values()):
        raise SystemExit(1)


def show_all(console: Console, found: Mapping[str, Status | DjinnError], *, as_json: bool = False) -> None:
    """Print what servers said, or why they did not."""
    if as_json:
        from djinn_client.runtime.connecting.status import status_row

        rows = [status_row(url, reply) for url, reply in found.items()]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for url, reply in found.items():
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
    shared = any(s.shared for s in executor.sessions)
    others = [*(["shared"] if shared else []), *(["idle"] if idle else [])]
    table = Table(*names, *others, box=None, pad_edge=True)
    for s in executor.sessions:
        counts = (size_text(s.memory), f"{s.values:,}", f"{s.submissions:,}", s.phase, f"{s.age:.0f} s")
        more = [*([size_text(s.shared)] if shared else []), *([_aside(s)] if idle else [])]
        table.add_row(Text(s.client), *counts, s.session[:8], *more)
    console.print(Padding(table, (0, 0, 0, 3)))


def _aside(session: SessionStatus) -> str:
    places = ((session.host, "in host memory"), (session.disk, "on disk"))
    return ", ".join(f"{size_text(nbytes)} {where}" for nbytes, where in places if nbytes)

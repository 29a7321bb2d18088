"""`djinn status`: what servers are doing, and whose memory it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from djinn_core.errors import ConfigurationError, DjinnError
from djinn_core.wire.messages import PRESSURE, ExecutorStatus, Status

PATIENCE = 5.0  # seconds for each server


@click.command(name="status")
@click.option(
    "--server",
    "servers",
    multiple=True,
    help="Name (`djinn login`) or URL of a server; without it, the configured ones.",
)
@click.option("--connection-file", type=click.Path(path_type=Path), help="File that `djinn serve` wrote.")
@click.option("--json", "as_json", is_flag=True, help="As JSON: a list, one object a server.")
def command(servers: tuple[str, ...], connection_file: Path | None, as_json: bool) -> None:
    """Show the sessions, executors, devices and memory of servers."""
    found = _ask(servers, connection_file)
    if as_json:
        rows = [_row(url, answer) for url, answer in found.items()]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        for url, answer in found.items():
            _show(url, answer)
    if not any(isinstance(answer, Status) for answer in found.values()):
        raise SystemExit(1)


def _ask(servers: tuple[str, ...], connection_file: Path | None) -> dict[str, Status | DjinnError]:
    """One answer for each server: gateways with several URLs are asked once."""
    from djinn_core.config import resolve
    from djinn_core.runtime.connecting.status import ask_servers

    given = {"servers": servers or None, "connection_file": connection_file}
    settings = resolve({name: value for name, value in given.items() if value is not None}).settings
    # A person is waiting: shorter than a program would.
    answers = ask_servers(attrs.evolve(settings, connect_timeout=min(settings.connect_timeout, PATIENCE)))
    if not answers:
        raise ConfigurationError(
            "no server is configured: name one with --server (a log-in of `djinn login`, or a URL and DJINN_TOKEN), or the file that `djinn serve` wrote "
            "with --connection-file or DJINN_CONNECTION_FILE. An executor of a program's own shows in that program only"
        )
    return answers


def _row(url: str, answer: Status | DjinnError) -> dict[str, Any]:
    if isinstance(answer, DjinnError):
        return {"url": url, "error": str(answer)}
    facts = {"version": answer.version, "process": answer.process, "uptime": answer.uptime}
    executors = msgspec.to_builtins(answer.executors)
    return {"url": url, "error": None, **facts, "executors": executors, "memory_by_owner": _memory_by_owner(answer)}


def _memory_by_owner(status: Status) -> dict[str, int]:
    """Bytes by name of client."""
    owners: Counter[str] = Counter()
    for executor in status.executors:
        for session in executor.sessions:
            owners[session.client] += session.memory
    return dict(owners)


def _show(url: str, answer: Status | DjinnError) -> None:
    console = Console(highlight=False)
    if isinstance(answer, DjinnError):
        reason = str(answer)
        console.print(reason if url in reason else f"{url}: {reason}", markup=False, soft_wrap=True)
        return
    facts = f"{url}: djinn {answer.version}, process {answer.process}, up {answer.uptime:.0f} s"
    console.print(facts, markup=False, soft_wrap=True)
    for number, executor in enumerate(answer.executors):
        _show_executor(console, executor, f"{number} {executor.device.id}" if len(answer.executors) > 1 else "")


def _show_executor(console: Console, executor: ExecutorStatus, numbered: str) -> None:
    device = executor.device
    memory = f"{_size(device.memory)} of memory" if device.memory else "memory unknown"
    if device.memory and device.memory_free is not None:
        memory = f"{_size(device.memory_free)} of {_size(device.memory)} free"
    if device.spill:
        memory += f", memory pressure: {PRESSURE[min(device.pressure, len(PRESSURE) - 1)]}"
    title = f"{numbered or device.id} {device.name}".strip()
    facts = f"  {title}: {executor.state}, process {executor.process}, {memory}"
    console.print(facts, markup=False, soft_wrap=True)
    if not executor.sessions:
        console.print("    no sessions")
        return
    table = Table("owner", "memory", "values", "submissions", "age", "session", box=None, pad_edge=True)
    for s in executor.sessions:
        counts = (_size(s.memory), f"{s.values:,}", f"{s.submissions:,}", f"{s.age:.0f} s")
        table.add_row(Text(s.client), *counts, s.session[:8])
    console.print(Padding(table, (0, 0, 0, 3)))


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"

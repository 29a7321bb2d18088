"""`djinn top`: the dashboard in a terminal."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

import click

from djinn_core.cli.server_options import server_options

_FIRST_SECONDS: Final = 0.5  # seconds between the first, hidden status and the first displayed one


@click.command()
@server_options
@click.option(
    "--seconds", default=2.0, show_default=True, type=click.FloatRange(0.5), help="Seconds between refreshes."
)
@click.option("--times", type=click.IntRange(1), help="Exit after N refreshes. Default: run until Ctrl-C.")
def top(servers: tuple[str, ...], connection_file: Path | None, seconds: float, times: int | None) -> None:
    """Show what servers are doing, in a terminal.

    If the output is not a terminal, each refresh is printed below the previous one.
    """
    from rich.console import Console
    from rich.live import Live

    from djinn_client.runtime.connecting.servers import read_status
    from djinn_observability.dashboard.history import ALL, FIELDS, History
    from djinn_observability.dashboard.terminal import make_screen
    from djinn_observability.dashboard.view import Sample, make_view, merge, shorten

    def take_sample() -> Sample:
        return Sample(time.monotonic(), merge(read_status(servers, connection_file)))

    console, history = Console(highlight=False), History()
    history.add(before := take_sample())  # rates are differences of two statuses
    time.sleep(min(seconds, _FIRST_SECONDS))
    refreshes = 0
    display = (
        Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    )
    with display as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            history.add(now := take_sample())
            view = shorten(make_view(before, now), console.height if console.is_terminal else 200)
            screen = make_screen(
                {**view, "events": view["events"] + history.notes(ALL)}, history.points(ALL)[1], FIELDS, console.width
            )
            if live is not None:
                live.update(screen, refresh=True)
            else:
                console.print(screen)
            before, refreshes = now, refreshes + 1
            if refreshes == times:
                break
            time.sleep(seconds)

"""Progress bars in notebooks and terminals, for uploads and for reads by the server, if the setting `progress` is on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from djinn.hooks import Event, Observer, hookimpl
from djinn_core.system.front_end import shows_html
from djinn_core.system.printable import size_text
from djinn_core.system.role import is_client

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

djinn_api_version = "2.0"

PATIENCE: Final = 2.0  # seconds of an upload before a bar appears, and of a pause that separates two uploads
_REFRESH: Final = 0.1  # seconds between two updates
_AT_SERVER: Final = MappingProxyType({"downloading": "The server downloads", "reading": "The server reads"})


@hookimpl
def djinn_register_observers() -> Iterable[Observer]:
    """Register the progress bars if standard error is a terminal or the program runs in a notebook."""
    if not is_client():
        return []
    if shows_html():
        return [UploadProgress(NotebookBar), ServerProgress(NotebookBar)]
    if not sys.stderr.isatty():
        return []
    from rich.console import Console

    console = Console(stderr=True)
    return [UploadProgress(lambda: TerminalBar(console)), ServerProgress(lambda: TerminalBar(console))]


def is_wanted() -> bool:
    """Return True while the setting `progress` is on."""
    from djinn_client.runtime.client import settings

    return settings().progress


class ProgressBar(Protocol):
    """A progress bar in a terminal or a notebook."""

    def draw(self, bytes_done: int, total: int, seconds: float, about: str) -> None:
        """Show that `bytes_done` of `total` bytes (0: unknown total) are complete after `seconds`. `about`: name of the work."""

    def remove(self) -> None:
        """Remove the bar."""


class UploadProgress(Observer):
    """Show the progress of an upload: bytes sent, bytes that the server already had, rate, remaining time."""

    name = "upload_progress"

    def __init__(self, make: Callable[[], ProgressBar], patience: float = PATIENCE) -> None:
        """`make`: creates a bar for one upload. `patience`: seconds after which an upload gets a bar."""
        self._make = make
        self._patience = patience
        self._bar: ProgressBar | None = None
        self._bytes_done = self._bytes_recalled = self._bytes_expected = 0
        self._began = self._last_event = self._is_drawn = 0.0

    @property
    def events(self) -> frozenset[str]:  # type: ignore[override] # read again when settings change
        """Return the observed events, as `Observer.events`."""
        return frozenset({"uploading", "uploaded", "completed", "disconnected"} if is_wanted() else ())

    def observe(self, event: Event) -> None:
        """Handle `uploading` (bytes to send) and `uploaded` (bytes that have arrived)."""
        if event.name == "uploaded":
            self._uploaded(int(event.fields["bytes"]), bool(event.fields["recalled"]), event.seconds)
        elif event.name == "uploading":
            self._bytes_expected = self._bytes_done + int(event.fields["bytes"])
        elif event.name == "disconnected" or (event.name == "completed" and not self._bytes_expected):
            self._begin(event.seconds)

    def _begin(self, now: float) -> None:
        if self._bar is not None:
            self._bar.remove()
        self._bar = None
        self._began = self._last_event = self._is_drawn = now
        self._bytes_done = self._bytes_recalled = self._bytes_expected = 0

    def _uploaded(self, nbytes: int, recalled: bool, now: float) -> None:
        if now - self._last_event > max(self._patience, PATIENCE) or not self._bytes_done:
            bytes_expected = self._bytes_expected
            self._begin(now)
            self._bytes_expected = bytes_expected
        self._last_event = now
        self._bytes_done += nbytes
        self._bytes_recalled += nbytes if recalled else 0
        if self._bytes_expected and self._bytes_done >= self._bytes_expected:
            self._begin(now)
        elif now - self._began >= self._patience and now - self._is_drawn >= min(_REFRESH, self._patience):
            self._is_drawn = now
            self._draw(now - self._began)

    def _draw(self, seconds: float) -> None:
        if self._bar is None:
            self._bar = self._make()
        cached = f" ({self._bytes_recalled / 1e9:.1f} GB cached on the server)" if self._bytes_recalled else ""
        self._bar.draw(self._bytes_done, self._bytes_expected, seconds, f"Uploading{cached}")


class ServerProgress(Observer):
    """Show the progress of weights that the server downloads or reads."""

    name = "server_progress"

    def __init__(self, make: Callable[[], ProgressBar], patience: float = PATIENCE) -> None:
        """`make`: creates a bar for one download or read. `patience`: seconds after which it gets a bar."""
        self._make = make
        self._patience = patience
        self._bar: ProgressBar | None = None
        self._work = ""
        self._began = 0.0

    @property
    def events(self) -> frozenset[str] | None:  # type: ignore[override] # read again when settings change
        """Return the observed events, as `Observer.events`."""
        return None if is_wanted() else frozenset()

    def observe(self, event: Event) -> None:
        """Handle `downloading` and `reading` (bytes so far, expected bytes). Other events remove the bar."""
        if event.name not in _AT_SERVER:
            self._end()
            return
        bytes_done, bytes_expected = int(event.fields["done"]), int(event.fields["expected"])
        if event.name != self._work:
            self._end()
            self._work, self._began = event.name, event.seconds
        seconds = event.seconds - self._began
        if bytes_expected and bytes_done >= bytes_expected:
            self._end()
        elif seconds >= self._patience:
            if self._bar is None:
                self._bar = self._make()
            self._bar.draw(bytes_done, bytes_expected, seconds, _AT_SERVER[event.name])

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.remove()
        self._bar, self._work = None, ""


class TerminalBar:
    """Progress bar in a terminal, without a refresh thread, which would compete for the interpreter's lock."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("Uploading")
        self._bar.start()

    def draw(self, bytes_done: int, total: int, seconds: float, about: str) -> None:  # noqa: ARG002 - the bar has a clock of its own
        """Draw the bar, as `ProgressBar.draw`."""
        self._bar.update(self._task, completed=bytes_done, total=total or None, description=about)
        self._bar.refresh()

    def remove(self) -> None:
        """Remove the bar, as `ProgressBar.remove`."""
        self._bar.stop()


class NotebookBar:
    """Progress bar in a notebook cell, as HTML that needs no extension."""

    def __init__(self) -> None:
        self._display: Any = None  # a handle of IPython's

    def draw(self, bytes_done: int, total: int, seconds: float, about: str) -> None:
        """Draw the bar, as `ProgressBar.draw`."""
        rate = bytes_done / seconds if seconds else 0.0
        remaining = f", {(total - bytes_done) / rate:.0f} s left" if total and rate else ""
        text = f"{about}: {size_text(bytes_done)}{f' of {size_text(total)}' if total else ''}, {size_text(int(rate))}/s{remaining}"
        state = f'value="{bytes_done}" max="{total}"' if total else ""
        from html import escape

        self._show(text, f'<progress {state} style="width:20em"></progress> {escape(text)}')

    def remove(self) -> None:
        """Remove the bar, as `ProgressBar.remove`."""
        self._show("", "")

    def _show(self, text: str, html: str) -> None:
        from IPython.display import display

        data = {"text/plain": text, "text/html": html}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.display(data, raw=True, update=True)

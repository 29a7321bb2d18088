"""Progress bars for uploads, and for weights that the server reads, on the standard error output where that is a terminal."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from djinn_core.hookspecs.observers import Event, Observer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PATIENCE: Final = 2.0  # seconds of uploading before anything is shown, and of silence after which another upload begins
_REFRESH: Final = 0.1  # seconds between two pictures
_AT_SERVER: Final = MappingProxyType({"downloading": "The server downloads", "reading": "The server reads"})


def progress_observers(wanted: bool) -> list[Observer]:
    """The progress bars, where the output is a terminal."""
    if not wanted or not sys.stderr.isatty():
        return []
    from rich.console import Console

    console = Console(stderr=True)
    return [UploadProgress(console), ServerProgress(console)]


class UploadProgress:
    """An observer that shows how far an upload is: bytes sent, bytes that the server had, rate, time left."""

    name = "progress"

    def __init__(self, console: Console, patience: float = PATIENCE) -> None:
        self._console = console
        self._patience = patience
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._done = self._recalled = self._expected = 0
        self._began = self._last = self._drawn = 0.0

    def observe(self, event: Event) -> None:
        """Take note of `uploading` (bytes that will follow) and `uploaded` (bytes that have arrived)."""
        if event.name == "uploaded":
            self._uploaded(int(event.fields["bytes"]), bool(event.fields["recalled"]), event.seconds)
        elif event.name == "uploading":
            self._expected = self._done + int(event.fields["bytes"])
        elif event.name == "disconnected" or (event.name == "completed" and not self._expected):
            self._begin(event.seconds)

    def _begin(self, now: float) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
        self._began = self._last = self._drawn = now
        self._done = self._recalled = self._expected = 0

    def _uploaded(self, nbytes: int, recalled: bool, now: float) -> None:
        if now - self._last > max(self._patience, PATIENCE) or not self._done:
            expected = self._expected
            self._begin(now)
            self._expected = expected
        self._last = now
        self._done += nbytes
        self._recalled += nbytes if recalled else 0
        if self._expected and self._done >= self._expected:
            self._begin(now)
        elif now - self._began >= self._patience and now - self._drawn >= min(_REFRESH, self._patience):
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        cached = f" ({self._recalled / 1e9:.1f} GB were there)" if self._recalled else ""
        if self._bar is None:
            self._bar, self._task = _new_bar(self._console)
        assert self._task is not None
        self._bar.update(
            self._task, completed=self._done, total=self._expected or None, description=f"Uploading{cached}"
        )
        self._bar.refresh()


class ServerProgress:
    """An observer that shows how far the server is with weights that it downloads or reads itself."""

    name = "server_progress"

    def __init__(self, console: Console, patience: float = PATIENCE) -> None:
        self._console = console
        self._patience = patience
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what = ""
        self._began = 0.0

    def observe(self, event: Event) -> None:
        """Take note of `downloading` and `reading` (bytes that are there, bytes that are expected); all else ends them."""
        if event.name not in _AT_SERVER:
            self._end()
            return
        done, expected = int(event.fields["done"]), int(event.fields["expected"])
        if event.name != self._what:
            self._end()
            self._what, self._began = event.name, event.seconds
        if expected and done >= expected:
            self._end()
        elif event.seconds - self._began >= self._patience:
            if self._bar is None:
                self._bar, self._task = _new_bar(self._console)
            assert self._task is not None
            self._bar.update(self._task, completed=done, total=expected or None, description=_AT_SERVER[event.name])
            self._bar.refresh()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._task, self._what = None, None, ""


def _new_bar(console: Console) -> tuple[Progress, TaskID]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    # Without a thread that refreshes it: it would take the interpreter's lock from the program.
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    task = bar.add_task("")
    bar.start()
    return bar, task

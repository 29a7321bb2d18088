"""The whole demo: start a server and run the tasks in turn, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from djinn_commands.demo.embeddings import EmbeddingSearch
from djinn_commands.demo.generation import Generation
from djinn_commands.demo.measure import Announce, Measured, measure
from djinn_commands.demo.server import running_server
from djinn_commands.demo.table import Setting
from djinn_commands.demo.task import Advance, Task
from djinn_commands.demo.training import DigitTraining

TASKS: dict[str, Callable[[], Task]] = {
    "embeddings": EmbeddingSearch,
    "generation": Generation,
    "training": DigitTraining,
}


def run_demo(names: Sequence[str], setting: Setting, console: Console) -> list[Measured]:
    """Run the named tasks locally and on a new server, showing progress on `console`.

    Raises:
        StartupError: the server does not start, or the models' weights are not installed.
    """
    import djinn

    torch.set_num_threads(setting.threads)
    tasks = [TASKS[name] for name in names]
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        starting = progress.add_task("starting the demo's server", total=None)
        with running_server(setting.device, setting.threads) as connection:
            progress.remove_task(starting)
            djinn.configure(connection_file=connection)
            try:
                return [_measure_one(make, progress) for make in tasks]
            finally:
                djinn.shut_down()  # stopping a server waits for open sessions


def _measure_one(make: Callable[[], Task], progress: Progress) -> Measured:
    loading = progress.add_task("loading models", total=None)
    task = make()
    progress.remove_task(loading)
    return measure(task, _announcer(progress))


def _announcer(progress: Progress) -> Announce:
    """Return a callback that replaces the progress bar of the previous step by a new bar."""

    def announce(words: str) -> Advance:
        for old in progress.task_ids:
            progress.remove_task(old)
        bar = progress.add_task(words, total=None)
        return lambda done, total: progress.update(bar, completed=done, total=total)

    return announce

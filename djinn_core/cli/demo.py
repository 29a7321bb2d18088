"""`djinn demo`: three real programs, each here and on a server process of its own."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from djinn_core.demo.measure import Announce, Measured, measure
from djinn_core.demo.task import Advance, Task
from djinn_core.errors import StartupError

NEEDED = ("sentence_transformers", "sklearn", "transformers")


@click.command(name="demo")
@click.option("--device", default="cpu", show_default=True, help="What the demo's server computes on, such as cuda:0.")
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
def command(device: str, as_json: bool) -> None:
    """Show Djinn at work: embeddings, generation and training, each beside the same work done locally.

    Starts a server of its own on this machine. Exits with 1 when a result differs.
    """
    from djinn_core.demo.table import as_json as to_json
    from djinn_core.demo.table import show

    _require_libraries()
    _quieten_libraries()
    results = _measure_all(device, Console(stderr=True))
    if as_json:
        click.echo(json.dumps(to_json(results), indent=2))
    else:
        show(results, Console())
    if not all(measured.verdict.equal for measured in results):
        raise click.exceptions.Exit(1)


def _measure_all(device: str, console: Console) -> list[Measured]:
    import djinn
    from djinn_core.demo.server import running_server

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        starting = progress.add_task("starting a server of our own", total=None)
        with running_server(device) as connection:
            progress.remove_task(starting)
            djinn.configure(connection_file=connection)
            return [_measure_one(make, progress) for make in _tasks()]


def _measure_one(make: Callable[[], Task], progress: Progress) -> Measured:
    loading = progress.add_task("loading models", total=None)
    task = make()
    progress.remove_task(loading)
    return measure(task, _announcer(progress))


def _announcer(progress: Progress) -> Announce:
    """One bar at a time: announcing the next run takes the last bar away."""

    def announce(words: str) -> Advance:
        for old in progress.task_ids:
            progress.remove_task(old)
        bar = progress.add_task(words, total=None)
        return lambda done, total: progress.update(bar, completed=done, total=total)

    return announce


def _tasks() -> list[Callable[[], Task]]:
    from djinn_core.demo.embeddings import EmbeddingSearch
    from djinn_core.demo.generation import Generation
    from djinn_core.demo.training import DigitTraining

    return [EmbeddingSearch, Generation, DigitTraining]


def _require_libraries() -> None:
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise StartupError(
            f"The demo needs {', '.join(lacking)}: run `make demo`, or install from the checkout with "
            "`pip install -e '.[demo]'`."
        )


def _quieten_libraries() -> None:
    """The models come from disk: no look-up of anything online, and no progress bars besides ours."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

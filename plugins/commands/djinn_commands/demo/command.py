"""Command `djinn demo`."""

from __future__ import annotations

import json
import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import click

PARTS = ("embeddings", "generation", "training")
NEEDED = ("sentence_transformers", "sklearn", "transformers")


@click.command("demo", short_help="Show Djinn at work on this machine, no GPU needed.")
@click.option("--device", default="cpu", show_default=True, help="Device of the demo's server, such as cuda:0.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Run only this program. May be repeated.")
@click.option("--threads", type=click.IntRange(1), help="Torch threads on each side. Default: half the processors.")
@click.option(
    "--svg", type=click.Path(path_type=Path, dir_okay=False), help="Also write the printed table to an SVG file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
def demo(device: str, only: tuple[str, ...], threads: int | None, svg: Path | None, as_json: bool) -> None:
    """Run three programs locally and on a server, and compare their results: embeddings, generation and training.

    The command starts a server process on this machine. Both sides get the same number of torch threads. The exit status is 1 if a
    result differs.
    """
    _require_libraries()
    _quieten_libraries()
    from rich.console import Console

    from djinn_commands.demo import table
    from djinn_commands.demo.show import run_demo
    from djinn_core.system.limits import processors

    setting = table.Setting(device, threads or max(1, processors() // 2))
    results = run_demo(only or PARTS, setting, Console(stderr=True))
    if as_json:
        click.echo(json.dumps(table.as_json(results), indent=2))
    else:
        table.show(results, setting, Console(highlight=False))
    if svg is not None:
        svg.write_text(table.picture(results, setting))
    if not all(result.verdict.equal for result in results):
        raise click.exceptions.Exit(1)


def _require_libraries() -> None:
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        from djinn.errors import StartupError

        raise StartupError(
            f"`djinn demo` needs the libraries {', '.join(lacking)}: run `make demo` in a checkout of Djinn, or "
            "`pip install scikit-learn sentence-transformers transformers`"
        )


def _quieten_libraries() -> None:
    """Disable network look-ups and progress bars of libraries. The models are on disk."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

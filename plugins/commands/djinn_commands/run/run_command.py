"""Command `djinn run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--server",
    metavar="SERVER",
    help="Name (`djinn login`) or URL of the server to use, in place of the configured servers.",
)
@click.option("--stats", is_flag=True, help="At the end, print counters of sent and awaited work to standard error.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a timeline of the run that Perfetto opens (`.gz`: compressed), and print where the time went to standard error.",
)
@click.option("--verbose", is_flag=True, help="Print on standard error which device `cuda` stands for.")
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is the name of a module, as with `python -m`.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str,
    arguments: tuple[str, ...],
    server: str | None,
    stats: bool,
    trace: Path | None,
    verbose: bool,
    as_module: bool,
) -> None:
    """Run SCRIPT with its ARGUMENTS as Python would, with `cuda` as the remote device.

    Options stand before the script; all later arguments are the script's.
    """
    if not as_module and not Path(script).exists():
        raise click.UsageError(f"There is no file '{script}'.")
    if trace is not None and not trace.parent.is_dir():
        raise click.UsageError(f"There is no folder '{trace.parent}' for the trace.")
    from djinn_commands.script import Script, end_by_interrupt

    interrupted = end_by_interrupt()
    if server is not None:
        os.environ["DJINN_SERVERS"] = server  # inherited by processes that the script starts
    from djinn_commands.run.cuda_names import install_in_processes

    install_in_processes()
    _connect(verbose)
    with _counting(stats), _traced(trace):
        try:
            Script(script, arguments, as_module).run()
        except KeyboardInterrupt:
            interrupted()
            raise SystemExit(130) from None


def _connect(verbose: bool) -> None:
    """Connect now if servers are configured, so that a wrong address or token fails before the script starts."""
    from djinn_client.runtime import client

    settings = client.settings()
    if verbose or settings.servers or settings.connection_file:
        client.init()
    if not verbose:
        return
    device = client.device()
    assert device is not None
    click.echo(f"djinn: cuda:0 is {device.id} of the executor ({device.name})", err=True)


@contextmanager
def _counting(wanted: bool) -> Iterator[None]:
    """Context manager that prints the counters at the end of the block, also after an error."""
    try:
        yield
    finally:
        if wanted:
            from djinn_client.runtime import client

            sys.stdout.flush()
            for name, count in client.stats().items():
                click.echo(f"djinn: {name} {count:,}", err=True)


@contextmanager
def _traced(file: Path | None) -> Iterator[None]:
    """Context manager that writes a timeline of the block to a file at its end, also after an error."""
    if file is None:
        yield
        return
    from djinn.profiler import profile

    timeline = None
    try:
        with profile() as timeline:
            yield
    finally:
        if timeline is not None:
            sys.stdout.flush()
            click.echo(timeline.table(), err=True)
            try:
                timeline.save(file)
            except OSError as error:
                click.echo(f"djinn: the trace cannot be written: {error}", err=True)
            else:
                click.echo(f"djinn: the trace is in {file}: open it at https://ui.perfetto.dev", err=True)

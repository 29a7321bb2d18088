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
    help="Name (`djinn login`) or URL of a server. Default: the configured servers.",
)
@click.option("--stats", is_flag=True, help="At the end, print the counters of djinn.stats() to standard error.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a timeline of the run for Perfetto (compressed if FILE ends in .gz), and print a summary to standard error.",
)
@click.option("--verbose", is_flag=True, help="Print the server's device to standard error.")
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

    Options of `djinn run` come before SCRIPT. All later arguments are passed to the script.
    """
    if not as_module and not Path(script).exists():
        raise click.UsageError(f"There is no file '{script}'. Name a script, or a module with -m.")
    if trace is not None and not trace.parent.is_dir():
        raise click.UsageError(
            f"There is no folder '{trace.parent}' for the trace. Create it, or choose another --trace FILE."
        )
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
    """Connect if servers are configured, so that a wrong address or token fails before the script starts.

    `verbose`: True to connect in any case, and print the device.
    """
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
def _counting(is_enabled: bool) -> Iterator[None]:
    """If `is_enabled` is True, print the counters of `djinn.stats()` at the end of the block, also after an error."""
    try:
        yield
    finally:
        if is_enabled:
            from djinn_client.runtime import client

            sys.stdout.flush()
            for name, count in client.stats().items():
                click.echo(f"djinn: {name} {count:,}", err=True)


@contextmanager
def _traced(file: Path | None) -> Iterator[None]:
    """Write a timeline of the block to `file` at the end of the block, also after an error. If `file` is None, do nothing."""
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
                click.echo(f"djinn: the trace {file} cannot be written: {error}", err=True)
            else:
                click.echo(f"djinn: the trace is in {file}: open it at https://ui.perfetto.dev", err=True)

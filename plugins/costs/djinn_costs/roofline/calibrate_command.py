"""Command `djinn calibrate`: measure the speed of a device for cost models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from djinn_core.cli.server_options import server_options

BACKGROUND_ROUNDS = 1


@click.command("calibrate", short_help="Measure how fast a device is, once, for predictions.")
@server_options
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Number of times that each probe is timed."
)
@click.option(
    "--processor-time",
    is_flag=True,
    help="Measure processor time, for busy machines. Needs a local executor with one thread.",
)
@click.option("--quick", is_flag=True, help="Use a fifth of the probes, which takes seconds.")
@click.option("--background", is_flag=True, help="Like --quick, at low priority, for devices that were never measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def calibrate(
    servers: tuple[str, ...],
    connection_file: Path | None,
    rounds: int,
    processor_time: bool,
    quick: bool,
    background: bool,
    as_json: bool,
) -> None:
    """Measure the device for some seconds, and store the result for all later programs.

    Probes are ordinary PyTorch programs, which run on the device that your programs would use. The result is stored for the
    device, its version of PyTorch and its number of threads, in djinn/calibration in the cache directory.
    """
    from djinn_costs.roofline.calibration.calibrate import calibrate_session
    from djinn_costs.roofline.calibration.session import open_session

    if background:
        measure_beside_other_work(server_settings(servers, connection_file))
        return
    open_session(**server_settings(servers, connection_file))
    with progress(as_json) as report:
        result = calibrate_session(rounds, processor_time=processor_time, quick=quick, report=report)
    if as_json:
        row = {
            "device": result.device.id,
            "name": result.device.name,
            "threads": result.device.threads,
            "file": str(result.file),
        }
        row |= {"models": result.models, "probes": result.probes, "failed": result.failed, "seconds": result.seconds}
        click.echo(json.dumps(row))
        return
    failures = f" ({result.failed} failed)" if result.failed else ""
    click.echo(f"{result.device.id} {result.device.name}: {result.probes} probes{failures} in {result.seconds:.0f} s")
    click.echo(f"{', '.join(result.models)}: kept in {result.file}")


def measure_beside_other_work(setting_values: dict[str, Any]) -> None:
    """Measure a device in the background, at low priority.

    Do nothing if the device was measured before, or if another process is measuring it.
    """
    from djinn_client.runtime import client
    from djinn_client.runtime.planning.calibrations import calibration_file, calibration_of
    from djinn_core.system.limits import lower_priority
    from djinn_core.system.processes import lock_file
    from djinn_costs.roofline.calibration.calibrate import calibrate_session
    from djinn_costs.roofline.calibration.measuring import processor_clock
    from djinn_costs.roofline.calibration.session import open_session

    lower_priority(19)  # applies to child processes, too
    open_session(**setting_values)
    device = client.device()
    assert device is not None
    file = calibration_file(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        try:
            lock_file(lock.fileno())  # held until the process ends
        except BlockingIOError:
            return
        if calibration_of(device) is None:
            own = not (client.settings().servers or client.settings().connection_file)
            is_alone = own and device.kind == "cpu" and device.threads == 1
            has_clock = is_alone and processor_clock(client.executor_process()) is not None
            calibrate_session(BACKGROUND_ROUNDS, processor_time=has_clock, quick=True)


def server_settings(servers: tuple[str, ...], connection_file: Path | None) -> dict[str, Any]:
    """Return the settings that the command-line options set."""
    options = {"servers": servers or None, "connection_file": connection_file}
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the name of the present probe in a terminal. At the end, clear the line."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # No refresh thread: it would disturb the measurement.
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda name: live.update(Text(name), refresh=True)

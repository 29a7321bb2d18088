"""A command for Djinn: `djinn example` says what stands behind the remote device."""

from __future__ import annotations

import click
import pluggy

djinn_api_version = "2.0"

# This module is imported for `djinn --help`, which does not wait for PyTorch. So it imports neither torch nor djinn, and takes
# the hooks' marker from pluggy; what a command needs is imported when it runs.
hookimpl = pluggy.HookimplMarker("djinn")


@click.command("example")
@click.option("--short", is_flag=True, help="Print the name alone.")
def command(short: bool) -> None:
    """Say what stands behind the remote device."""
    import djinn

    djinn.init()
    device = djinn.topology().devices[0]
    click.echo(device.id if short else f"remote_accelerator:0 is {device.id} ({device.name or device.kind})")


@hookimpl
def djinn_register_commands() -> list[click.Command]:
    """The commands that this plugin offers."""
    return [command]

"""A command for Djinn: `djinn example` prints the devices behind the remote device."""

from __future__ import annotations

import click
import pluggy

djinn_api_version = "2.0"

# `djinn --help` imports this module and must not wait for PyTorch. So the module imports neither torch nor djinn, and takes
# the hooks' marker from pluggy. A command imports other modules when it runs.
hookimpl = pluggy.HookimplMarker("djinn")


@click.command("example")
@click.option("--short", is_flag=True, help="Print the name alone.")
def command(short: bool) -> None:
    """Print the devices behind the remote device."""
    import djinn

    djinn.init()
    device = djinn.topology().devices[0]
    click.echo(device.id if short else f"remote_accelerator:0 is {device.id} ({device.name or device.kind})")


@hookimpl
def djinn_register_commands() -> list[click.Command]:
    """Return the commands of this plugin."""
    return [command]

"""`djinn logout`: removes a log-in from this machine."""

from __future__ import annotations

import click

from djinn_client.runtime.connecting.logins import forget_login


@click.command(name="logout")
@click.argument("name")
def command(name: str) -> None:
    """Remove the log-in NAME from this machine. Its token stays valid: the server's operator revokes it."""
    forget_login(name)
    click.echo(f"removed the log-in {name}")

"""Commands `djinn connect` and `djinn disconnect`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from djinn_commands.connect.records import Record, refuse_windows


@click.command(name="connect")
@click.argument("destination")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--name", help="Local name of the server. Default: the name of the host.")
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="Port of ssh there.")
@click.option("-i", "--identity", type=click.Path(exists=True, dir_okay=False), help="Private key for ssh.")
@click.option("-J", "--jump", metavar="HOST", help="Host to jump through, as for ssh.")
@click.option("-F", "--ssh-config", type=click.Path(exists=True, dir_okay=False), help="In place of ~/.ssh/config.")
@click.option(
    "-o", "--ssh-option", "further", multiple=True, metavar="KEY=VALUE", help="Option of ssh. May be repeated."
)
@click.option(
    "--folder", help="Remote folder for the environment, the server's files and jobs. Default: in your data directory."
)
@click.option("--environment", help="Remote environment that has PyTorch and Djinn. Default: a new environment.")
@click.option("--python", help="Remote Python for the environment. Default: a Python that is found.")
@click.option("--torch", help="Requirement for the remote PyTorch. Default: the local version.")
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of wheels to send: PyTorch and others for that machine, and Djinn's, which are built from the checkout otherwise.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Install the version of Djinn of this machine there, and restart the server. Sessions continue if the versions allow it.",
)
@click.option("--background", is_flag=True, help="Not under systemd, even if you may have services there.")
@click.option(
    "--check/--no-check", default=True, help="Train one small step at the end, unless all steps were done already."
)
@click.option("--dry-run", is_flag=True, help="Print each command and do nothing.")
def connect(
    destination: str,
    serve_options: tuple[str, ...],
    name: str | None,
    port: int | None,
    identity: str | None,
    jump: str | None,
    ssh_config: str | None,
    further: tuple[str, ...],
    folder: str | None,
    environment: str | None,
    python: str | None,
    torch: str | None,
    wheels: Path | None,
    update: bool,
    background: bool,
    check: bool,
    dry_run: bool,
) -> None:
    """Install and start a server on DESTINATION, such as alice@gpu-box, and tunnel to it over ssh.

    No step needs root there. SERVE_OPTIONS, after `--`, are options for `djinn serve` there, such as `-- --device cuda:0`. A
    repeated call skips the steps that are done; after a failure, repeat the call.
    """
    from djinn_commands.connect.connecting import Wish, rehearse
    from djinn_commands.connect.connecting import connect as run

    begun = time.monotonic()
    options = _ssh_options(port, identity, jump, ssh_config, further)
    record = _record(destination, name, options, folder, environment)
    wish = Wish(record, python or "", torch or "", wheels, serve_options or None, update, background, check)
    if dry_run:
        for text in rehearse(wish):
            click.echo(f"{text}\n")
        return
    connected = run(wish, lambda text: click.echo(text, err=True))
    click.echo(
        f"{connected.name} is connected ({time.monotonic() - begun:.1f} s): DJINN_SERVERS={connected.name} python train.py, or in a program "
        f'djinn.configure(servers="{connected.name}")'
    )


def _ssh_options(
    port: int | None, identity: str | None, jump: str | None, config: str | None, further: tuple[str, ...]
) -> tuple[str, ...]:
    options: list[str] = []
    files = (("-i", identity), ("-F", config))
    for flag, value in (("-p", str(port) if port else None), ("-J", jump)):
        options += [flag, value] if value else []
    for flag, path in files:
        options += [flag, str(Path(path).expanduser().absolute())] if path else []
    for one in further:
        options += ["-o", one]
    return tuple(options)


def _record(
    destination: str, name: str | None, options: tuple[str, ...], folder: str | None, environment: str | None
) -> Record:
    """Return the stored record of the server, updated by this call's options."""
    refuse_windows()
    import msgspec

    from djinn_commands.connect.records import find_record, is_server_name

    host = destination.rpartition("@")[2]
    record_name = name or host
    if destination.startswith("-") or not destination.strip() or any(mark in destination for mark in " /\n"):
        raise click.BadParameter(
            f"{destination!r} is not an SSH destination: write alice@HOST, or a host of ~/.ssh/config"
        )
    if not is_server_name(record_name):
        raise click.BadParameter(f"the host {record_name!r} cannot be the server's name: give --name NAME")
    for text in (folder, environment):
        if text and ("'" in text or "\n" in text or not text.startswith(("/", "~/"))):
            raise click.BadParameter(f"{text!r} must be an absolute path, or begin with ~/, without quotes")
    existing = find_record(record_name)
    if existing is not None and destination not in {existing.host, existing.name}:
        raise click.ClickException(
            f"the name {record_name!r} belongs to {existing.host}: give this one another --name, or `djinn disconnect --forget {record_name}` first"
        )
    record = existing or Record(record_name, destination, options)
    if existing is None:
        _check_free(record_name)
    return msgspec.structs.replace(
        record,
        options=options or record.options,
        folder=folder or record.folder,
        environment=environment or record.environment,
    )


def _check_free(name: str) -> None:
    from djinn_commands.servers.logins import list_logins

    if any(one.name == name for one in list_logins()):
        raise click.ClickException(
            f"{name!r} is the name of a log-in: give this server another --name, or run `djinn logout {name}`"
        )


@click.command(name="disconnect")
@click.argument("name")
@click.option("--stop", is_flag=True, help="Also end the remote server and its sessions. Jobs continue.")
@click.option(
    "--forget", is_flag=True, help="Remove the log-in and the local files about the server. The server keeps its files."
)
def disconnect(name: str, stop: bool, forget: bool) -> None:
    """Close the tunnel to the server NAME. `djinn connect NAME` opens it again."""
    from djinn_commands.connect.connecting import end_server
    from djinn_commands.connect.records import find_record, forget_record
    from djinn_commands.connect.tunnel import stop_keeper

    record = find_record(name)
    if record is None:
        raise click.ClickException(f"`djinn connect` has made no server {name!r}")
    if stop:
        end_server(record)
        click.echo(f"the server on {record.host} has ended")
    closed = stop_keeper(name)
    click.echo(f"the tunnel to {name} is closed" if closed else f"there was no tunnel to {name}")
    if forget:
        from djinn_commands.servers.logins import forget_login, list_logins

        if any(one.name == name for one in list_logins()):
            forget_login(name)
        forget_record(name)
        click.echo(
            f"removed {name} from this machine; its files on {record.host} are in {record.folder or 'your data directory'}"
        )

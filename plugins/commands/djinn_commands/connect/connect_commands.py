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
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="Port of the SSH server.")
@click.option("-i", "--identity", type=click.Path(exists=True, dir_okay=False), help="Private key for ssh.")
@click.option("-J", "--jump", metavar="HOST", help="Host to jump through, as for ssh.")
@click.option(
    "-F",
    "--ssh-config",
    type=click.Path(exists=True, dir_okay=False),
    help="Configuration file of ssh. Default: ~/.ssh/config.",
)
@click.option(
    "-o", "--ssh-option", "further", multiple=True, metavar="KEY=VALUE", help="Option of ssh. May be repeated."
)
@click.option(
    "--folder",
    help="Remote folder for the environment, the server's files and jobs. Default: ~/.local/share/djinn/connect.",
)
@click.option("--environment", help="Remote environment that has PyTorch and Djinn. Default: a new environment.")
@click.option("--python", help="Remote Python for a new environment. Default: search the usual folders.")
@click.option("--torch", help="Requirement for the remote PyTorch. Default: the local version.")
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Local folder of wheels for the remote machine. If it has no wheels of Djinn, they are built from the checkout.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Install this machine's version of Djinn on DESTINATION and restart the server. Sessions of a compatible version continue.",
)
@click.option("--background", is_flag=True, help="Start the server without systemd.")
@click.option(
    "--check/--no-check", default=True, help="At the end, run one training step on the server and compare its loss."
)
@click.option("--dry-run", is_flag=True, help="Print the commands without running them.")
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

    No step needs root on DESTINATION. SERVE_OPTIONS, after `--`, are passed to its `djinn serve`, such as `-- --device cuda:0`.
    A repeated call skips completed steps. After a failure, repeat the call.
    """
    from djinn_commands.connect.connecting import ConnectRequest, dry_run_commands
    from djinn_commands.connect.connecting import connect as run

    begun = time.monotonic()
    options = _ssh_options(port, identity, jump, ssh_config, further)
    record = _record(destination, name, options, folder, environment)
    request = ConnectRequest(
        record, python or "", torch or "", wheels, serve_options or None, update, background, check
    )
    if dry_run:
        for text in dry_run_commands(request):
            click.echo(f"{text}\n")
        return
    connected = run(request, lambda text: click.echo(text, err=True))
    click.echo(
        f"{connected.name} is connected ({time.monotonic() - begun:.1f} s). Run a program with `DJINN_SERVERS={connected.name} python train.py`, "
        f'or call `djinn.configure(servers="{connected.name}")` in it'
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
            f"{destination!r} is not an SSH destination: write USER@HOST, or a host of ~/.ssh/config"
        )
    if not is_server_name(record_name):
        raise click.BadParameter(
            f"{record_name!r} cannot be a server name: choose one with --name, of at most 64 letters, digits, dots, hyphens and underscores"
        )
    for text in (folder, environment):
        if text and ("'" in text or "\n" in text or not text.startswith(("/", "~/"))):
            raise click.BadParameter(
                f"the remote path {text!r} must begin with / or ~/, and contain no single quote and no line break"
            )
    existing = find_record(record_name)
    if existing is not None and destination not in {existing.host, existing.name}:
        raise click.ClickException(
            f"the server name {record_name!r} is in use for {existing.host}: choose another --name for {destination}, or free it with "
            f"`djinn disconnect --forget {record_name}`"
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
            f"{name!r} is already the name of a log-in: choose another --name for this server, or run `djinn logout {name}` first"
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
        raise click.ClickException(f"`djinn connect` has set up no server {name!r}: {_record_names()}")
    if stop:
        end_server(record)
        click.echo(f"stopped the server on {record.host}")
    closed = stop_keeper(name)
    click.echo(f"closed the tunnel to {name}" if closed else f"no tunnel to {name} was open")
    if forget:
        from djinn_commands.servers.logins import forget_login, list_logins

        if any(one.name == name for one in list_logins()):
            forget_login(name)
        forget_record(name)
        click.echo(
            f"removed {name} from this machine. Its files on {record.host} remain in {record.folder or 'your data directory there'}"
        )


def _record_names() -> str:
    from djinn_commands.connect.records import list_records

    names = ", ".join(record.name for record in list_records())
    return f"it knows {names}" if names else "it knows no server yet"

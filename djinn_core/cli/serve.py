"""`djinn serve`: offer this machine's devices to clients."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import click

from djinn_core.cli.access_options import TlsChoice, access_options, tls_options
from djinn_core.cli.admission_options import RoomChoice, room_options
from djinn_core.cli.listen_options import ListenChoice, listen_options
from djinn_core.directories import cache_directory
from djinn_core.errors import ConfigurationError
from djinn_core.launch.addresses import is_loopback
from djinn_core.launch.http_hosts import allow_host
from djinn_core.launch.private_files import private_directory
from djinn_core.server.gateway.gateway import GatewayOptions, Serving


@click.command(name="serve")
@listen_options
@click.option(
    "--device",
    "devices",
    multiple=True,
    help="Device to offer, such as cpu or cuda:0, or `all`. May be repeated: an executor starts for each.",
)
@click.option("--threads", type=click.IntRange(1), help="Torch threads of each executor.")
@click.option(
    "--memory-gib",
    type=click.FloatRange(0, min_open=True),
    help="How much the sessions of each executor may hold together; what does not fit is spilled. Default: no limit.",
)
@click.option("--memory-policy", default="", help="What --memory-gib evicts first, such as lru. Default: next_use.")
@click.option(
    "--compile",
    "compilers",
    multiple=True,
    help="Compiler for programs that run often, such as inductor. May be repeated: they are asked in this order.",
)
@access_options
@click.option(
    "--connection-file",
    type=click.Path(path_type=Path),
    help="Where to write the URLs and the token once clients can connect. Only you can read it.",
)
@tls_options
@room_options
@click.option(
    "--insecure-plaintext-on-network",
    is_flag=True,
    help="Accept that programs, data and the token travel unencrypted to other machines.",
)
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Directory for weights that clients need not send again. Default: djinn/weights in your cache directory.",
)
@click.option(
    "--store-gib",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    help="How much the store may hold; 0: nothing is kept.",
)
@click.option(
    "--warm",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Safetensors file, or a directory with some, whose weights no client need send. May be repeated.",
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="How long a session waits for a client whose connection broke; 0: it ends at once.",
)
@click.option(
    "--journal",
    type=click.Path(path_type=Path),
    help="Directory for what sessions take, so that they outlive their executor. Default: djinn/journals in your cache directory.",
)
@click.option(
    "--journal-gib",
    type=click.FloatRange(0),
    default=8.0,
    show_default=True,
    help="How much of a session is kept there; one with more, or with 0 all, is lost with its executor. Needs a store.",
)
@click.option(
    "--snapshot-seconds",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    help="How often a session's state is written to its journal, at most; a twentieth of its time is spent on that.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="How long a stop waits for sessions.",
)
def command(
    listen: ListenChoice,
    devices: tuple[str, ...],
    threads: int | None,
    memory_gib: float | None,
    memory_policy: str,
    compilers: tuple[str, ...],
    token_file: Path | None,
    operations_port: int | None,
    audit_log: Path | None,
    connection_file: Path | None,
    tls: TlsChoice,
    room: RoomChoice,
    insecure_plaintext_on_network: bool,
    store: Path | None,
    store_gib: float,
    warm: tuple[Path, ...],
    lease_seconds: float,
    journal: Path | None,
    journal_gib: float,
    snapshot_seconds: float,
    drain_seconds: float,
) -> None:
    """Offer this machine's devices to clients, until SIGTERM or Ctrl-C.

    The token is taken from --token-file, from DJINN_TOKEN, or made up.
    """
    options = GatewayOptions(
        places=listen.places,
        advertise=listen.advertise,
        devices=devices,
        token_file=token_file,
        operations_port=operations_port,
        audit_log=audit_log,
        connection_file=connection_file,
        threads=threads,
        memory=int((memory_gib or 0) * 2**30),
        memory_policy=memory_policy,
        compilers=compilers,
        store=_private(store or cache_directory() / "weights", "weights") if store_gib else None,
        store_bytes=int(store_gib * 2**30),
        warm=_weight_files(warm, store_gib),
        plaintext_accepted=insecure_plaintext_on_network,
        tls=tls.options(listen.names),
        pinned=tls.self_signed,
        lease_seconds=lease_seconds,
        journals=_private(journal or cache_directory() / "journals", "journals of sessions")
        if journal_gib and lease_seconds and store_gib
        else None,
        journal_bytes=int(journal_gib * 2**30),
        snapshot_seconds=snapshot_seconds,
        drain_seconds=drain_seconds,
        most_sessions=room.sessions,
        queue_seconds=room.queue_seconds,
    )
    allow_host(listen.advertise)
    _serve(options)


def _weight_files(given: tuple[Path, ...], store_gib: float) -> tuple[Path, ...]:
    if given and not store_gib:
        raise ConfigurationError("--warm needs a store: leave out `--store-gib 0`")
    found = [tuple(sorted(path.rglob("*.safetensors"))) if path.is_dir() else (path,) for path in given]
    for path, files in zip(given, found, strict=True):
        if not files:
            raise ConfigurationError(f"--warm {path}: there is no file *.safetensors in it")
    return tuple(file.resolve() for files in found for file in files)


def _private(directory: Path, what: str) -> Path | None:
    """A directory that no other user writes to; None where there cannot be one."""
    try:
        return private_directory(directory, what)
    except OSError as error:
        click.echo(f"There will be no {what}: {error}", err=True)
        return None


def _serve(options: GatewayOptions) -> None:
    from djinn_core import config, logs
    from djinn_core.server.gateway.gateway import serve

    settings = config.resolve().settings
    logs.show(options.log_level)
    logs.set_debug_level(settings.debug)
    serve(options.with_settings(settings), _announce, click.echo)


def _announce(serving: Serving) -> None:
    for executor in serving.executors:
        click.echo(f"Executor for {executor.device.id} ({executor.device.name}), process {executor.process_id}")
    for url in serving.urls:
        click.echo(f"Listening at {url}")
    if serving.operations:
        click.echo(f"Operations at {serving.operations}: /livez, /readyz, /metrics")
    if serving.fingerprint:
        click.echo(f"Certificate {serving.fingerprint}")
    click.echo(f"The token ({serving.token_from}) is in {serving.connection_file}")
    click.echo(f"Clients on this machine: DJINN_CONNECTION_FILE={serving.connection_file}")
    if line := _for_other_machines(serving):
        click.echo(f"On other machines: {line}")
        click.echo(f"There with DJINN_TOKEN as well, or a copy of {serving.connection_file} as DJINN_CONNECTION_FILE")


def _for_other_machines(serving: Serving) -> str:
    """Shell command for another machine, without the token; empty where none can reach this server."""
    urls = [url for url in serving.dialled if not is_loopback(urlsplit(url).hostname or "")]
    if not urls:
        return ""
    pinned = f" DJINN_TLS_FINGERPRINTS={serving.fingerprint}" if serving.fingerprint else ""
    return f"export DJINN_SERVERS={','.join(urls)}{pinned}"

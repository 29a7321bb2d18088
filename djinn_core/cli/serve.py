"""`djinn serve`: offer this machine's devices to clients."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import attrs
import click

from djinn_core import logs
from djinn_core.cli.config_options import config_options
from djinn_core.cli.listen_options import ListenChoice, listen_options
from djinn_core.cli.tls_options import TlsChoice, tls_options
from djinn_core.config import resolve
from djinn_core.directories import cache_directory
from djinn_core.errors import ConfigurationError
from djinn_core.launch.addresses import is_loopback
from djinn_core.launch.executor_config import ModelConfig, NetworkConfig, StoreConfig
from djinn_core.launch.http_hosts import allow_host
from djinn_core.launch.private_directories import private_directory
from djinn_core.launch.process import check_platform
from djinn_core.server.gateway.gateway import GatewayHandle, serve
from djinn_core.server.gateway.gateway_config import GatewayConfig


@click.command(name="serve")
@listen_options
@tls_options
@config_options(GatewayConfig, "config")
def command(listen: ListenChoice, tls: TlsChoice, config: GatewayConfig) -> None:
    """Offer this machine's devices to clients, until SIGTERM or Ctrl-C.

    The token is taken from --token-file, from DJINN_TOKEN, or generated.
    """
    check_platform()
    store, recovery = config.executor.store, config.executor.recovery
    directories = attrs.evolve(
        config.executor,
        store=attrs.evolve(
            store,
            directory=_private(store.directory or cache_directory() / "weights", "weights") if store.limit else None,
            warm=_weight_files(store),
        ),
        models=attrs.evolve(
            config.executor.models,
            folders=tuple(folder.resolve() for folder in config.executor.models.folders),
            saving=config.executor.models.saving.resolve() if config.executor.models.saving is not None else None,
            published=_published(config.executor.models, keeps=bool(store.limit)),
        ),
        recovery=attrs.evolve(
            recovery,
            journals=_private(recovery.journals or cache_directory() / "journals", "journals of sessions")
            if recovery.journal_limit and recovery.lease_seconds and store.limit
            else None,
        ),
    )
    allow_host(listen.advertise)
    _serve(
        attrs.evolve(
            config,
            network=NetworkConfig(listen.addresses, tls.options(listen.names)),
            advertise=listen.advertise,
            pinned=tls.self_signed,
            executor=directories,
        )
    )


def _weight_files(store: StoreConfig) -> tuple[Path, ...]:
    given = store.warm
    if given and not store.limit:
        raise ConfigurationError("--warm needs a store: leave out `--store-gib 0`")
    found = [tuple(sorted(path.rglob("*.safetensors"))) if path.is_dir() else (path,) for path in given]
    for path, files in zip(given, found, strict=True):
        if not files:
            raise ConfigurationError(f"--warm {path}: there is no file *.safetensors in it")
    return tuple(file.resolve() for files in found for file in files)


def _published(models: ModelConfig, *, keeps: bool) -> Path | None:
    """The directory for what is published. A server that keeps no weights on its disk (`keeps`) has one if it was named."""
    directory = models.published or (cache_directory() / "published" if keeps else None)
    return _private(directory, "published weights") if models.publish_hours and directory is not None else None


def _private(directory: Path, what: str) -> Path | None:
    """A directory that no other user writes to; None if there cannot be one."""
    try:
        return private_directory(directory, what)
    except OSError as error:
        click.echo(f"There will be no {what}: {error}", err=True)
        return None


def _serve(config: GatewayConfig) -> None:
    settings = resolve().settings
    logs.show(config.log_level)
    logs.set_debug_level(settings.debug)
    serve(config.with_settings(settings), _announce, click.echo)


def _announce(serving: GatewayHandle) -> None:
    for executor in serving.executors:
        device, where = executor.ready.device, f" on {executor.place}" if executor.place else ""
        click.echo(f"Executor for {device.id} ({device.name}), process {executor.process_id}{where}")
    for url in serving.urls:
        click.echo(f"Listening at {url}")
    if serving.operations:
        routes = ", ".join(["/livez", "/readyz", "/metrics", *(f"/{name}" for name in serving.pages)])
        click.echo(f"Operations at {serving.operations}: {routes}")
    if serving.fingerprint:
        click.echo(f"Certificate {serving.fingerprint}")
    if serving.authenticators:
        click.echo(f"Clients are authenticated by tokens and by {', '.join(serving.authenticators)}")
    click.echo(f"The token ({serving.token_from}) is in {serving.connection_file}")
    click.echo(f"Clients on this machine: DJINN_CONNECTION_FILE={serving.connection_file}")
    if line := _for_other_machines(serving):
        click.echo(f"On other machines: {line}")
        click.echo(f"There with DJINN_TOKEN as well, or a copy of {serving.connection_file} as DJINN_CONNECTION_FILE")


def _for_other_machines(serving: GatewayHandle) -> str:
    """Shell command for another machine, without the token; empty if none can reach this server."""
    urls = [url for url in serving.dialled if not is_loopback(urlsplit(url).hostname or "")]
    if not urls:
        return ""
    pinned = f" DJINN_TLS_FINGERPRINTS={serving.fingerprint}" if serving.fingerprint else ""
    return f"export DJINN_SERVERS={','.join(urls)}{pinned}"

"""`djinn serve`: offer this machine's devices to clients. The configuration classes declare most options."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import click

from djinn_core import logs
from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.protocol.addresses import is_loopback, is_wildcard, reaches_network
from djinn_core.protocol.net.http_hosts import allow_host
from djinn_core.registry.embedded_executors import check_platform
from djinn_core.settings import resolve
from djinn_core.system.directories import cache_directory, state_directory
from djinn_core.system.private_directories import private_directory
from djinn_server.gateway.gateway import GatewayHandle, serve
from djinn_server.gateway.gateway_config import GatewayConfig
from djinn_server.launch.executor_config import ExecutorConfig, ModelConfig, NetworkConfig
from djinn_server.launch.flags import FLAG, Flag, flagged
from djinn_server.launch.listen_addresses import ListenAddress, ListenAddresses
from djinn_server.launch.self_signed import self_signed
from djinn_server.launch.server_state import ServerState, open_state


@attrs.frozen
class TlsChoice:
    """TLS options of the command line."""

    certificate: Path | None = flagged(
        None, "--tls-cert", "PEM file with the server's certificate. All connections then use TLS.", file=True
    )
    key: Path | None = flagged(
        None, "--tls-key", "PEM file with the certificate's key, if it is in another file.", file=True
    )
    self_signed: bool = flagged(
        False,
        "--tls-self-signed",
        "Use TLS with a certificate that the server generates. The connection file has its fingerprint.",
    )
    client_authority: Path | None = flagged(
        None,
        "--tls-client-ca",
        "PEM file of an authority. Clients must show a certificate that it has signed.",
        file=True,
    )

    def options(self, names: tuple[str, ...], folder: Path) -> TlsOptions | None:
        """Return the TLS files, or None without TLS.

        Args:
            names: names of the server, for which a generated certificate is valid.
            folder: folder in which a generated certificate is stored.

        Raises:
            ConfigurationError: the options contradict each other, or a certificate cannot be generated.
        """
        if self.self_signed and self.certificate:
            raise ConfigurationError("--tls-self-signed generates a certificate: leave out --tls-cert and --tls-key")
        if self.key and not self.certificate:
            raise ConfigurationError("--tls-key needs the certificate of the key: add --tls-cert FILE")
        if self.self_signed:
            certificate = self_signed(folder, tuple(name for name in names if not is_loopback(name)))
            return TlsOptions(certificate.certificate, certificate.key, self.client_authority)
        if self.certificate is not None:
            return TlsOptions(self.certificate.resolve(), self.key and self.key.resolve(), self.client_authority)
        if self.client_authority:
            raise ConfigurationError("--tls-client-ca needs TLS: add --tls-cert and --tls-key, or --tls-self-signed")
        return None


_PORT = click.IntRange(0, 65535)
_LISTEN_ADDRESS = re.compile(
    r"(?P<name>[A-Za-z][A-Za-z0-9_.+-]*)(=(?:(?P<host>\[[^\]]+\]|[^:\[\]]*):)?(?P<port>[0-9]{1,5}))?"
)


@attrs.frozen
class ListenChoice:
    """Addresses and ports of the command line. `advertise`: host name for the connection file; empty: detected."""

    addresses: ListenAddresses
    advertise: str

    @property
    def names(self) -> tuple[str, ...]:
        """Host names in the options, by which clients may address the server. They exclude the machine's own names."""
        return tuple(name for name in (*self.addresses.hosts, self.advertise) if name and not is_wildcard(name))


def listen_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for listening to a command, which receives them as its argument `listen`, a `ListenChoice`."""

    @click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
    @click.option(
        "--port",
        type=_PORT,
        help="TCP port. Default, or 0: any free port, where clients do not find a restarted server.",
    )
    @click.option("--http-port", type=_PORT, help="HTTP port. Default, or 0: any free port.")
    @click.option(
        "--transport",
        "transports",
        multiple=True,
        metavar="NAME[=[HOST:]PORT]",
        help="Transport to listen with: NAME, NAME=PORT or NAME=HOST:PORT, such as tcp=0.0.0.0:5556. May be repeated.",
    )
    @click.option(
        "--without-transport",
        "without",
        multiple=True,
        metavar="NAME",
        help="Transport that must not listen, such as http. May be repeated.",
    )
    @click.option(
        "--advertise",
        default="",
        metavar="HOST",
        help="Name or address of this machine for other machines, in the connection file. Default: detected.",
    )
    @functools.wraps(command)
    def command_with_listen(
        host: str,
        port: int | None,
        http_port: int | None,
        transports: tuple[str, ...],
        without: tuple[str, ...],
        advertise: str,
        **others: Any,
    ) -> None:
        entries = [_listen_address(text) for text in transports]
        entries += [
            (name, ListenAddress("", number))
            for name, number in (("tcp", port), ("http", http_port))
            if number is not None
        ]
        command(listen=ListenChoice(_listen_addresses(host, entries, without), _host(advertise)), **others)

    return command_with_listen


def _listen_addresses(host: str, entries: list[tuple[str, ListenAddress]], without: tuple[str, ...]) -> ListenAddresses:
    addresses = dict(entries)
    if len(addresses) < len(entries):
        twice = sorted(name for name in addresses if sum(name == other_name for other_name, _ in entries) > 1)
        raise ConfigurationError(f"the port of {' and '.join(twice)} is set twice: set it once, with --transport")
    if contradictions := sorted(addresses.keys() & {*without}):
        raise ConfigurationError(
            f"--without-transport {contradictions[0]} excludes a transport whose port another option sets: remove one of the options"
        )
    return ListenAddresses(host, addresses, frozenset(without))


def _listen_address(text: str) -> tuple[str, ListenAddress]:
    match = _LISTEN_ADDRESS.fullmatch(text)
    if match is None or int(match["port"] or 0) > 65535:
        raise click.BadParameter(f"{text!r} must be NAME, NAME=PORT or NAME=HOST:PORT, such as tcp=0.0.0.0:5556")
    return match["name"], ListenAddress((match["host"] or "").strip("[]"), int(match["port"] or 0))


def _host(text: str) -> str:
    if "/" in text or text.count(":") == 1:
        raise click.BadParameter(
            f"{text!r} must be a name or an address, without scheme and port", param_hint="--advertise"
        )
    return text.strip("[]")


_GIB = 2**30


@attrs.frozen
class _Option:
    """Command-line option of one field. `parameter`: name of its parameter, unique among all nested classes."""

    parameter: str
    flag: Flag
    type: Any
    default: Any

    def decorate(self, command: Callable[..., None]) -> Callable[..., None]:
        default = self.default if self.flag.serve_default is None else self.flag.serve_default
        is_number = isinstance(default, (int, float)) and not isinstance(default, bool) and default > 0
        return click.option(
            self.flag.name,
            self.parameter,
            type=self._click_type(),
            is_flag=self.type is bool,
            multiple=self._is_repeatable,
            default=(default / _GIB if self.flag.gib else default) if is_number else None,
            show_default=is_number,
            help=self.flag.help,
        )(command)

    def read(self, arguments: Mapping[str, Any]) -> Any:
        """Return the value of the field, which is its default if the command line does not set it."""
        value = arguments[self.parameter]
        if value is None:
            return self.default
        return int(value * _GIB) if self.flag.gib else value

    @property
    def _is_repeatable(self) -> bool:
        return typing.get_origin(self.type) is tuple

    def _click_type(self) -> Any:
        flag, kind = self.flag, self.type
        if isinstance(kind, types.UnionType) or self._is_repeatable:
            kind = typing.get_args(kind)[0]
        if kind is Path:
            return click.Path(path_type=Path, dir_okay=not flag.file, exists=flag.exists)
        if kind not in {int, float} or (flag.least, flag.above, flag.most) == (None, None, None):
            return kind
        bounds = click.FloatRange if kind is float or flag.gib else click.IntRange
        return bounds(flag.least if flag.above is None else flag.above, flag.most, min_open=flag.above is not None)


def config_options(config: type, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each flagged field of a configuration class. The command receives it as its argument `name`.

    Fields of nested configuration classes are included. Fields without a flag have their defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = dict(_options(config, name))

        @functools.wraps(command)
        def read(**arguments: Any) -> None:
            values = {parameter: option.read(arguments) for parameter, option in options.items()}
            other_arguments = {parameter: value for parameter, value in arguments.items() if parameter not in options}
            command(**{name: _build(config, name, values)}, **other_arguments)

        decorated: Callable[..., None] = read
        for option in reversed(options.values()):
            decorated = option.decorate(decorated)
        return decorated

    return decorate


def _options(config: type, prefix: str) -> Iterator[tuple[str, _Option]]:
    for field, kind, parameter in _fields(config, prefix):
        flag = field.metadata.get(FLAG)
        if flag is not None:
            yield parameter, _Option(parameter, flag, kind, field.default)
        elif attrs.has(kind):
            yield from _options(kind, parameter)


def _build(config: type, prefix: str, values: Mapping[str, Any]) -> Any:
    arguments = {}
    for field, kind, parameter in _fields(config, prefix):
        if parameter in values:
            arguments[field.name] = values[parameter]
        elif attrs.has(kind):
            arguments[field.name] = _build(kind, parameter, values)
    return config(**arguments)


def _fields(config: Any, prefix: str) -> Iterator[tuple[attrs.Attribute[Any], Any, str]]:
    """Return each field with its type and its parameter name: the names on the path from the outermost class."""
    kinds = typing.get_type_hints(config)
    return ((field, kinds[field.name], f"{prefix}_{field.name}") for field in attrs.fields(config))


@click.command(name="serve")
@listen_options
@config_options(TlsChoice, "tls")
@config_options(GatewayConfig, "config")
def command(listen: ListenChoice, tls: TlsChoice, config: GatewayConfig) -> None:
    """Offer this machine's devices to clients, until SIGTERM or Ctrl-C.

    The token is taken from --token-file, from DJINN_TOKEN, or generated.
    """
    check_platform()
    with open_state(config.state_dir, listen.addresses, functools.partial(click.echo, err=True)) as state:
        tls_folder = (state.folder if config.state_dir else state_directory()) / "tls"
        allow_host(listen.advertise)
        _serve(
            attrs.evolve(
                config,
                network=NetworkConfig(listen.addresses, tls.options(listen.names, tls_folder)),
                advertise=listen.advertise,
                pinned=tls.self_signed,
                state_dir=state.folder,
                lasting=state.lasting,
                executor=_with_folders(config, state),
            )
        )


def _with_folders(config: GatewayConfig, state: ServerState) -> ExecutorConfig:
    """Return the configuration of the executors. Create its folders so that only this user can write to them."""
    store, models, recovery = config.executor.store, config.executor.models, config.executor.recovery
    journals = None
    if recovery.journal_limit and recovery.lease_seconds and store.limit:
        journals = _private(state.folder / "journals", "journals of sessions")
    return attrs.evolve(
        config.executor,
        store=attrs.evolve(
            store,
            directory=_private(store.directory or cache_directory() / "weights", "weights") if store.limit else None,
        ),
        models=attrs.evolve(
            models,
            folders=tuple(folder.resolve() for folder in models.folders),
            saving=models.saving.resolve() if models.saving is not None else None,
            published=_published(models, has_store=bool(store.limit)),
        ),
        recovery=attrs.evolve(recovery, journals=journals),
        state=state.folder,
    )


def _published(models: ModelConfig, *, has_store: bool) -> Path | None:
    """Return the directory of published weights, or None if clients cannot publish weights.

    `has_store`: True if the server has a weight store. Without a store, only an option enables publishing.
    """
    directory = models.published or (cache_directory() / "published" if has_store else None)
    return _private(directory, "published weights") if directory is not None else None


def _private(directory: Path, what: str) -> Path | None:
    """Create and return a directory that only this user can write, or warn and return None. `what`: its contents."""
    try:
        return private_directory(directory, what)
    except OSError as error:
        click.echo(f"The server starts without {what}: {error}", err=True)
        return None


def _serve(config: GatewayConfig) -> None:
    settings = resolve().settings
    logs.show(config.log_level)
    logs.set_debug_level(settings.debug)
    serve(config.with_settings(settings), _announce, click.echo)


def _announce(gateway: GatewayHandle) -> None:
    """Print the addresses of the server in one write, so that a reader gets all lines at once."""
    click.echo("\n".join(_announcement(gateway)))


def _announcement(gateway: GatewayHandle) -> Iterator[str]:
    for executor in gateway.executors:
        device, machine = executor.ready.device, f" on {executor.place}" if executor.place else ""
        yield f"Executor for {device.id} ({device.name}), process {executor.process_id}{machine}"
    for url in gateway.urls:
        yield f"Listening at {url}{', for programs on this host only' if url in gateway.local_urls else ''}"
    if gateway.operations:
        yield f"Operations at {gateway.operations}: {', '.join(gateway.routes)}"
    if gateway.fingerprint:
        yield f"Certificate {gateway.fingerprint}"
    if gateway.authenticators:
        yield f"Clients are authenticated by tokens and by {', '.join(gateway.authenticators)}"
    yield f"The token ({gateway.token_from}) is in {gateway.connection_file}"
    yield f"Clients on this machine: DJINN_CONNECTION_FILE={gateway.connection_file}"
    if line := _for_other_machines(gateway):
        yield f"On other machines: {line}"
        yield "On these machines, also set DJINN_TOKEN to the client's token"
        bare = {host for url in gateway.dialled if (host := urlsplit(url).hostname) and not set(".:") & set(host)}
        for host in sorted(bare - {"localhost"}):
            yield f"If other machines cannot resolve the name {host}, set another one with --advertise HOST"


def _for_other_machines(gateway: GatewayHandle) -> str:
    """Return the shell command for clients on other machines, without the token, or "" if they cannot connect."""
    urls = list(filter(reaches_network, gateway.dialled))
    if not urls:
        return ""
    fingerprint = f" DJINN_TLS_FINGERPRINTS={gateway.fingerprint}" if gateway.fingerprint else ""
    return f"export DJINN_SERVERS={','.join(urls)}{fingerprint}"

"""From settings to a session: a server's gateway and then its executor, or an executor of this program's own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import msgspec
import torch

from djinn_core.config import Settings, bytes_of, unknown_variables
from djinn_core.errors import AccessRefused, ConfigurationError, DjinnError, PluginError, TransportError
from djinn_core.hookspecs.transports import Connection, Limits, TlsOptions, Transport
from djinn_core.launch.addresses import has_transport, transport_for
from djinn_core.launch.connection_file import ConnectionFile, read_connection_file
from djinn_core.launch.own_executor import OwnExecutor
from djinn_core.launch.own_journals import own_journals
from djinn_core.launch.process import ExecutorOptions
from djinn_core.launch.securing import travels_bare, with_tls
from djinn_core.logs import get_logger
from djinn_core.plugins.registry import Registry
from djinn_core.runtime.dialling import (
    Dialled,
    attach,
    client_name,
    given_up,
    reach_executor,
    reach_gateway,
    slowness,
    unreachable,
)
from djinn_core.runtime.patience import with_patience
from djinn_core.runtime.redialling import lasting
from djinn_core.runtime.restarting import outliving
from djinn_core.runtime.resuming import hasten
from djinn_core.runtime.standby.connection import StandbyConnection
from djinn_core.runtime.standby.servers import Candidate, StandbyServer, standby_servers, with_standby
from djinn_core.torch_private import load_early
from djinn_core.wire.messages import Attached, Welcome

_log = get_logger("djinn.runtime")
# Objects have no name of their own, and what `__main__` is differs from process to process.
_NAMELESS = frozenset({"", "__main__"})


@attrs.frozen
class Opened:
    """A session that has begun.

    Attributes:
        connection: where its frames go.
        attached: what the executor said.
        url: the address that was reached; `inline` where the executor is a thread of this process.
        fallbacks: what was tried before, each with the reason why it was given up.
        executor: the process that was started for this session alone, to be closed after it; None where a server runs it.
        addresses: where its server listens, as far as that is known.
    """

    connection: Connection
    attached: Attached
    url: str
    fallbacks: tuple[str, ...] = ()
    executor: OwnExecutor | None = None
    addresses: tuple[str, ...] = ()

    @property
    def now(self) -> Attached:
        """What the executor said that has the session now: of another server, where one has taken it over."""
        return self.connection.attached if isinstance(self.connection, StandbyConnection) else self.attached

    @property
    def process(self) -> int:
        """Process number of the executor, on its machine."""
        return self.executor.process_id if self.executor is not None else self.now.process

    def close(self) -> None:
        """End the connection, and the process that was started for it."""
        self.connection.close()
        if self.executor is not None:
            self.executor.close(0.0)


@attrs.frozen
class Servers:
    """Where to look for servers, and the token to show them: `members` are the addresses of each.

    `tls`: whom to take for them, where their addresses say that TLS is spoken.
    """

    members: tuple[tuple[str, ...], ...]
    token: str = attrs.field(repr=False)
    tls: TlsOptions = attrs.field(factory=TlsOptions)

    def transports(self, plain: Iterable[Transport]) -> tuple[Transport, ...]:
        """The ways to these servers.

        Raises:
            ConfigurationError: it is said whose certificate to take, and an address on the network is one without TLS.
        """
        known = tuple(plain)
        if self.tls.fingerprints or self.tls.authority is not None:
            bare = [url for url in self.urls if travels_bare(url, known)]
            if bare:
                raise ConfigurationError(
                    f"{', '.join(bare)}: there is no TLS at this address, but tls_fingerprints or tls_authority says whose "
                    "certificate to take. Write tcps:// or https://, as `djinn serve` prints it, or unset them"
                )
        return with_tls(known, self.tls)

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses."""
        return tuple(url for urls in self.members for url in urls)


def start_executors(settings: Settings) -> tuple[OwnExecutor, ...]:
    """Start the executors that `open_connections` will need; none where a server is configured, or it will be a thread.

    Returns at once. A process takes seconds until it is ready: what this one has to load can be loaded meanwhile.

    Raises:
        ConfigurationError: as `open_connections`.
        StartupError: a process cannot be started.
    """
    if settings.executor == "inline" or find_servers(settings) is not None:
        return ()
    started: list[OwnExecutor] = []
    try:
        for _ in range(settings.executors):
            started.append(_start_executor(settings))  # noqa: PERF401 - those that have started are closed
    except BaseException:
        for executor in started:
            executor.close(0.0)
        raise
    return tuple(started)


def _start_executor(settings: Settings) -> OwnExecutor:
    options = ExecutorOptions(
        device=settings.device,
        threads=settings.threads,
        plugins=_plugin_names(settings.plugins),
        disable=settings.disable,
        compilers=settings.compilers,
        memory=bytes_of(settings.memory_gib),
        debug=settings.debug,
    )
    return OwnExecutor(options, own_journals() if settings.recover else None, settings.executors)


def open_connections(
    settings: Settings, registry: Registry, executors: Sequence[OwnExecutor] = ()
) -> tuple[Opened, ...]:
    """Begin a session with each device of each configured server; where none is configured, with executors that are started for it.

    Servers that cannot be reached are left out, with a warning, as long as there is one that can.

    Args:
        settings: what is configured.
        registry: has the transports.
        executors: what `start_executors` started for the same settings; they are closed if this raises.

    Raises:
        ConfigurationError: an address or the connection file is malformed, or there is no token.
        PluginError: no transport serves the address; the message names the package that would.
        TransportError: no server can be reached.
        AccessRefused: the server does not let this client in.
        StartupError: the executor of this program's own does not start.
    """
    _warn_of_misspelt(os.environ)
    servers = find_servers(settings)
    if servers is not None:
        reachable = attrs.evolve(registry, transports=servers.transports(registry.transports))
        opened = _stood_by(settings, registry, servers, _open_servers(settings, reachable, servers))
    elif settings.executor == "inline":
        opened = (_open_inline(settings),)
    else:
        opened = _open_embedded(settings, registry, executors or start_executors(settings))
    for member in opened:
        for fallback in member.fallbacks:
            _log.warning(f"fell back from {fallback}", to=member.url)
        _compare_torch(member)
        if travels_bare(member.url, registry.transports):
            _log.warning("everything travels unencrypted, the token included", server=member.url)
    return opened


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Say which variables are almost settings: where one is misspelt, something else runs than was meant."""
    for variable, meant in unknown_variables(environ).items():
        if meant:
            _log.warning(f"the environment sets {variable}, which means nothing to Djinn: did you mean {meant}?")


def find_servers(settings: Settings) -> Servers | None:
    """The configured servers, from `servers` or from the connection file; None where there are none.

    Raises:
        ConfigurationError: the connection file cannot be read, or no token is configured.
    """
    file = None
    if settings.connection_file is not None and not (settings.servers and settings.token):
        file = read_connection_file(settings.connection_file)
    if settings.servers:
        token = settings.token or _token_for(settings.servers, file)
        return Servers(tuple((url,) for url in settings.servers), token, _tls(settings, file))
    if file is not None:
        return Servers((file.urls,), settings.token or file.token, _tls(settings, file))
    return None


def _tls(settings: Settings, file: ConnectionFile | None) -> TlsOptions:
    """What the file says of the certificate counts where the settings say nothing."""
    fingerprints = settings.tls_fingerprints
    if not fingerprints and settings.tls_authority is None and file is not None and file.fingerprint:
        fingerprints = (file.fingerprint,)
    return TlsOptions(settings.tls_certificate, settings.tls_key, settings.tls_authority, fingerprints)


def _token_for(urls: tuple[str, ...], file: ConnectionFile | None) -> str:
    """The file's token, but only for servers that the file is about: a token is not shown to strangers."""
    if file is not None and set(urls) <= set(file.urls):
        return file.token
    raise ConfigurationError(
        f"no token for {', '.join(urls)}: set DJINN_TOKEN, or copy the connection file that `djinn serve` wrote and set "
        "DJINN_CONNECTION_FILE to it instead of naming servers"
    )


def _open_servers(settings: Settings, registry: Registry, servers: Servers) -> tuple[Opened, ...]:
    """A session with each server; one that has several addresses is one server."""
    opened: list[Opened] = []
    failed: list[tuple[str, DjinnError]] = []
    try:
        for urls in sorted(servers.members, key=lambda urls: slowness(urls[0], registry.transports)):
            if any(
                url in member.addresses and has_transport(url, registry.transports) for member in opened for url in urls
            ):
                continue  # another way to the same server
            try:
                members, left_out = _open_remote(settings, registry, urls, servers.token)
            except (TransportError, PluginError) as error:
                reason = error.__cause__
                failed.append((", ".join(urls), reason if isinstance(reason, DjinnError) else error))
                continue
            failed += left_out
            known = {other.attached.instance for other in opened}
            for member in members:
                if member.attached.instance in known:
                    member.connection.close()
                else:
                    opened.append(member)
        if not opened:
            raise unreachable([error for _, error in failed])
    except BaseException:
        for member in opened:
            member.connection.close()
        raise
    fallbacks = tuple(given_up(*pair) for pair in failed)
    return (attrs.evolve(opened[0], fallbacks=(*fallbacks, *opened[0].fallbacks)), *opened[1:])


def _open_remote(
    settings: Settings, registry: Registry, urls: tuple[str, ...], token: str
) -> tuple[list[Opened], list[tuple[str, DjinnError]]]:
    """A session with each wanted device of one server, and the devices that cannot be had, each with the reason."""
    first, *others = settings.server_devices or (settings.device,)
    reached, welcome = _dial(settings, registry, urls, token, first)
    opened = [_opened(reached, welcome.gateway)]
    failed: list[tuple[str, DjinnError]] = []
    try:
        for number in _others_wanted(welcome, (first, *others)):
            try:
                reached, _ = _dial(settings, registry, urls, token, str(number))
            except (TransportError, AccessRefused) as error:
                failed.append((f"device {number} of {urls[0]}", error))
            else:
                opened.append(_opened(reached, welcome.gateway))
    except BaseException:
        for member in opened:
            member.connection.close()
        raise
    return opened, failed


def _others_wanted(welcome: Welcome, wanted: Sequence[str]) -> list[int]:
    """Numbers of the devices beside that of `welcome` which match one of `wanted`, in the server's order."""

    def matches(number: int, device: str, name: str) -> bool:
        return not name or name in {str(number), device, device.partition(":")[0]}

    found = [n for n, device in enumerate(welcome.devices) if any(matches(n, device, name) for name in wanted)]
    return [number for number in found if number != welcome.number]


def _dial(
    settings: Settings, registry: Registry, urls: tuple[str, ...], token: str, device: str
) -> tuple[Dialled, Welcome]:
    attempt = partial(_dial_once, settings, registry, urls, token, device)
    return with_patience(attempt, settings.connect_timeout)


def _dial_once(
    settings: Settings, registry: Registry, urls: tuple[str, ...], token: str, device: str
) -> tuple[Dialled, Welcome]:
    gateway = reach_gateway(urls, token, device, registry.transports, settings.connect_timeout)
    try:
        reached = reach_executor(gateway, registry.transports, settings.connect_timeout)
    except BaseException:
        gateway.connection.close()
        raise
    if reached.connection is not gateway.connection:
        gateway.connection.close()
    number = str(gateway.welcome.number)
    talk = lasting(reached, urls, token, number, registry.transports, settings.connect_timeout)
    return attrs.evolve(reached, connection=talk), gateway.welcome


def _stood_by(
    settings: Settings, registry: Registry, servers: Servers, opened: tuple[Opened, ...]
) -> tuple[Opened, ...]:
    """The sessions, which standby servers may take over where there are some."""
    if not settings.standby:
        return opened
    try:
        if len(opened) > 1:
            _log.warning(
                "standby servers take over sessions with one executor only: this one has several", executors=len(opened)
            )
            return opened
        (only,) = opened
        known = {only.url, *only.addresses}
        first = StandbyServer(next((urls for urls in servers.members if known & {*urls}), servers.urls), servers.token)
        others = [*standby_servers(settings), first]
        candidates = [_candidate(settings, registry, servers, one, only.attached) for one in others]
    except BaseException:
        for member in opened:
            member.connection.close()
        raise
    hasten(only.connection, settings.standby_seconds)
    connection = with_standby(only.connection, only.attached, first.urls[0], candidates, settings)
    # Another server does not have what this one recalls: everything travels, and is written down.
    return (attrs.evolve(only, connection=connection, attached=msgspec.structs.replace(only.attached, recalls=False)),)


def _candidate(
    settings: Settings, registry: Registry, servers: Servers, server: StandbyServer, first: Attached
) -> Candidate:
    plain = registry.transports
    reachable = attrs.evolve(registry, transports=with_tls(plain, server.tls(servers.tls)))

    def dial() -> Dialled:
        device = (settings.server_devices or (settings.device,))[0]
        reached, _ = _dial(settings, reachable, server.urls, server.token, device)
        hasten(reached.connection, settings.standby_seconds)
        return reached

    return Candidate(server.urls[0], first, dial)


def _open_embedded(settings: Settings, registry: Registry, executors: Sequence[OwnExecutor]) -> tuple[Opened, ...]:
    try:
        load_early()  # while the executors start
        return tuple(_open_own(settings, registry, executor) for executor in executors)
    except BaseException:
        for executor in executors:
            executor.close(0.0)
        raise


def _open_own(settings: Settings, registry: Registry, executor: OwnExecutor) -> Opened:
    url = executor.wait_ready(settings.start_timeout).urls[0]
    connection = transport_for(url, registry.transports).connect(url, Limits(), settings.connect_timeout)
    attached = attach(connection, executor.issue_ticket(client_name()), settings.connect_timeout)
    if attached.recovers:
        seconds = settings.connect_timeout, settings.start_timeout
        connection = outliving(connection, attached, executor, registry.transports, seconds)
    return Opened(connection, attached, url, executor=executor)


def _open_inline(settings: Settings) -> Opened:
    # The one place where the client reaches into the server, which it may not import: for debugging they share a process.
    begin: Callable[[Settings, str], tuple[Connection, str]] = importlib.import_module("djinn_core.server.inline").begin
    connection, ticket = begin(settings, client_name())
    return Opened(connection, attach(connection, ticket, settings.connect_timeout), "inline")


def _opened(reached: Dialled, addresses: tuple[str, ...]) -> Opened:
    return Opened(reached.connection, reached.attached, reached.url, reached.fallbacks, addresses=addresses)


def _plugin_names(plugins: tuple[Any, ...] | None) -> tuple[str, ...] | None:
    """Names that another process can load the same plugins by. Objects have none: they stay in this process."""
    if plugins is None:
        return None
    names = [p if isinstance(p, str) else getattr(p, "__name__", "") for p in plugins]
    for plugin, name in zip(plugins, names, strict=True):
        if name in _NAMELESS:
            _log.info("a plugin has no name by which the executor process could load it", plugin=repr(plugin))
    return tuple(name for name in names if name not in _NAMELESS)


def _compare_torch(opened: Opened) -> None:
    ours, theirs = str(torch.__version__), opened.attached.torch
    if ours.partition("+")[0] != theirs.partition("+")[0]:
        _log.warning(
            "client and executor run different torch: ops that one of them lacks fail, results may differ in the last "
            "digits. Install the same version on both sides",
            client=ours,
            executor=theirs,
            url=opened.url,
        )

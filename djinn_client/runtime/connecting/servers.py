"""Configured servers: addresses, tokens and TLS identities; queries for their status; requests to end a session."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from djinn_client.runtime.connecting.handshake import M, Server, greet
from djinn_client.runtime.connecting.logins import find_login, is_login_name
from djinn_core.errors import ConfigurationError, DjinnError
from djinn_core.hookspecs.transports import TlsOptions, Transport
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import has_transport, transport_for
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file
from djinn_core.protocol.tls_transports import is_unprotected, with_tls
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings, resolve
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import PROTOCOL_VERSION, Status, StatusRequest, status_facts

ENGINE: Final = "engine"  # value in `standby`: the engine that started an executor may start a replacement anywhere
PATIENCE = 5.0  # seconds per server when a person waits
AVAILABLE_SECONDS = 4.0  # seconds that a program waits for the answer to "is there a device?"
_log = get_logger("djinn.runtime")
T = TypeVar("T")


@attrs.frozen
class Servers:
    """Addresses of servers, and their common token.

    Attributes:
        members: the addresses of each server.
        token: the client's token for all these servers.
        tls: the certificates to accept at addresses with TLS.
    """

    members: tuple[tuple[str, ...], ...]
    token: str = attrs.field(repr=False)
    tls: TlsOptions = attrs.field(factory=TlsOptions)

    def transports(self, plain: Iterable[Transport]) -> tuple[Transport, ...]:
        """Return the transports to these servers: those of `plain`, and their variants with TLS.

        Raises:
            ConfigurationError: a certificate is configured, but a network address has no TLS.
        """
        candidates = tuple(plain)
        if self.tls.fingerprints or self.tls.authority is not None:
            unencrypted = [url for url in self.urls if is_unprotected(url, candidates)]
            if unencrypted:
                raise ConfigurationError(
                    f"{', '.join(unencrypted)} has no TLS, but the setting tls_fingerprints or tls_authority requires it. "
                    "Write tcps:// or https://, as `djinn serve` prints the address, or unset these settings"
                )
        return with_tls(candidates, self.tls)

    def each(self, plain: Iterable[Transport], timeout: float) -> list[Server]:
        """Return each server once, with `timeout` as its limit. This raises the errors of `transports`."""
        transports = self.transports(plain)
        return [Server(urls, self.token, transports, timeout) for urls in dict.fromkeys(self.members)]

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses."""
        return tuple(url for urls in self.members for url in urls)


def find_servers(settings: Settings, transports: Iterable[Transport] = ()) -> Servers | None:
    """Return the configured servers: from the setting `servers` (log-ins or addresses), or else from the connection file.

    Return None if no server is configured.

    Raises:
        ConfigurationError: the connection file or a log-in cannot be read, or no token is configured.
        PluginError: there is no token, and no transport in `transports` serves an address.
    """
    logins = [server for server in settings.servers if is_login_name(server)]
    if logins:
        return _login_servers(settings, logins)
    file = None
    if settings.connection_file is not None and not (settings.servers and settings.token):
        file = read_connection_file(settings.connection_file)
    if settings.servers:
        token = settings.token or _token_for(settings.servers, file, transports)
        return Servers(tuple((url,) for url in settings.servers), token, _tls(settings, file))
    if file is not None:
        return Servers((file.urls,), settings.token or file.token, _tls(settings, file))
    return None


def _login_servers(settings: Settings, names: list[str]) -> Servers:
    """Return the servers of these log-ins, with the tokens and certificates of the log-ins."""
    files = [find_login(name).content for name in names]
    if len(names) < len(settings.servers) or len({file.token for file in files}) > 1:
        raise ConfigurationError(
            f"{', '.join(settings.servers)}: several servers in one session need the same token. Name one log-in, several "
            "log-ins with the same token, or only addresses with the setting `token`"
        )
    fingerprints = tuple(dict.fromkeys(file.fingerprint for file in files if file.fingerprint))
    tls = attrs.evolve(_tls(settings, None), fingerprints=fingerprints or settings.tls_fingerprints)
    return Servers(tuple(file.urls for file in files), files[0].token, tls)


def server_tls(settings: Settings) -> TlsOptions:
    """Return the TLS options from the settings only."""
    return _tls(settings, None)


def _tls(settings: Settings, file: ConnectionFile | None) -> TlsOptions:
    """Return the TLS options from the settings. Without them, use the connection file's fingerprint."""
    fingerprints = settings.tls_fingerprints
    if not fingerprints and settings.tls_authority is None and file is not None and file.fingerprint:
        fingerprints = (file.fingerprint,)
    return TlsOptions(settings.tls_certificate, settings.tls_key, settings.tls_authority, fingerprints)


def _token_for(urls: tuple[str, ...], file: ConnectionFile | None, transports: Iterable[Transport]) -> str:
    """Return the token in the connection file if the file is for these servers. Other servers must not see the token.

    Raises:
        ConfigurationError: the file is missing, or is for other servers.
        PluginError: no transport serves an address.
    """
    if file is not None and set(urls) <= set(file.urls):
        return file.token
    usable = with_tls(transports, TlsOptions())
    if usable and not any(has_transport(url, usable) for url in urls):
        transport_for(urls[0], usable)  # reports an error of the address, which a token would not fix
    raise ConfigurationError(
        f"no token for {', '.join(urls)}. Set DJINN_TOKEN, or run `djinn login` and name the log-in. Or copy the connection "
        "file that `djinn serve` wrote, and set DJINN_CONNECTION_FILE to it instead of naming servers"
    )


def standby_servers(settings: Settings, default_tls: TlsOptions) -> list[Servers]:
    """Return the servers in the setting `standby`. `default_tls`: TLS options for servers without a fingerprint.

    Raises:
        ConfigurationError: a connection file cannot be read, or there is no token for an address.
    """
    standbys: list[Servers] = []
    for location in settings.standby:
        if location == ENGINE:
            continue
        if "://" in location:
            if not settings.token:
                raise ConfigurationError(
                    f"no token for the standby server {location}: set DJINN_TOKEN, or name its connection file instead"
                )
            standbys.append(Servers(((location,),), settings.token, default_tls))
        else:
            file = read_connection_file(Path(location).expanduser())
            tls = attrs.evolve(default_tls, fingerprints=(file.fingerprint,)) if file.fingerprint else default_tls
            standbys.append(Servers((file.urls,), file.token, tls))
    return standbys


def ask_each(
    servers: Servers, plain: Iterable[Transport], timeout: float, ask: Callable[[Server], T]
) -> Iterator[tuple[str, T | DjinnError]]:
    """Call `ask` for each address of `servers`. Yield the address with the reply, or with the error."""
    for server in servers.each(plain, timeout):
        for url in server.urls:
            reply: T | DjinnError
            try:
                reply = ask(attrs.evolve(server, urls=(url,)))
            except DjinnError as error:
                reply = error
            yield url, reply


def ask_servers(settings: Settings) -> dict[str, Status | DjinnError]:
    """Return the status of each configured server by URL, or its error. A server with several URLs answers once.

    Raises:
        ConfigurationError: the connection file cannot be read, or there is no token.
        PluginError: a requested plugin cannot be used.
    """
    replies: dict[str, Status | DjinnError] = {}
    identities: set[str | tuple[int, ...]] = set()
    for url, reply in ask_configured(settings, ask_status):
        if not isinstance(reply, DjinnError):
            identity = _identity(reply)
            if identity in identities:
                continue
            identities.add(identity)
        replies[url] = reply
    return replies


def ask_configured(settings: Settings, ask: Callable[[Server], T]) -> Iterator[tuple[str, T | DjinnError]]:
    """Call `ask` for each address of the configured servers, as `ask_each`. This raises the errors of `ask_servers`."""
    registry = load_registry(Selection.from_settings(settings), builtins=builtin_plugins(), kinds={"transports"})
    servers = find_servers(settings, registry.transports)
    if servers is None:
        return iter(())
    return ask_each(servers, registry.transports, settings.connect_timeout, ask)


def _identity(status: Status) -> str | tuple[int, ...]:
    """Return the identity of a server. Older servers send only a process id, which is equal in many containers."""
    return status.instance or (status.process, *(executor.process for executor in status.executors))


def command_settings(servers: Sequence[str], connection_file: Path | None) -> Settings:
    """Return the settings for a command about these log-ins or URLs. Timeouts are short, because a person waits."""
    options = {"servers": tuple(servers) or None, "connection_file": connection_file}
    settings = resolve({name: value for name, value in options.items() if value is not None}).settings
    return attrs.evolve(settings, connect_timeout=min(settings.connect_timeout, PATIENCE))


def ask_named(servers: Sequence[str] = (), connection_file: Path | None = None) -> dict[str, Status | DjinnError]:
    """Return the status of servers: of log-ins or URLs, of a connection file, or else of the configured servers.

    Raises:
        ConfigurationError: no server is configured, or a server cannot be used.
        PluginError: a requested plugin cannot be used.
    """
    replies = ask_servers(command_settings(servers, connection_file))
    if not replies:
        raise ConfigurationError(
            "no server is configured. Name a server with --server (a log-in of `djinn login`, or a URL and DJINN_TOKEN), or the "
            "file that `djinn serve` wrote with --connection-file or DJINN_CONNECTION_FILE. A program's own executor is visible "
            "only in that program"
        )
    return replies


def read_status(servers: Sequence[str] = (), connection_file: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of `djinn status --json`: an object per server with `url`, and `error` if the server does not answer.

    Args:
        servers: names of log-ins, or URLs. Empty: the configured servers.
        connection_file: a file that `djinn serve` wrote.

    Raises:
        ConfigurationError: no server is configured, or a server cannot be used.
        PluginError: a requested plugin cannot be used.
    """
    return [status_row(url, reply) for url, reply in ask_named(servers, connection_file).items()]


def status_row(url: str, reply: Status | DjinnError) -> dict[str, Any]:
    """Return the row of a server in `djinn status --json`."""
    if isinstance(reply, DjinnError):
        return {"url": url, "error": str(reply)}
    return {"url": url, "error": None, **status_facts(reply)}


def why_unavailable(settings: Settings, registry: Registry) -> str:
    """Return the reason why no configured server admits this client, or an empty text if a server does.

    This takes at most `AVAILABLE_SECONDS`.
    """
    reasons: list[str] = []
    thread = threading.Thread(target=_ask_any, args=(settings, registry, reasons), name="djinn-available", daemon=True)
    thread.start()
    thread.join(AVAILABLE_SECONDS)
    if thread.is_alive():
        reasons.append(f"no server has answered within {AVAILABLE_SECONDS:g} s")
    return "; ".join(reasons)


def _ask_any(settings: Settings, registry: Registry, reasons: list[str]) -> None:
    """Append the error of each server to `reasons`. Leave the list empty if a server admits this client."""
    try:
        first = find_servers(settings, registry.transports)
        for servers in [first, *standby_servers(settings, first.tls)] if first is not None else []:
            timeout = min(settings.connect_timeout, AVAILABLE_SECONDS)
            for _, reply in ask_each(servers, registry.transports, timeout, ask_status):
                if not isinstance(reply, DjinnError):
                    reasons.clear()
                    return
                reasons.append(str(reply))
    except DjinnError as error:
        reasons.append(str(error))


def ask_status(server: Server) -> Status:
    """Return a server's status, asked at its first address.

    Raises:
        PluginError: no transport serves the address.
        TransportError: no server answers at the address.
        AccessRefused: the token is wrong.
    """
    return ask_once(server, StatusRequest(PROTOCOL_VERSION, server.token), Status)


def ask_once(server: Server, question: Message, kind: type[M]) -> M:
    """Return a server's reply to one question, at its first address. It raises the errors of `greet`."""
    connection, reply = greet(server.urls[0], question, kind, server)
    connection.close()
    return reply


def ask_loads(servers: Sequence[Server]) -> list[tuple[float, int]]:
    """Return the load of each server and its number of recent sessions, queried concurrently.

    If a server does not reply, its load is infinite.
    """

    def ask_one(server: Server) -> tuple[float, int]:
        try:
            status = ask_status(server)
        except DjinnError as error:  # repeated for the user when the session begins
            _log.debug("a server does not report its load", url=server.urls[0], reason=str(error))
            return math.inf, 0
        return status.load, status.recent

    with ThreadPoolExecutor(len(servers), "djinn-loads") as threads:
        return [*threads.map(ask_one, servers)]

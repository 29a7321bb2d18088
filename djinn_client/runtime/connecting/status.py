"""Asking the configured servers what they are doing, and to end a session."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from djinn_client.runtime.connecting.dialling import ask_status, ask_to_kill
from djinn_client.runtime.connecting.servers import find_servers, standby_servers
from djinn_core.errors import ConfigurationError, DjinnError
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings, resolve
from djinn_core.wire.messages import Killed, Status, status_facts

PATIENCE = 5.0  # seconds for each server, where a person waits
AVAILABLE_SECONDS = 4.0  # that a program is made to wait for a reply to "is there a device?"


def ask_servers(settings: Settings) -> dict[str, Status | DjinnError]:
    """By URL the status of each configured server, or why there is none. A server with several URLs answers once.

    Raises:
        ConfigurationError: the connection file cannot be read, or there is no token.
        PluginError: a plugin that was asked for cannot be used.
    """
    registry = load_registry(Selection.from_settings(settings), builtins=builtin_plugins(), kinds={"transports"})
    servers = find_servers(settings, registry.transports)
    if servers is None:
        return {}
    transports = servers.transports(registry.transports)
    replies: dict[str, Status | DjinnError] = {}
    seen: set[str | tuple[int, ...]] = set()
    for url in servers.urls:
        try:
            status = ask_status(url, servers.token, transports, settings.connect_timeout)
        except DjinnError as error:
            replies[url] = error
            continue
        identity = _identity(status)
        if identity not in seen:
            replies[url] = status
        seen.add(identity)
    return replies


def _identity(status: Status) -> str | tuple[int, ...]:
    """Identity of the server that answered. Numbers of processes, which older servers tell alone, are the same in many containers."""
    return status.instance or (status.process, *(executor.process for executor in status.executors))


def ask_named(servers: Sequence[str] = (), connection_file: Path | None = None) -> dict[str, Status | DjinnError]:
    """As `ask_servers`, for a command: of these log-ins or URLs, of a connection file, or else of the configured servers.

    Raises:
        ConfigurationError: there is none, or one cannot be used.
        PluginError: a plugin that was asked for cannot be used.
    """
    given = {"servers": tuple(servers) or None, "connection_file": connection_file}
    settings = resolve({name: value for name, value in given.items() if value is not None}).settings
    # A person is waiting: shorter than a program would.
    replies = ask_servers(attrs.evolve(settings, connect_timeout=min(settings.connect_timeout, PATIENCE)))
    if not replies:
        raise ConfigurationError(
            "no server is configured: name one with --server (a log-in of `djinn login`, or a URL and DJINN_TOKEN), or the file "
            "that `djinn serve` wrote with --connection-file or DJINN_CONNECTION_FILE. An executor of a program's own shows in "
            "that program only"
        )
    return replies


def read_status(servers: Sequence[str] = (), connection_file: Path | None = None) -> list[dict[str, Any]]:
    """The rows of `djinn status --json`: an object for each server, with `url`, and `error` where it does not answer.

    Args:
        servers: names of log-ins, or URLs; none: the configured ones.
        connection_file: a file that `djinn serve` wrote.

    Raises:
        ConfigurationError: there is no server, or one cannot be used.
        PluginError: a plugin that was asked for cannot be used.
    """
    return [status_row(url, reply) for url, reply in ask_named(servers, connection_file).items()]


def status_row(url: str, reply: Status | DjinnError) -> dict[str, Any]:
    """A server in `djinn status --json`."""
    if isinstance(reply, DjinnError):
        return {"url": url, "error": str(reply)}
    return {"url": url, "error": None, **status_facts(reply)}


def why_unavailable(settings: Settings, registry: Registry) -> str:
    """Reason why no configured server lets this client in; empty if one does. Takes `AVAILABLE_SECONDS` at most."""
    reasons: list[str] = []
    asking = threading.Thread(target=_ask_any, args=(settings, registry, reasons), name="djinn-available", daemon=True)
    asking.start()
    asking.join(AVAILABLE_SECONDS)
    if asking.is_alive():
        reasons.append(f"no server has answered within {AVAILABLE_SECONDS:g} s")
    return "; ".join(reasons)


def _ask_any(settings: Settings, registry: Registry, reasons: list[str]) -> None:
    """Fill `reasons` with why each server is of no use; nothing is left in it when one is."""
    try:
        first = find_servers(settings, registry.transports)
        for servers in [first, *standby_servers(settings, first.tls)] if first is not None else []:
            transports = servers.transports(registry.transports)
            for url in servers.urls:
                try:
                    ask_status(url, servers.token, transports, min(settings.connect_timeout, AVAILABLE_SECONDS))
                except DjinnError as error:
                    reasons.append(str(error))
                else:
                    reasons.clear()
                    return
    except DjinnError as error:
        reasons.append(str(error))


def kill_session(settings: Settings, session: str) -> dict[str, Killed | DjinnError]:
    """By URL what each configured server says, as far as it was asked: the first that ends a session of that name is the last.

    Raises:
        ConfigurationError: the connection file cannot be read, or there is no token.
        PluginError: a plugin that was asked for cannot be used.
    """
    servers = find_servers(settings)
    if servers is None:
        return {}
    registry = load_registry(Selection.from_settings(settings), builtins=builtin_plugins(), kinds={"transports"})
    transports = servers.transports(registry.transports)
    replies: dict[str, Killed | DjinnError] = {}
    for url in servers.urls:
        try:
            replies[url] = ask_to_kill(url, servers.token, transports, settings.connect_timeout, session)
        except DjinnError as error:
            replies[url] = error
        else:
            break
    return replies

"""Asking the configured servers what they are doing."""

from __future__ import annotations

from djinn_core.builtins import builtin_plugins
from djinn_core.config import Settings
from djinn_core.errors import DjinnError
from djinn_core.plugins.registry import Selection, load_registry
from djinn_core.runtime.connecting.dialling import ask_status
from djinn_core.runtime.connecting.servers import find_servers
from djinn_core.wire.messages import Status


def ask_servers(settings: Settings) -> dict[str, Status | DjinnError]:
    """By URL the status of each configured server, or why there is none. A server with several URLs answers once.

    Raises:
        ConfigurationError: the connection file cannot be read, or there is no token.
        PluginError: a plugin that was asked for cannot be used.
    """
    servers = find_servers(settings)
    if servers is None:
        return {}
    registry = load_registry(Selection.from_settings(settings), builtins=builtin_plugins(), kinds={"transports"})
    transports = servers.transports(registry.transports)
    answers: dict[str, Status | DjinnError] = {}
    seen: set[tuple[int, ...]] = set()
    for url in servers.urls:
        try:
            status = ask_status(url, servers.token, transports, settings.connect_timeout)
        except DjinnError as error:
            answers[url] = error
            continue
        processes = (status.process, *(executor.process for executor in status.executors))
        if processes not in seen:
            answers[url] = status
        seen.add(processes)
    return answers

"""End a session of a server, for `djinn kill`."""

from __future__ import annotations

from functools import partial

from djinn_client.runtime.connecting.handshake import Server
from djinn_client.runtime.connecting.servers import ask_configured, ask_once
from djinn_core.errors import DjinnError
from djinn_core.settings import Settings
from djinn_core.wire.messages import PROTOCOL_VERSION, Kill, Killed


def kill_session(settings: Settings, session: str) -> dict[str, Killed | DjinnError]:
    """Ask the configured servers one after the other to end a session, until a server ends it. Return the replies by URL.

    `session`: the beginning of the session's name. This raises the errors of `ask_servers`.
    """
    replies: dict[str, Killed | DjinnError] = {}
    for url, reply in ask_configured(settings, partial(ask_to_kill, session=session)):
        replies[url] = reply
        if not isinstance(reply, DjinnError):
            break
    return replies


def ask_to_kill(server: Server, session: str) -> Killed:
    """Ask a server to end the session whose name begins with this text.

    Raises:
        PluginError: no transport serves the address.
        TransportError: no server answers at the address.
        AccessRefused: the token is wrong or read-only, or no session or several match.
    """
    return ask_once(server, Kill(PROTOCOL_VERSION, server.token, session), Killed)

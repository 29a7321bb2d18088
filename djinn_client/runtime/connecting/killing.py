"""`djinn kill`: a server ends a session."""

from __future__ import annotations

from functools import partial

from djinn_client.runtime.connecting.handshake import Server
from djinn_client.runtime.connecting.servers import ask_configured, ask_once
from djinn_core.errors import DjinnError
from djinn_core.settings import Settings
from djinn_core.wire.messages import PROTOCOL_VERSION, Kill, Killed


def kill_session(settings: Settings, session: str) -> dict[str, Killed | DjinnError]:
    """Return the answers of the configured servers, by URL. The first server that ends a session of that name is the last one asked.

    Raises: as `ask_servers`.
    """
    replies: dict[str, Killed | DjinnError] = {}
    for url, reply in ask_configured(settings, partial(ask_to_kill, session=session)):
        replies[url] = reply
        if not isinstance(reply, DjinnError):
            break
    return replies


def ask_to_kill(server: Server, session: str) -> Killed:
    """Have a server end the session whose name begins like this.

    Raises:
        PluginError: no transport serves the address.
        TransportError: no server answers there.
        AccessRefused: the token is wrong or good for looking only, or there is no such session, or several.
    """
    return ask_once(server, Kill(PROTOCOL_VERSION, server.token, session), Killed)

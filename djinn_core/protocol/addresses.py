"""URLs of servers, addresses of machines, and the lookup of transports by scheme."""

from __future__ import annotations

import ipaddress
import socket
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from djinn_core.errors import ConfigurationError, PluginError
from djinn_core.hookspecs.transports import Transport
from djinn_core.system.files import mode_of, user_id
from djinn_core.system.private_directories import DIRECTORY_PREFIX

# Name prefix of an executor's socket directory, which only its user can enter.
SOCKET_NAME: Final = "executor.sock"
_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - recognised, not bound


def parse_url(url: str) -> SplitResult:
    """Return the parts of a server's URL.

    Raises:
        ConfigurationError: the URL has no scheme or a malformed port.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is not a server URL: {error}") from error
    if "://" not in url or not parts.scheme:
        raise ConfigurationError(f"{url!r} is not a server URL: write it as tcp://{url or 'HOST:PORT'}")
    return parts


def transport_for(url: str, transports: Iterable[Transport]) -> Transport:
    """Return the transport for the scheme of `url`.

    Raises:
        ConfigurationError: `url` is not a URL.
        PluginError: no transport serves the scheme. The message names the known schemes.
    """
    scheme = parse_url(url).scheme
    transports = list(transports)
    for transport in transports:
        if scheme in transport.schemes:
            return transport
    schemes = ", ".join(sorted(s for transport in transports for s in transport.schemes)) or "none"
    raise PluginError(
        f"no transport for {scheme}:// is in use here (known: {schemes}). Install or enable a plugin for {scheme}://, on the client "
        "and on the server. `djinn plugins` lists installed, broken and disabled plugins"
    )


def server_name(urls: Sequence[str]) -> str:
    """Return the name of the server at `urls` in messages: its first network URL, or else its local socket."""
    return next((url for url in urls if parse_url(url).hostname), urls[0])


def has_transport(url: str, transports: Iterable[Transport]) -> bool:
    """Return True if a transport serves the scheme of `url`."""
    scheme = urlsplit(url).scheme
    return any(scheme in transport.schemes for transport in transports)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to another address later, so it counts as open to the network


def reaches_network(url: str) -> bool:
    """Return True if the host of `url` is not a loopback address."""
    return not is_loopback(urlsplit(url).hostname or "")


def is_wildcard(host: str) -> bool:
    """Return True if a listener on `host` listens at every interface. Clients cannot connect to such a host name."""
    return host in _WILDCARDS


def at_host(url: str, host: str) -> str:
    """Return `url` with its host replaced by `host`."""
    parts = parse_url(url)
    return f"{parts.scheme}://{network_location(host, parts.port)}{parts.path}"


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches the address `host`.

    Raises:
        OSError: there is no route to `host`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # looks up a route, and sends nothing
        return str(probe.getsockname()[0])


def is_own_socket(url: str) -> bool:
    """Return True if a `unix://` URL leads to a socket in an executor directory of this user."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.scheme != "unix" or path.name != SOCKET_NAME or not path.parent.name.startswith(DIRECTORY_PREFIX):
        return False
    try:
        status = path.parent.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == user_id() and not mode_of(status) & 0o077


def network_location(host: str, port: int | None) -> str:
    """Return `host:port` in URL form, with IPv6 addresses in brackets."""
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if port is None else f"{bracketed}:{port}"

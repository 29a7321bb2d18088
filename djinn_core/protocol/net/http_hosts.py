"""Allowed `Host` headers of Djinn's HTTP servers: protection against DNS rebinding by web pages."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import socket
from typing import Final
from urllib.parse import urlsplit

HOSTS_VARIABLE: Final = "DJINN_HTTP_HOSTS"
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


@functools.lru_cache(maxsize=16)
def own_names(url: str) -> frozenset[str]:
    """Return the allowed host names of the server at `url`.

    They are the names of this machine, the host of `url`, and the names in the variable `HOSTS_VARIABLE`. The variable
    has names by which clients or a proxy call the server, joined by commas.
    """
    listening = urlsplit(url).hostname or ""
    names = ("localhost", socket.gethostname(), listening, *os.environ.get(HOSTS_VARIABLE, "").split(","))
    return frozenset(name.strip().lower() for name in names if name.strip())


def allow_host(name: str) -> None:
    """Allow `name` as a further name of this server; call this before it listens."""
    if name:
        os.environ[HOSTS_VARIABLE] = ",".join(filter(None, (os.environ.get(HOSTS_VARIABLE, ""), name)))


def is_well_formed(host: str) -> bool:
    """Return True if the text can be the value of a `Host` header."""
    return _HOST.fullmatch(host) is not None


def is_called(host: str, names: frozenset[str]) -> bool:
    """Return True if a `Host` header is one of these names, or an IP address, which no web page can forge."""
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match.group(1).strip("[]").lower()
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in names
    return True

"""The transport for `tcp://` URLs."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Transport, hookimpl
from djinn_tcp.transport import TcpTransport

__all__ = ["TcpTransport", "djinn_api_version", "djinn_register_transports"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_transports() -> Iterable[Transport]:
    """Return the transport `tcp`."""
    return [TcpTransport()]

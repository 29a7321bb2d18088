"""The transport for `http://` URLs."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Transport, hookimpl
from djinn_http.transport import HttpTransport

__all__ = ["HttpTransport", "djinn_api_version", "djinn_register_transports"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_transports() -> Iterable[Transport]:
    """Register the transport `http`."""
    return [HttpTransport()]

"""The transport for `ucx://` URLs: frames over a socket, large buffers over UCX."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Transport, hookimpl
from djinn_ucx.transport import UcxTransport

__all__ = ["UcxTransport", "djinn_api_version", "djinn_register_transports"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_transports() -> Iterable[Transport]:
    """Return the transport `ucx`. UCX is imported when an address uses it."""
    return [UcxTransport()]

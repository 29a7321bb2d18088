"""Status of servers, and pages of the operations listener outside of a gateway, for plugins with commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import importing

# Each name is imported when it is asked for: not every machine has both client and server.
if TYPE_CHECKING:
    from djinn_client.runtime.connecting.status import read_status
    from djinn_server.gateway.local_pages import PageServer

__all__ = ["PageServer", "read_status"]

_PLACES = {
    "djinn_client.runtime.connecting.status": "read_status",
    "djinn_server.gateway.local_pages": "PageServer",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)

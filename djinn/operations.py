"""Status of servers, and pages of the operations listener outside of a gateway, for plugins with commands."""

from djinn_client.runtime.connecting.status import read_status
from djinn_server.gateway.local_pages import PageServer

__all__ = ["PageServer", "read_status"]

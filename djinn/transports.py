"""For authors of transports: the contract, frames, and connections over sockets."""

from typing import TYPE_CHECKING

from djinn._lazy_names import importing
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import (
    Buffer,
    Connection,
    Frame,
    Limits,
    LinkFacts,
    Listener,
    TlsOptions,
    Transport,
    TransportCapabilities,
)
from djinn_core.logs import get_logger
from djinn_core.protocol.net.socket_transports import SocketTransport
from djinn_core.protocol.net.sockets import (
    AcceptedConnection,
    SocketConnection,
    SocketListener,
    send_buffers,
    serve_connection,
    wait_readable,
)
from djinn_core.protocol.net.streams import StreamConnection
from djinn_core.system.interrupts import LOOK_SECONDS, interrupt_mask
from djinn_core.system.printable import printable
from djinn_core.system.tcp import DONTWAIT, READABLE, Poll, keep_alive, poller, wait_in_kernel
from djinn_core.wire.frames import FrameDecoder, allocate, encode_frame, flatten

# For servers, and for TLS: each client has the transports, and imports of all this what it uses (`__getattr__`).
if TYPE_CHECKING:
    from djinn_core.protocol.net.tls_contexts import check_fingerprint, client_context, server_context
    from djinn_core.protocol.net.tls_sockets import AcceptedTlsConnection, TlsConnection, TlsSocket, dial_tls
    from djinn_server.launch.http_hosts import HOSTS_VARIABLE, is_called, is_well_formed, own_names

__all__ = [
    "DONTWAIT",
    "HOSTS_VARIABLE",
    "LOOK_SECONDS",
    "READABLE",
    "AcceptedConnection",
    "AcceptedTlsConnection",
    "Buffer",
    "Connection",
    "Frame",
    "FrameDecoder",
    "Limits",
    "LinkFacts",
    "Listener",
    "Poll",
    "ProtocolError",
    "SocketConnection",
    "SocketListener",
    "SocketTransport",
    "StreamConnection",
    "TlsConnection",
    "TlsOptions",
    "TlsSocket",
    "Transport",
    "TransportCapabilities",
    "TransportError",
    "allocate",
    "check_fingerprint",
    "client_context",
    "dial_tls",
    "encode_frame",
    "flatten",
    "get_logger",
    "interrupt_mask",
    "is_called",
    "is_well_formed",
    "keep_alive",
    "own_names",
    "poller",
    "printable",
    "send_buffers",
    "serve_connection",
    "server_context",
    "wait_in_kernel",
    "wait_readable",
]

_PLACES = {
    "djinn_server.launch.http_hosts": "HOSTS_VARIABLE is_called is_well_formed own_names",
    "djinn_core.protocol.net.tls_contexts": "check_fingerprint client_context server_context",
    "djinn_core.protocol.net.tls_sockets": "AcceptedTlsConnection TlsConnection TlsSocket dial_tls",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)

"""For authors of transports: the contract, frames, and connections over sockets."""

from djinn_core.builtins.sockets import (
    SocketConnection,
    SocketListener,
    send_buffers,
    serve_connection,
    wait_readable,
)
from djinn_core.builtins.streams import StreamConnection
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import (
    Buffer,
    Connection,
    Frame,
    Limits,
    Listener,
    Transport,
    TransportCapabilities,
)
from djinn_core.logs import get_logger
from djinn_core.wire.frames import FrameDecoder, allocate, encode_frame

__all__ = [
    "Buffer",
    "Connection",
    "Frame",
    "FrameDecoder",
    "Limits",
    "Listener",
    "ProtocolError",
    "SocketConnection",
    "SocketListener",
    "StreamConnection",
    "Transport",
    "TransportCapabilities",
    "TransportError",
    "allocate",
    "encode_frame",
    "get_logger",
    "send_buffers",
    "serve_connection",
    "wait_readable",
]
